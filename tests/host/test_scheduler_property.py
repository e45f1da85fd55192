"""Whatever the pool, the budget, the limits, the arrivals and the aborts: a request gets the tokens it gets alone."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import draw_workload, run


@st.composite
def workloads(draw):
    return draw_workload(lambda low, high: draw(st.integers(low, high)))


@settings(max_examples=400, deadline=None)
@given(workloads())
def test_any_workload_gives_each_request_the_tokens_it_gets_alone(workload):
    run(workload)


def test_the_random_workloads_reach_preemption_chunking_and_aborts():
    schedulers = [run(draw_workload(random.Random(seed).randint)) for seed in range(100)]
    assert sum(scheduler.num_preemptions > 0 for scheduler in schedulers) >= 20
    assert max(scheduler.num_preemptions for scheduler in schedulers) >= 5
