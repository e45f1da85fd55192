"""The decoder over whole sequences: the published models' numbers, and their derivatives."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoint.loader import FAMILIES
from jpaged.device.params import Params
from jpaged.models.decoder import forward

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = sorted(
    f"checkpoints/{path.parent.name}"
    for path in DATA.glob("checkpoints/*/ref.npz")
    if json.loads((path.parent / "config.json").read_text())["architectures"][0] in FAMILIES
)
GGUF = sorted(f"gguf/{path.name}" for path in DATA.glob("gguf/*.gguf"))
DYNAMIC = "checkpoints/llama_rope_dynamic"

jitted = jax.jit(forward)


def reference(name: str) -> dict[str, np.ndarray]:
    path = DATA / name
    return dict(np.load(path / "ref.npz" if path.is_dir() else path.with_suffix(".ref.npz")))


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def assert_same_logprobs(logits, wanted, bound=1e-4) -> None:
    np.testing.assert_allclose(log_softmax(logits), log_softmax(wanted), rtol=0, atol=bound)


def test_there_are_references_of_every_kind():
    assert len(CHECKPOINTS) >= 14 and len(GGUF) >= 3 and DYNAMIC in CHECKPOINTS


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS + GGUF if name != DYNAMIC])
def test_logits_and_greedy_tokens_are_those_of_the_reference(name, load_tiny):
    stored = reference(name)
    tokens = np.concatenate([stored["input_ids"], stored["greedy"]], 1).astype(np.int32)
    logits = jitted(load_tiny(name), tokens)
    assert logits.dtype == jnp.float32
    prompt = stored["input_ids"].shape[1]
    assert_same_logprobs(logits[:, :prompt], stored["logits"])
    np.testing.assert_array_equal(np.argmax(logits[:, prompt - 1 : -1], -1), stored["greedy"])


def test_dynamic_scaling_takes_the_length_of_the_whole_sequence(load_tiny):
    stored, params = reference(DYNAMIC), load_tiny(DYNAMIC)
    tokens = stored["input_ids"].astype(np.int32)
    assert_same_logprobs(jitted(params, tokens), stored["logits"])
    assert_same_logprobs(jitted(params, tokens[:, :12]), stored["logits_short"])


@pytest.mark.parametrize("name", ["checkpoints/llama", "checkpoints/llama_tied_bias"])
def test_bfloat16_is_close_to_float32(name, load_tiny):
    stored = reference(name)
    params = load_tiny(name, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    logits = jitted(params, stored["input_ids"].astype(np.int32))
    assert logits.dtype == jnp.float32
    off = np.abs(log_softmax(logits) - log_softmax(stored["logits"]))
    assert off.mean() < 0.02 and off.max() < 0.25


def test_later_tokens_change_nothing(load_tiny):
    params = load_tiny("checkpoints/llama")
    tokens = reference("checkpoints/llama")["input_ids"].astype(np.int32)
    changed = tokens.copy()
    changed[:, 25:] = 5
    before, after = jitted(params, tokens), jitted(params, changed)
    np.testing.assert_allclose(after[:, :25], before[:, :25], atol=1e-5)
    assert np.abs(after[:, 25:] - before[:, 25:]).max() > 0.1


@pytest.mark.parametrize("tokens", [np.zeros(5, np.int32), np.zeros((1, 1, 5), np.int32)])
def test_tokens_of_another_shape_are_refused(tokens, load_tiny):
    with pytest.raises(ValueError, match=r"\[batch, length\].*5"):
        forward(load_tiny("checkpoints/llama"), tokens)


@jax.jit
def loss(params: Params, tokens):
    """Cross-entropy of the next token."""
    logprobs = jax.nn.log_softmax(forward(params, tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))


gradient = jax.jit(jax.grad(loss))


@pytest.mark.parametrize("name", ["llama", "llama_tied_bias", "mistral_sw8", "llama_rope_dynamic"])
def test_every_weight_has_a_gradient_that_a_finite_difference_confirms(name, load_tiny):
    params = load_tiny(f"checkpoints/{name}")
    tokens = reference(f"checkpoints/{name}")["input_ids"].astype(np.int32)[:, :24]
    gradients = gradient(params, tokens)
    assert isinstance(gradients, Params)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    for path, leaf in leaves:
        where = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), where
        assert np.abs(leaf).max() > 0, where
    structure = jax.tree.structure(params)
    weights = jax.tree.leaves(params)
    for i in range(len(weights)):
        slope = float(jnp.linalg.norm(leaves[i][1]))
        direction = leaves[i][1] / slope
        step = 0.02

        def at(offset, i=i, direction=direction):
            moved = [*weights[:i], weights[i] + offset * direction, *weights[i + 1 :]]
            return float(loss(jax.tree.unflatten(structure, moved), tokens))

        # Four points, so that the third derivative cancels and the step can be long enough for float32.
        measured = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        assert measured == pytest.approx(slope, rel=0.02, abs=2e-5), jax.tree_util.keystr(leaves[i][0])


def test_steps_against_the_gradient_lower_the_loss(load_tiny):
    params = load_tiny("checkpoints/llama")
    tokens = reference("checkpoints/llama")["input_ids"].astype(np.int32)[:, :24]
    losses = []
    for _ in range(4):
        losses.append(float(loss(params, tokens)))
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient(params, tokens))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.3
