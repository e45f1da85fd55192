"""`Params` as a pytree: what a training loop does with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoint import load
from jpaged.device.params import Params, weight_shapes
from jpaged.host.sampling_params import SamplingParams

DATA = Path(__file__).parents[1] / "data"
LLAMA = "checkpoints/llama"


def test_tree_map_gives_params_of_the_same_kind(load_tiny):
    params = load_tiny(LLAMA)
    doubled = jax.tree.map(lambda w: 2 * w, params)
    assert isinstance(doubled, Params)
    assert doubled.config == params.config and doubled.tokenizer is params.tokenizer
    np.testing.assert_array_equal(doubled.weights["layers"][1]["q"], 2 * params.weights["layers"][1]["q"])


def test_default_sampling_is_as_published_for_all_that_is_not_given(load_tiny):
    params = load_tiny(LLAMA)
    assert params.default_sampling() == SamplingParams()
    defaults = (("temperature", 0.6), ("top_p", 0.9), ("max_tokens", 64))
    params = Params(params.weights, dataclasses.replace(params.config, sampling_defaults=defaults))
    doubled = jax.tree.map(lambda w: 2 * w, params)
    assert doubled.default_sampling() == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=64)
    given = {"top_p": 1.0, "seed": 3, "max_tokens": None}
    assert doubled.default_sampling(**given) == SamplingParams(temperature=0.6, **given)
    beams = {"num_beams": 2, "temperature": 0}
    assert params.default_sampling(**beams) == SamplingParams(**beams)
    with pytest.raises(ValueError, match="top_k must be"):
        params.default_sampling(top_k=-3)
    jax.jit(lambda params: params)(doubled)  # static data must have a hash


def test_paths_name_every_weight(load_tiny):
    params = load_tiny(LLAMA)
    paths = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    shapes = jax.tree_util.tree_leaves_with_path(
        weight_shapes(params.config), is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int)
    )
    assert paths == {f".weights{jax.tree_util.keystr(path)}": shape for path, shape in shapes}
    assert paths[".weights['layers'][2]['down']"] == (96, 64)


@pytest.mark.parametrize("name", [LLAMA, "gguf/llama_kquant.gguf"])
def test_two_loads_are_trees_of_one_structure_and_compile_once(name):
    first, second = (load(DATA / name, dtype="float32") for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert hash(jax.tree.structure(first)) == hash(jax.tree.structure(second))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    traces = []

    @jax.jit
    def total(params):
        traces.append(1)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    assert total(first) == total(second) and len(traces) == 1


def test_models_of_different_configs_are_trees_of_different_structure(load_tiny):
    structures = {jax.tree.structure(load_tiny(f"checkpoints/{n}")) for n in ("llama", "mistral", "llama_rope_linear")}
    assert len(structures) == 3


def test_an_update_as_optimisers_write_it_gives_params(load_tiny):
    params = load_tiny(LLAMA)
    gradients = jax.tree.map(jnp.ones_like, params)
    moments = jax.tree.map(jnp.zeros_like, params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, gradients)
    updated = jax.jit(lambda p, m: jax.tree.map(lambda p, m: p - 0.5 * m, p, m))(params, moments)
    assert isinstance(updated, Params) and jax.tree.structure(updated) == jax.tree.structure(params)
    jax.tree.map(lambda new, old: np.testing.assert_allclose(new, old - 0.05, atol=1e-6), updated, params)


def test_device_put_and_casts_keep_the_kind(load_tiny):
    params = load_tiny(LLAMA)
    put = jax.device_put(params, jax.devices()[0])
    assert isinstance(put, Params) and put.config == params.config
    jax.tree.map(np.testing.assert_array_equal, put, params)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    assert isinstance(half, Params) and {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


def test_shapes_stand_for_weights(load_tiny):
    params = load_tiny(LLAMA)
    shapes = jax.eval_shape(lambda p: p, params)
    assert isinstance(shapes, Params)
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [leaf.shape for leaf in jax.tree.leaves(params)]
    assert "LlamaForCausalLM" in repr(params) and "MiB" in repr(params)
    assert "Params" in repr(jax.tree.map(lambda _: None, params))  # JAX prints trees with anything for leaves
