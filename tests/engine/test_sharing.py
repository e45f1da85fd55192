"""Pages that requests share: what is found and what is copied changes no token, and no memory is taken twice."""

from __future__ import annotations

import engine_support as support
import numpy as np
import pytest
from engine_support import serve, tokens

import jpaged
from jpaged.engine.samples import seed_of_sample
from jpaged.host.sampling_params import SamplingParams

PREFIX = [(7 * i * i + 3) % 300 for i in range(30)]
SAMPLING = SamplingParams(temperature=0.8, top_k=40, seed=5, max_tokens=12, ignore_eos=True, logprobs=True)


def assert_same(found, expected) -> None:
    assert tokens(found) == tokens(expected)
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral_sw8", "llama_rope_dynamic"])
def test_a_prompt_that_is_found_has_the_tokens_of_one_that_is_computed(name):
    """Cut anywhere: inside a page, at its end, and found whole."""
    prompts = [PREFIX[:length] + [299] * more for length, more in ((30, 0), (30, 4), (28, 0), (17, 9), (8, 0), (5, 1))]
    fresh = support.build(support.tiny(name), prefix_caching=False)
    expected = [serve(fresh, [prompt], SAMPLING)[0] for prompt in prompts]
    assert fresh.stats.num_cached_tokens == 0
    engine = support.build(support.tiny(name))
    found = [serve(engine, [prompt], SAMPLING)[0] for prompt in prompts]
    assert_same(found, expected)
    # Where rotations follow the length of the prompt, only prompts of one length are alike.
    by_length = name == "llama_rope_dynamic"
    assert [output.num_cached_tokens for output in found] == ([0] * 6 if by_length else [0, 28, 28, 16, 8, 4])
    again = serve(engine, prompts, SAMPLING)  # all at once
    assert_same(again, expected)
    assert [output.num_cached_tokens for output in again] == [28, 32, 28, 24, 8, 4]
    support.assert_idle(engine)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("length", [1, 8, 9, 30])
def test_samples_of_one_prompt_compute_it_once_and_draw_what_each_would_alone(length, async_scheduling):
    options = {"async_scheduling": async_scheduling}
    engine = support.build(support.tiny("llama"), **options)
    sampling = SamplingParams(temperature=1.0, seed=11, max_tokens=9, ignore_eos=True, logprobs=True, n=4)
    output = serve(engine, [PREFIX[:length]], sampling)[0]
    assert engine.stats.num_scheduled_tokens <= length + 4 * 9, "the prompt once, then a token for each sample and step"
    copied = 3 if length % 4 else 0
    assert engine.stats.num_page_copies == copied
    apart = support.build(support.tiny("llama"), prefix_caching=False, **options)
    for sample in output.outputs:
        name = apart.add_request(PREFIX[:length], SamplingParams(**{**vars(sampling), "n": 1}))
        apart._samples[f"{name}/0"].request.seed = seed_of_sample(11, sample.index)
        alone = support.finish(apart)[name].outputs[0]
        assert sample.token_ids == alone.token_ids
        np.testing.assert_allclose(sample.logprobs, alone.logprobs, atol=1e-5)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    support.assert_idle(engine)


def test_samples_take_the_memory_of_what_differs():
    engine = support.build(support.tiny("llama"))
    engine.add_request(PREFIX[:28], SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True, n=4))
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.num_pages - engine.num_free_pages)
    assert most <= 28 // 4 + 4 * 2 and most < 4 * 9


def test_other_weights_find_nothing_of_the_old_ones():
    first = support.tiny("llama")
    engine = support.build(first)
    serve(engine, [PREFIX], SAMPLING)
    other = jpaged.Params(dict(first.weights), first.config, first.tokenizer)
    other.weights["final_norm"] = first.weights["final_norm"] * -1.5
    expected = serve(support.build(other), [PREFIX], SAMPLING)
    engine.weights = other.weights
    found = serve(engine, [PREFIX], SAMPLING)
    assert_same(found, expected)
    assert found[0].num_cached_tokens == 0
    engine.weights = None  # as `generate` does between two calls
    engine.weights = dict(other.weights)
    assert serve(engine, [PREFIX], SAMPLING)[0].num_cached_tokens == 28


