"""Log-probabilities of prompts beside what is generated, against stored logits of transformers."""

from __future__ import annotations

import engine_support as support
import jax
import numpy as np
import pytest

import jpaged
from jpaged.host.sampling_params import MAX_PROMPT_TOPS, SamplingParams


@pytest.fixture(scope="module")
def scoring():
    return support.build(support.tiny("llama"), prompt_logprobs=True)


def greedy(**options):
    return SamplingParams(**({"temperature": 0, "max_tokens": 8, "ignore_eos": True} | options))


def assert_stored(output, row, wanted):
    stored = support.reference("llama")
    ids, logits = stored["input_ids"][row], stored["logits"][row]
    whole = np.asarray(jax.nn.log_softmax(logits))
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(ids)
    np.testing.assert_allclose(output.prompt_logprobs[1:], whole[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    if not wanted:
        assert output.prompt_top_logprobs is None
        return
    assert output.prompt_top_logprobs[0] is None and len(output.prompt_top_logprobs) == len(ids)
    for tops, scores in zip(output.prompt_top_logprobs[1:], whole):
        order = np.argsort(-scores, kind="stable")[:wanted]
        np.testing.assert_allclose(sorted(tops.values(), reverse=True), scores[order], atol=1e-4)
        if np.diff(-scores[order]).min(initial=1) > 1e-3:  # no near tie
            assert list(tops) == order.tolist()


def prompts():
    return support.reference("llama")["input_ids"].tolist()


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_they_are_the_stored_ones_and_change_nothing_of_what_is_generated(scoring, wanted):
    sampling = [greedy(prompt_logprobs=wanted), greedy(prompt_logprobs=wanted, logprobs=2)]
    outputs = support.serve(scoring, prompts(), sampling)
    assert support.tokens(outputs) == support.reference("llama")["greedy"][:, :8].tolist()
    for row, output in enumerate(outputs):
        assert_stored(output, row, wanted)
    support.assert_idle(scoring)


def test_preempted_samples_of_one_prompt_have_the_same_ones(scoring):
    sampling = greedy(prompt_logprobs=3, n=3, temperature=1.0, seed=1, max_tokens=20)
    expected = support.tokens(support.serve(scoring, prompts(), sampling))
    with support.small_pool(scoring, 20):
        outputs = support.serve(scoring, prompts(), sampling)
    assert support.tokens(outputs) == expected and sum(output.num_preemptions for output in outputs)
    for row, output in enumerate(outputs):
        assert_stored(output, row, 3)
    support.assert_idle(scoring)


def test_a_prompt_that_is_in_the_prefix_cache_is_scored_all_the_same(scoring):
    for _ in range(2):
        (output,) = support.serve(scoring, prompts()[:1], greedy(prompt_logprobs=0))
        assert_stored(output, 0, 0)
    (plain,) = support.serve(scoring, prompts()[:1], greedy())
    assert plain.num_cached_tokens > 0 and plain.prompt_logprobs is None
    assert support.tokens([plain]) == support.tokens([output])


def test_a_prompt_of_one_token_has_none(scoring):
    (output,) = support.serve(scoring, [[5]], greedy(prompt_logprobs=2))
    assert (output.prompt_logprobs, output.prompt_top_logprobs) == ([None], [None])


def test_an_engine_that_does_not_make_them_says_so(engine):
    with pytest.raises(ValueError, match="prompt_logprobs=0 needs an engine with prompt_logprobs=True"):
        engine.add_request([5, 6], greedy(prompt_logprobs=0))
    with pytest.raises(ValueError, match=f"from 0 to {MAX_PROMPT_TOPS}, or None, got {MAX_PROMPT_TOPS + 1}"):
        greedy(prompt_logprobs=MAX_PROMPT_TOPS + 1)


def test_generate_builds_an_engine_that_makes_them():
    limits = support.LIMITS | {"warm_up": False}
    outputs = jpaged.generate(support.tiny("llama"), prompts()[:1], greedy(prompt_logprobs=1), **limits)
    assert_stored(outputs[0], 0, 1)
