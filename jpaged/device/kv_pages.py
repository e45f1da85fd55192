"""Owns `KVPages`, the pool on the device: for each layer a pair of arrays, keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jpaged.models.config import ModelConfig

# A tuple of per-layer arrays and not one stacked array: each is donated to the step and updated where it lies.
KVPages = tuple[
    tuple[
        Float[Array, "num_pages num_kv_heads page_size head_dim"],
        Float[Array, "num_pages num_kv_heads page_size head_dim"],
    ],
    ...,
]


def kv_shape(config: ModelConfig, num_pages: int, page_size: int) -> tuple[int, int, int, int]:
    """The shape of one layer's keys, and of its values. Page 0 is among `num_pages`."""
    return (num_pages, config.num_kv_heads, page_size, config.head_dim)


def make_kv_pages(config: ModelConfig, num_pages: int, page_size: int, dtype) -> KVPages:
    """A pool of zeros: arrays even while the caller traces a function around it."""
    shape = kv_shape(config, num_pages, page_size)
    with jax.ensure_compile_time_eval():
        return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def kv_pages_like(config: ModelConfig, num_pages: int, page_size: int, dtype) -> Any:
    """The pool's shapes, for compiling without the memory."""
    array = jax.ShapeDtypeStruct(kv_shape(config, num_pages, page_size), dtype)
    return ((array, array),) * config.num_layers


def page_bytes(config: ModelConfig, page_size: int, dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return page_size * per_token * jnp.dtype(dtype).itemsize


def take_pages(
    kv_pages: KVPages, page_ids: Int32[Array, " n"]
) -> Float[Array, "num_layers 2 n num_kv_heads page_size head_dim"]:
    """The contents of pages over all layers, keys and values, to be kept elsewhere."""
    return jnp.stack([jnp.stack([pages[page_ids] for pages in layer]) for layer in kv_pages])


def put_pages(
    kv_pages: KVPages,
    page_ids: Int32[Array, " n"],
    contents: Float[Array, "num_layers 2 n num_kv_heads page_size head_dim"],
) -> KVPages:
    """The pool with pages of these contents, as `take_pages` gives them. The null page may be among them several times,
    for padding, with zeros."""
    return tuple(
        (keys.at[page_ids].set(new[0]), values.at[page_ids].set(new[1]))
        for (keys, values), new in zip(kv_pages, contents, strict=True)
    )


jitted_put = jax.jit(put_pages, donate_argnums=0)