def test_generate_finds_the_prompts_of_the_call_before():
    options = {**support.LIMITS, "warm_up": False}
    params = support.tiny("llama")
    assert jpaged.generate(params, PREFIX, SAMPLING, **options)[0].num_cached_tokens == 0
    assert jpaged.generate(params, PREFIX, SAMPLING, **options)[0].num_cached_tokens == 28
    salted = SamplingParams(**{**vars(SAMPLING), "cache_salt": "me"})
    assert jpaged.generate(params, PREFIX, salted, **options)[0].num_cached_tokens == 0


def test_the_prefix_cache_can_be_emptied():
    engine = support.build(support.tiny("llama"))
    serve(engine, [PREFIX], SAMPLING)
    engine.reset_prefix_cache()
    assert serve(engine, [PREFIX], SAMPLING)[0].num_cached_tokens == 0
    assert serve(engine, [PREFIX], SAMPLING)[0].num_cached_tokens == 28


def test_after_warm_up_copies_compile_nothing():
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "warm_up": True, "late_compile": "error"}
    engine = support.build(support.tiny("llama"), **limits)
    serve(engine, [PREFIX[:9], PREFIX[:14]], SamplingParams(seed=3, max_tokens=8, ignore_eos=True, n=4))
    assert engine.stats.num_page_copies > 0 and engine.stats.num_compiles == 0


@pytest.mark.parametrize("value", [1, b"x", ("a",)])
def test_a_salt_that_is_no_text_is_refused(value):
    with pytest.raises(ValueError, match="cache_salt must be text or None, got"):
        SamplingParams(cache_salt=value)


def test_prefix_caching_is_yes_or_no():
    with pytest.raises(ValueError, match="prefix_caching must be True or False, got 1"):
        jpaged.EngineConfig(prefix_caching=1)


# Forks


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_a_fork_begins_with_the_tokens_so_far_and_draws_its_own(steps, async_scheduling):
    engine = support.build(support.tiny("llama"), async_scheduling=async_scheduling, max_num_batched_tokens=16)
    parent = engine.add_request(PREFIX[:21], SAMPLING)
    for _ in range(steps):
        engine.step()
    begun = list(engine._samples[f"{parent}/0"].request.output_token_ids)
    names = engine.fork(parent, 2)
    seeds = [engine._samples[f"{name}/0"].request.seed for name in names]
    finished = support.finish(engine)
    alone = support.build(support.tiny("llama"), prefix_caching=False)
    assert_same([finished[parent]], serve(alone, [PREFIX[:21]], SAMPLING))
    for name, seed in zip(names, seeds, strict=True):
        sample = finished[name].outputs[0]
        assert sample.token_ids[: len(begun)] == begun and len(sample.token_ids) == SAMPLING.max_tokens
        rest = SamplingParams(**{**vars(SAMPLING), "seed": seed, "max_tokens": SAMPLING.max_tokens - len(begun)})
        expected = serve(alone, [PREFIX[:21] + begun], rest)[0].outputs[0]
        assert sample.token_ids[len(begun) :] == expected.token_ids
        np.testing.assert_allclose(sample.logprobs[len(begun) :], expected.logprobs, atol=1e-5)
    assert len({tuple(output.outputs[0].token_ids) for output in finished.values()}) == 3
    assert engine.stats.num_cached_tokens >= 2 * 20 and engine.stats.num_scheduled_tokens < 2 * 21 + 3 * 12
    support.assert_idle(engine)


def test_a_fork_outlives_the_request_that_it_left_and_can_be_forked_again():
    engine = support.build(support.tiny("llama"))
    parent = engine.add_request(PREFIX[:9], support.GREEDY)
    for _ in range(3):
        engine.step()
    child = engine.fork(parent)[0]
    engine.step()
    grandchild = engine.fork(child)[0]
    assert engine.abort(parent)
    finished = support.finish(engine)
    expected = tokens(serve(engine, [PREFIX[:9]]))
    assert [tokens([finished[name]]) for name in (child, grandchild)] == [expected] * 2
    support.assert_idle(engine)


