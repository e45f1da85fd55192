"""Log-probabilities of given tokens: those of the whole scores, which are never made at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.prompt_logprobs import CHUNK, prompt_logprobs

VOCAB, WIDTH = 1000, 16
with_tops = jax.jit(prompt_logprobs, static_argnums=3)


@jax.jit
def jitted(*args):
    return prompt_logprobs(*args)[0]


def arrays(num_tokens: int, dtype=np.float32):
    rng = np.random.default_rng(num_tokens)
    head = jnp.asarray(rng.standard_normal((WIDTH, VOCAB)), dtype)
    hidden = jnp.asarray(3 * rng.standard_normal((num_tokens, WIDTH)), dtype)
    return {"head": head}, hidden, rng.integers(0, VOCAB, num_tokens).astype(np.int32)


@pytest.mark.parametrize("num_tokens", [1, 16, CHUNK, CHUNK + 1, 3 * CHUNK, 4 * CHUNK - 5])
@pytest.mark.parametrize("wanted", ["all", "some", "last", "none"])
def test_they_are_those_of_the_whole_distributions(num_tokens, wanted):
    weights, hidden, targets = arrays(num_tokens)
    mask = np.zeros(num_tokens, bool)
    mask[{"all": slice(None), "some": slice(0, None, 3), "last": slice(-1, None), "none": slice(0)}[wanted]] = True
    found = np.asarray(jitted(weights, hidden, np.where(mask, targets, -1)))
    whole = jax.nn.log_softmax(hidden @ weights["head"])
    expected = np.where(mask, np.asarray(whole)[np.arange(num_tokens), targets], 0)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=0)
    assert found.dtype == np.float32 and found.shape == (num_tokens,)


def test_of_bfloat16_weights_they_are_normalized_in_float32():
    weights, hidden, targets = arrays(100, jnp.bfloat16)
    whole = jax.nn.log_softmax((hidden @ weights["head"]).astype(jnp.float32))
    expected = np.asarray(whole)[np.arange(100), targets]
    np.testing.assert_allclose(np.asarray(jitted(weights, hidden, targets)), expected, atol=1e-4, rtol=0)


def test_an_impossible_token_and_huge_scores_give_no_nan():
    weights, hidden, targets = arrays(16)
    weights["head"] = weights["head"].at[:, targets[0]].set(0).at[0, targets[0]].set(-1e30)
    hidden = hidden.at[0].set(0).at[0, 0].set(1e4)
    found = np.asarray(jitted(weights, hidden, targets))
    assert found[0] == -np.inf or found[0] < -1e30
    assert not np.isnan(found).any() and np.isfinite(found[1:]).all()


def test_the_scores_of_all_tokens_are_never_there_at_once():
    num_tokens, vocab = 16 * CHUNK, 8000
    shapes = [((64, vocab), np.float32), ((num_tokens, 64), np.float32), ((num_tokens,), np.int32)]
    head, hidden, targets = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    memory = jitted.lower({"head": head}, hidden, targets).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * num_tokens * vocab / 4


@pytest.mark.parametrize("num_tokens", [5, 2 * CHUNK + 3])
def test_the_likeliest_ids_come_with_them(num_tokens):
    weights, hidden, targets = arrays(num_tokens)
    _, (ids, logprobs) = with_tops(weights, hidden, targets, 7)
    whole = np.asarray(jax.nn.log_softmax(hidden @ weights["head"]))
    order = np.argsort(-whole, axis=-1, kind="stable")[:, :7]
    np.testing.assert_array_equal(np.asarray(ids), order)
    np.testing.assert_allclose(np.asarray(logprobs), np.take_along_axis(whole, order, 1), atol=2e-5, rtol=0)
    assert with_tops(weights, hidden, targets, 2000)[1][0].shape == (num_tokens, VOCAB)
