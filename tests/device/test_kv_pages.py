"""The pool on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jpaged.device.kv_pages import kv_pages_like, kv_shape, make_kv_pages, page_bytes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, "float16"])
@pytest.mark.parametrize("name", ["llama", "llama_mqa", "llama_head_dim"])
def test_a_pool_has_pages_for_every_layer_and_as_many_bytes_as_it_says(name, dtype, load_tiny):
    config = load_tiny(f"checkpoints/{name}").config
    pool = make_kv_pages(config, 5, 16, dtype)
    assert len(pool) == config.num_layers and all(len(pair) == 2 for pair in pool)
    arrays = jax.tree.leaves(pool)
    assert {array.shape for array in arrays} == {kv_shape(config, 5, 16)}
    assert {array.shape for array in arrays} == {(5, config.num_kv_heads, 16, config.head_dim)}
    assert not any(array.any() for array in arrays)
    assert sum(array.nbytes for array in arrays) == 5 * page_bytes(config, 16, dtype)


def test_every_array_is_a_buffer_of_its_own_that_can_be_donated(load_tiny):
    pool = make_kv_pages(load_tiny("checkpoints/llama").config, 3, 4, jnp.float32)
    assert len({array.unsafe_buffer_pointer() for array in jax.tree.leaves(pool)}) == len(jax.tree.leaves(pool))


def test_the_shapes_to_compile_for_are_those_of_the_pool(load_tiny):
    config = load_tiny("checkpoints/llama").config
    pool, like = (make(config, 7, 8, jnp.bfloat16) for make in (make_kv_pages, kv_pages_like))
    assert jax.tree.structure(pool) == jax.tree.structure(like)
    for array, shape in zip(jax.tree.leaves(pool), jax.tree.leaves(like), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
