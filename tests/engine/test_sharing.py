"""Pages that requests share: what is found and what is copied changes no token, and no memory is taken twice."""

from __future__ import annotations

import engine_support as support
import numpy as np
import pytest
from engine_support import serve, tokens

import jpaged
from jpaged.engine.engine import _seed_of_sample
from jpaged.host.sampling_params import SamplingParams

pytestmark = pytest.mark.xdist_group("engine")

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
        apart._samples[f"{name}/0"].request.seed = _seed_of_sample(11, sample.index)
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
