"""Pages in swap space: what is brought back is what was moved out, and nothing else changes."""

from __future__ import annotations

import engine_support as support
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import serve, small_pool, tokens

from jpaged.device.kv_pages import page_bytes
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import BatchPlan
from jpaged.host.swap_space import Moves

SAMPLING = SamplingParams(temperature=0.8, top_k=40, seed=5, max_tokens=12, ignore_eos=True, logprobs=True)
PROMPTS = [[(7 * i * i + 3 * j) % 300 for i in range(30)] for j in range(6)]


def build(name="llama", **options):
    return support.build(support.tiny(name), **({"swap_space": "1MiB", "preemption": "swap"} | options))


def assert_same(found, expected) -> None:
    assert tokens(found) == tokens(expected)
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("mistral_sw8", {}),
        ("llama", {"swap_space": "16KiB", "swap_disk_space": "1MiB"}),
        ("llama", {"async_scheduling": False}),
    ],
)
def test_what_comes_back_gives_the_tokens_of_what_is_computed(name, options, tmp_path):
    alone = support.build(support.tiny(name))
    expected = serve(alone, PROMPTS, SAMPLING)
    if "swap_disk_space" in options:
        options = options | {"swap_dir": tmp_path}
    engine = build(name, **options)
    with small_pool(engine, 16):  # the least that one request may need
        assert_same(serve(engine, PROMPTS, SAMPLING), expected)
        again = serve(engine, PROMPTS, SAMPLING)
    assert_same(again, expected)
    stats = engine.stats
    assert stats.num_pages_swapped_in > 0 and stats.num_pages_swapped_out > 0
    assert sum(output.num_swapped_pages for output in again) > 0
    assert any(output.num_cached_tokens for output in again)
    if "swap_disk_space" in options:
        assert stats.num_pages_swapped_out > 4, "more than host memory holds"
        assert list(tmp_path.iterdir()) == [], "the file has no name that could be left behind"
    support.assert_idle(engine)


def test_swapping_computes_less_than_computing_again():
    scheduled = {}
    for preemption in ("swap", "recompute"):
        options = {"preemption": preemption} | ({"swap_space": None} if preemption == "recompute" else {})
        engine = build(**options)
        with small_pool(engine, 20):
            for _ in range(2):
                serve(engine, PROMPTS, SAMPLING)
        scheduled[preemption] = engine.stats.num_scheduled_tokens
    assert scheduled["swap"] < scheduled["recompute"]


