"""What the dashboard is told, and what looking costs, one rule a test. The clock is the test's."""

import asyncio
import json

import pytest
from fake_server import FakeEngine, Output

from jpaged.server.watch import LATENCY_WINDOW, MAX_ENDED, MAX_GAPS, Watch


class Looked:
    """A watch over a fake engine, with a clock that is set by hand."""

    def __init__(self):
        self.engine, self.now, self.num_looks = FakeEngine(), 100.0, 0
        self.seconds_per_look = 0.0
        self.watch = Watch(self, clock=lambda: self.now)

    async def run(self, function):
        self.num_looks += 1
        self.now += self.seconds_per_look
        await asyncio.sleep(0)
        return function(self.engine)

    def look(self, after=0.5, **options):
        self.now += after
        return json.loads(asyncio.run(self.watch.state(**options)))


@pytest.fixture
def looked():
    return Looked()


def add_and_end(looked, num_tokens=3):
    looked.engine.add("a", [1, 2, 3], max_tokens=num_tokens)
    looked.engine.step(num_tokens)
    looked.watch.record(Output(looked.engine.ended[-1]))


def test_the_first_look_has_no_rates_and_the_next_ones_have_those_since(looked):
    looked.engine.add("a", list(range(40)), max_tokens=30)
    looked.engine.step(4)
    assert looked.look()["history"] == []
    looked.engine.step(5)
    (sample,) = looked.look(after=0.5)["history"]
    assert sample["seconds"] == 0.5
    assert (sample["steps"], sample["output_tokens"], sample["scheduled_tokens"]) == (5, 5, 5)
    assert (sample["running"], sample["used"]) == (1, 3)


def test_an_answer_holds_the_snapshot_and_the_totals(looked):
    looked.engine.add("a", [1, 2, 3])
    looked.engine.step()
    state = looked.look()
    assert state["snapshot"]["requests"][0]["id"] == "a"
    assert state["totals"]["num_steps"] == 1


def test_only_samples_after_the_time_that_is_asked_for_are_told(looked):
    looked.look()
    first, second = looked.look()["history"], looked.look()["history"]
    assert len(first) == 1 and len(second) == 2
    assert looked.look(since=second[0]["time"])["history"][0] == second[1]


def test_however_often_it_is_asked_it_looks_four_times_a_second_at_most(looked):
    for _ in range(50):
        looked.look(after=0.05)
    assert looked.num_looks <= 12


def test_several_who_ask_at_once_share_one_look(looked):
    async def ask():
        return await asyncio.gather(*(looked.watch.state() for _ in range(10)))

    assert len(set(asyncio.run(ask()))) == 1
    assert looked.num_looks == 1


def test_what_was_counted_while_nobody_looked_is_no_rate_of_now(looked):
    looked.look()
    looked.look()
    looked.engine.add("a", [1, 2, 3])
    looked.engine.step(9)
    assert len(looked.look(after=60)["history"]) == 1
    assert looked.look()["history"][-1]["steps"] == 0


def test_a_long_step_is_a_sample_as_long(looked):
    looked.look()
    looked.seconds_per_look = 30.0
    state = looked.look()
    assert state["history"][-1]["seconds"] == 30.5
    looked.seconds_per_look = 0.0
    assert len(looked.look()["history"]) == 2


def test_latencies_are_those_of_requests_that_ended_while_somebody_looked(looked):
    add_and_end(looked)
    assert not looked.watch._ended
    assert looked.look()["latencies"]["num_requests"] == 0
    add_and_end(looked)
    found = looked.look()["latencies"]
    assert found["num_requests"] == 1 and found["seconds"] == 0.5
    assert found.keys() == {"seconds", "num_requests", "ttft", "tpot", "itl", "e2e_latency"}
    assert all(found[name].keys() == {"mean", "p50", "p90", "p99", "max"} for name in ("ttft", "tpot", "itl"))


def test_latencies_are_forgotten_after_a_minute(looked):
    looked.look()
    add_and_end(looked)
    for _ in range(int(LATENCY_WINDOW)):
        assert looked.look(after=0.9)["latencies"]["num_requests"] == 1
    for _ in range(8):
        found = looked.look(after=0.9)["latencies"]
    assert found["num_requests"] == 0 and found["itl"] is None and found["seconds"] == LATENCY_WINDOW


def test_what_is_kept_of_ended_requests_is_bounded(looked):
    looked.look()
    add_and_end(looked, num_tokens=900)
    for _ in range(MAX_ENDED + 5):
        looked.watch.record(Output(looked.engine.ended[-1]))
    assert len(looked.watch._ended) == MAX_ENDED
    assert 200 < len(looked.watch._ended[0].latencies.itl) <= MAX_GAPS


def test_an_engine_that_fails_is_asked_again(looked):
    looked.engine.snapshot = None
    with pytest.raises(TypeError):
        looked.look()
    del looked.engine.snapshot
    assert looked.look()["snapshot"]["num_pages"] == 240
