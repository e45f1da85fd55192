"""What the engine shows of itself agrees with its pool and its block tables, whatever it does."""

from __future__ import annotations

import json
from collections import Counter

import engine_support as support
import pytest

from jpaged.host.sampling_params import SamplingParams

PROMPTS = [[(7 * i * i + 3 * j) % 300 for i in range(30)] for j in range(6)]
FORKING = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)


def assert_true(engine):
    """A snapshot says of every page what the block tables and the pool say; returns it."""
    state = engine.snapshot()
    assert json.loads(json.dumps(state)) == state
    pool, shown = engine._pool, state["requests"]
    holders = Counter(page for request in shown for page in request["block_table"] if page)
    for page_id, cell in enumerate(state["map"]["cells"], start=1):
        if pool.is_held(page_id):
            # Pages that the test itself took out of the pool are in no table.
            assert cell == str(min(holders.get(page_id, 1), 9)), f"page {page_id} is held by {holders[page_id]}"
        else:
            assert page_id not in holders
            assert cell == ("c" if page_id in pool._key_of else "."), f"page {page_id}"
    pages = state["pages"]
    assert pages["used"] == pool.num_used and pages["shared"] == pool.num_shared
    assert pages["used"] + pages["cached"] + pages["free"] == state["num_pages"] == len(state["map"]["cells"])
    assert pages["cached"] == state["map"]["cells"].count("c")
    assert len(shown) == state["num_running"] + state["num_waiting"]
    for request in shown:
        held = len(request["block_table"])
        assert request["num_pages"] == held and request["num_computed_tokens"] <= held * state["page_size"]
        assert (request["state"] == "running") or not held
    return state


@pytest.mark.parametrize("options", [{}, {"swap_space": "1MiB", "preemption": "swap"}])
def test_every_page_is_shown_as_what_it_is_through_forks_caching_and_preemptions(options):
    engine = support.build(support.tiny("llama"), **options)
    seen, most = Counter(), Counter()
    with support.small_pool(engine, 20):
        for prompt in [PROMPTS[0], *PROMPTS]:
            engine.add_request(prompt, FORKING)
        while engine.has_unfinished_requests():
            state = assert_true(engine)
            seen.update(state["map"]["cells"])
            most |= Counter(preemptions=max(one["num_preemptions"] for one in state["requests"]))
            most |= Counter(cached=max(one["num_cached_tokens"] for one in state["requests"]))
            most |= Counter(swapped=(state["swap"] or {}).get("memory", 0))
            engine.step()
    assert {"1", "3", "."} <= seen.keys() and "c" in seen
    assert most["preemptions"] and most["cached"]
    assert bool(most["swapped"]) == ("swap_space" in options)
    state = assert_true(engine)
    assert state["requests"] == [] and state["pages"]["used"] == 0
    support.assert_idle(engine)
