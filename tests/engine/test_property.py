"""Any pool, any budget, any arrival order, any aborts give the same tokens."""

from __future__ import annotations

import random

import workloads
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=30)
@given(st.data())
def test_any_workload_gives_each_request_the_tokens_that_it_has_alone(data):
    workloads.run(workloads.draw_workload(lambda low, high: data.draw(st.integers(low, high))))


def test_drawn_workloads_preempt_chunk_and_abort():
    """The property is worth little if its workloads are tame."""
    drawn = [workloads.draw_workload(random.Random(seed).randint) for seed in range(16)]
    preemptions = [workloads.run(workload) for workload in drawn]
    assert sum(count > 0 for count in preemptions) >= 4
    assert {workload.shape for workload in drawn} == {0, 1, 2}
    assert sum(arrival.abort_step is not None for workload in drawn for arrival in workload.arrivals) >= 5