def test_samples_and_beams_that_were_swapped_find_their_common_pages():
    sampling = SamplingParams(n=4, temperature=0, num_beams=4, max_tokens=24, ignore_eos=True)
    expected = serve(support.build(support.tiny("llama"), max_num_beams=4), [PROMPTS[0]], sampling)
    engine = build(max_num_beams=4)
    with small_pool(engine, 57):
        requests = [engine.add_request(PROMPTS[1], SAMPLING), engine.add_request(PROMPTS[0], sampling)]
        requests += [engine.add_request(prompt, SAMPLING, priority=-1) for prompt in PROMPTS[2:]]
        finished = support.finish(engine)
    assert tokens([finished[requests[1]]]) == tokens(expected)
    support.assert_idle(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_page_comes_back_to_the_bit_from_memory_and_from_disk(dtype):
    """All at once, as the moves of a step are: what is read is read before it is written over."""
    two_pages = 2 * page_bytes(support.tiny("llama").config, support.LIMITS["page_size"], dtype)
    engine = build(dtype=dtype, swap_space=two_pages, swap_disk_space=two_pages)
    store, steps = engine._swap_store, engine._steps
    rng = np.random.default_rng(0)
    pool = tuple(tuple(jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in layer) for layer in engine._kv_pages)
    before = jax.tree.map(np.asarray, pool)

    def run(swap_in=(), spills=(), swap_out=(), copies=()):
        nonlocal pool
        pool = store.run(steps, pool, BatchPlan([], 0, list(copies), Moves(swap_in, spills, swap_out)))

    run(swap_out=[(5, 0), (6, 1)])
    run(spills=[(0, 2), (1, 3)], swap_out=[(7, 0), (8, 1)])
    # Page 9 gets what was in 7 while 10 takes its place in swap space, and 11 what 12 is about to lose.
    run(swap_in=[(0, 9), (2, 12), (3, 13)], swap_out=[(10, 0)], copies=[(12, 11)])
    run(swap_in=[(0, 14)])
    after = jax.tree.map(np.asarray, pool)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        for source, target in ((7, 9), (5, 12), (6, 13), (12, 11), (10, 14), (15, 15), (1, 1)):
            assert (old[source] == new[target]).all(), f"page {target} has not what was in {source}"


def test_nothing_is_moved_where_it_takes_longer_than_to_compute_it_again():
    engine = build(preemption=None)
    costs = engine._pool.swap_space.costs
    costs.seconds_per_move, costs.seconds_per_page, costs.seconds_per_token = 1.0, 1.0, 1e-9
    with small_pool(engine, 16):
        serve(engine, PROMPTS, SAMPLING)
    assert (engine.stats.num_pages_swapped_out, engine.stats.num_pages_swapped_in) == (0, 0)


def test_the_costs_are_measured():
    engine = build(preemption=None)
    costs = engine._pool.swap_space.costs
    with small_pool(engine, 16):
        serve(engine, PROMPTS[:1], SAMPLING)
        assert costs.seconds_per_token > 0 and costs.seconds_per_page is None, "nothing was moved yet"
        serve(engine, PROMPTS[1:], SAMPLING)
    assert 0 <= costs.seconds_per_page < 1 and 0 <= costs.seconds_per_move < 1


def test_swapping_compiles_nothing_after_warm_up():
    engine = build(warm_up=True, late_compile="error")
    with small_pool(engine, 16):
        for _ in range(2):
            serve(engine, PROMPTS, SAMPLING)
    assert engine.stats.num_pages_swapped_in > 0 and engine.stats.num_compiles == 0


def test_an_interruption_loses_what_was_under_way_and_no_token(monkeypatch):
    expected = serve(support.build(support.tiny("llama")), PROMPTS, SAMPLING)
    engine = build(num_pages=17, max_num_seqs=3)
    run, runs = engine._swap_store.run, []

    def interrupted(steps, kv_pages, plan):
        runs.append(plan)
        kv_pages = run(steps, kv_pages, plan)
        if len(runs) in (9, 15) or (plan.moves.swap_in and not any(p.moves.swap_in for p in runs[:-1])):
            raise KeyboardInterrupt
        return kv_pages

    monkeypatch.setattr(engine._swap_store, "run", interrupted)
    requests = [engine.add_request(prompt, SAMPLING) for prompt in PROMPTS * 2]
    finished, interruptions = {}, 0
    while engine.has_unfinished_requests():
        try:
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        except KeyboardInterrupt:
            interruptions += 1
            assert not engine._pool.swap_space.num_held and not engine._swap_store._arriving
    assert interruptions == 3, "one of them as pages came back"
    assert_same([finished[name] for name in requests], expected * 2)
    support.assert_idle(engine)


def test_other_weights_find_nothing_of_before():
    engine = build()
    with small_pool(engine, 16):
        serve(engine, PROMPTS, SAMPLING)
    weights = engine.weights
    engine.weights = {**weights, "embed": weights["embed"] * 1.5}
    assert not engine._pool.swap_space.num_held
    other = support.build(support.tiny("llama"))
    other.weights = engine.weights
    assert_same(serve(engine, PROMPTS, SAMPLING), serve(other, PROMPTS, SAMPLING))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"swap_space": 0}, ["swap_space", "got 0", "leave it out"]),
        ({"swap_space": "0GiB"}, ["swap_space", "'0GiB'"]),
        ({"swap_space": -1}, ["swap_space", "-1"]),
        ({"swap_space": 100}, ["swap_space (100 bytes)", "not one page"]),
        ({"swap_space": "100TB"}, ["swap_space", "free"]),
        ({"swap_disk_space": 100}, ["swap_disk_space (100 bytes)", "not one page"]),
        ({"swap_disk_space": "1MiB", "swap_dir": "/nonexistent/folder"}, ["swap_disk_space", "/nonexistent/folder"]),
        ({"swap_disk_space": "900TB"}, ["swap_disk_space", "bytes can be made"]),
        ({"swap_disk_space": 10**40}, ["swap_disk_space", "bytes can be made"]),  # more than an integer of C
        ({"swap_disk_space": "9" * 400 + "GiB"}, ["swap_disk_space must be bytes above 0"]),  # more than a float
        ({"swap_dir": "."}, ["swap_dir", "swap_disk_space"]),
        ({"swap_dir": 7, "swap_disk_space": "1MiB"}, ["swap_dir", "7"]),
        ({"swap_space": None}, ["preemption='swap'", "swap_space"]),
        ({"swap_space": None, "preemption": None, "swap_disk_space": "1MiB"}, ["swap_disk_space", "swap_space"]),
        ({"preemption": "recompute"}, ["preemption='recompute'", "contradicts swap_space"]),
        ({"preemption": "kill"}, ["preemption", "'kill'"]),
        ({"prefix_caching": False}, ["swap_space", "prefix_caching=True"]),
    ],
)
def test_a_swap_space_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError) as error:
        build(**options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("priority", [None, 1.5, "high", True])
def test_a_priority_that_is_no_whole_number_is_refused(priority):
    engine = build()
    with pytest.raises(ValueError, match="priority must be a whole number"):
        engine.add_request([1, 2], priority=priority)
    support.assert_idle(engine)


def test_urgent_requests_overtake_the_others():
    engine = support.build(support.tiny("llama"), max_num_seqs=1)
    names = [engine.add_request(PROMPTS[i], SAMPLING, priority=priority) for i, priority in enumerate((0, 1, -2, 0))]
    ended = list(support.finish(engine))
    assert ended == [names[2], names[0], names[3], names[1]]


def test_a_model_with_a_window_gives_back_the_pages_behind_it():
    engine = support.build(support.tiny("mistral_sw8"))
    expected = serve(engine, PROMPTS[:1], SAMPLING)
    assert engine.model_config.sliding_window == 8
    used = []
    engine.add_request(PROMPTS[0], SAMPLING)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        used.append(engine.stats.num_used_pages)
    assert max(used[-10:]) <= 8 // 4 + 1, "pages of 4 slots, of which a window of 8 touches 3"
    assert tokens(outputs) == tokens(expected)