def test_one_of_several_samples_can_be_forked():
    engine = support.build(support.tiny("llama"))
    sampling = SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=10, ignore_eos=True)
    parent = engine.add_request(PREFIX[:9], sampling)
    for _ in range(5):
        engine.step()
    begun = list(engine._samples[f"{parent}/2"].request.output_token_ids)
    child = engine.fork(parent, index=2)[0]
    finished = support.finish(engine)
    assert begun and finished[child].outputs[0].token_ids[: len(begun)] == begun
    assert len(finished[child].outputs) == 1 and len(finished[parent].outputs) == 3


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("nobody",), {}, "'nobody' cannot be forked: there is no such unfinished request"),
        (("done",), {}, "'done' cannot be forked: there is no such unfinished request"),
        (("a", 0), {}, "n must be a whole number from 1 to 1024, got 0"),
        (("a", 1.0), {}, "n must be a whole number from 1 to 1024, got 1.0"),
        (("a",), {"index": 2}, "index must be that of one of the 2 samples, got 2"),
        (("a",), {"index": 1}, "sample 1 of request 'a' has ended and cannot be forked"),
    ],
)
def test_a_fork_of_what_cannot_go_on_is_refused(arguments, options, words):
    engine = support.build(support.tiny("llama"))
    engine.add_request(PREFIX[:5], support.GREEDY, request_id="done")
    support.finish(engine)
    engine.add_request(PREFIX[:9], SamplingParams(n=2, temperature=0, max_tokens=9, ignore_eos=True), request_id="a")
    for _ in range(3):
        engine.step()
    engine._scheduler.finish(engine._samples["a/1"].request, "stop")
    with pytest.raises(ValueError, match=words):
        engine.fork(*arguments, **options)
    assert engine.has_unfinished_requests()
    engine.abort("a")
    support.assert_idle(engine)


# The best of several


def test_the_best_of_several_samples_are_returned_best_first():
    sampling = SamplingParams(temperature=1.0, seed=2, n=6, max_tokens=10, ignore_eos=True)
    every = serve(support.build(support.tiny("llama")), [PREFIX[:9]], sampling)[0].outputs
    engine = support.build(support.tiny("llama"))
    best = SamplingParams(**{**vars(sampling), "n": 2, "best_of": 6})
    name = engine.add_request(PREFIX[:9], best)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.finished for output in outputs] == [True] and outputs[0].request_id == name
    found = outputs[0].outputs
    expected = sorted(every, key=lambda sample: -sample.cumulative_logprob)[:2]
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
    assert [sample.index for sample in found] == [0, 1]
    support.assert_idle(engine)


@pytest.mark.parametrize(("n", "best_of"), [(3, 2), (1, 0), (1, 2.0), (1, True), (1, 2000)])
def test_fewer_drawn_than_returned_is_refused(n, best_of):
    with pytest.raises(ValueError, match=rf"best_of must be a whole number from n \({n}\) to 1024, or None, got"):
        SamplingParams(n=n, best_of=best_of)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("call", ["add_request", "fork", "abort"])
def test_after_an_interruption_of_a_call_everything_can_still_be_aborted(call, at, monkeypatch):
    engine = support.build(support.tiny("llama"))
    sampling = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, ignore_eos=True)
    engine.add_request(PREFIX[:9], sampling, request_id="a")
    for _ in range(2):
        engine.step()
    place = "abort" if call == "abort" else "add"
    original, calls = getattr(engine._scheduler, place), [0]

    def interrupted(*args, **options):
        result = original(*args, **options)
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            if call == "add_request":
                engine.add_request(PREFIX[:7], sampling)
            elif call == "fork":
                engine.fork("a", 3)
            else:
                engine.abort("a")
    for name in list(engine._groups):
        engine.abort(name)
    support.assert_idle(engine)
    assert tokens(serve(engine, [PREFIX[:9]])) == tokens(serve(support.build(support.tiny("llama")), [PREFIX[:9]]))


@pytest.mark.parametrize("value", ["\ud800", "a\n"])
def test_a_salt_that_cannot_be_printed_is_refused(value):
    with pytest.raises(ValueError, match="cache_salt must be printable text"):
        SamplingParams(cache_salt=value)
