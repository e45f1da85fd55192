"""Owns the checks of the kernels' arguments: shapes and dtypes while tracing, ids where their values are known."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

# What a pool may hold. Eight bits are meant to be used with `k_scale` and `v_scale`.
POOL_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


def need(fits: bool, message: str) -> None:
    if not fits:
        raise ValueError(message)


def check_pages(k_pages, v_pages) -> None:
    """Raise ValueError unless the two arrays are a pool."""
    need(k_pages.ndim == 4, f"k_pages must be [num_pages, num_kv_heads, page_size, head_dim], got {k_pages.shape}")
    need(v_pages.shape == k_pages.shape, f"v_pages {v_pages.shape} must have the shape of k_pages {k_pages.shape}")
    need(v_pages.dtype == k_pages.dtype, f"v_pages ({v_pages.dtype}) must have the dtype of k_pages ({k_pages.dtype})")
    need(k_pages.dtype in POOL_DTYPES, f"k_pages must hold one of {POOL_DTYPES}, got {k_pages.dtype}")


def check_scales(k_pages, k_scale, v_scale) -> None:
    """Raise ValueError unless the scales are one float32 a KV head, both or neither."""
    need((k_scale is None) == (v_scale is None), "k_scale and v_scale go together: give both or neither")
    if k_scale is None:
        need(k_pages.dtype != "int8", "an int8 pool needs k_scale and v_scale: whole numbers alone say nothing")
        return
    for name, array in (("k_scale", k_scale), ("v_scale", v_scale)):
        need(
            array.shape == (k_pages.shape[1],) and array.dtype == "float32",
            f"{name} must be float32 [num_kv_heads] ({k_pages.shape[1]},), got {array.dtype} {array.shape}",
        )


def check_attention(
    q, k_pages, v_pages, block_tables, context_lens, *, sliding_window, soft_cap, sinks, k_scale, v_scale
) -> None:
    """Raise ValueError unless the arguments that all attention kernels share fit each other."""
    need(q.ndim == 3, f"q must be [tokens, num_q_heads, head_dim], got shape {q.shape}")
    need(jnp.issubdtype(q.dtype, jnp.floating), f"q must hold floats, got {q.dtype}")
    check_pages(k_pages, v_pages)
    need(q.shape[2] == k_pages.shape[3], f"head_dim of q ({q.shape[2]}) and of the pages ({k_pages.shape[3]}) differ")
    need(
        q.shape[1] % k_pages.shape[1] == 0,
        f"num_q_heads ({q.shape[1]}) must be a multiple of num_kv_heads ({k_pages.shape[1]})",
    )
    need(block_tables.ndim == 2, f"block_tables must be [num_seqs, pages_per_seq], got shape {block_tables.shape}")
    need(
        context_lens.shape == block_tables.shape[:1],
        f"context_lens {context_lens.shape} must be [num_seqs] as block_tables {block_tables.shape} says",
    )
    for name, array in (("block_tables", block_tables), ("context_lens", context_lens)):
        need(array.dtype == "int32", f"{name} must be int32, got {array.dtype}")
    need(
        sliding_window is None or sliding_window >= 1,
        f"sliding_window must be None or at least 1, got {sliding_window}",
    )
    need(soft_cap is None or soft_cap > 0, f"soft_cap must be None or above 0, got {soft_cap}")
    need(
        sinks is None or (sinks.shape == (q.shape[1],) and sinks.dtype == "float32"),
        f"sinks must be None or float32 [num_q_heads] ({q.shape[1]},), "
        f"got {sinks is not None and (str(sinks.dtype), sinks.shape)}",
    )
    check_scales(k_pages, k_scale, v_scale)
    check_range("block_tables", block_tables, k_pages.shape[0], f"the pool has {k_pages.shape[0]} pages")
    slots = block_tables.shape[1] * k_pages.shape[2]
    check_range("context_lens", context_lens, slots + 1, f"block_tables has room for {slots} tokens a row")


def check_query_starts(query_starts, num_tokens: int, num_seqs: int) -> None:
    """Raise ValueError unless `query_starts` cuts `num_tokens` queries into `num_seqs` rows."""
    need(
        query_starts.shape == (num_seqs + 1,) and query_starts.dtype == "int32",
        f"query_starts must be int32 [{num_seqs + 1}] (num_seqs + 1), got {query_starts.dtype} {query_starts.shape}",
    )
    check_range("query_starts", query_starts, num_tokens + 1, f"q has {num_tokens} tokens")
    if isinstance(query_starts, np.ndarray):
        need(
            query_starts[0] == 0 and bool((np.diff(query_starts) >= 0).all()),
            f"query_starts must begin at 0 and never fall, got {query_starts.tolist()[:10]}",
        )


def check_write(k_pages, v_pages, k, v, slot_mapping, *, k_scale, v_scale) -> None:
    """Raise ValueError unless there is one key and one value of every head for each slot."""
    check_pages(k_pages, v_pages)
    check_scales(k_pages, k_scale, v_scale)
    need(
        slot_mapping.ndim == 1 and slot_mapping.dtype == "int32",
        f"slot_mapping must be int32 [num_tokens], got {slot_mapping.dtype} {slot_mapping.shape}",
    )
    # A shape that could be broadcast would fill many slots with one value.
    shape = (slot_mapping.shape[0], k_pages.shape[1], k_pages.shape[3])
    for name, array in (("k", k), ("v", v)):
        need(array.shape == shape, f"{name} must be [num_tokens, num_kv_heads, head_dim] {shape}, got {array.shape}")
    slots = k_pages.shape[0] * k_pages.shape[2]
    check_range("slot_mapping", slot_mapping, slots, f"the pool has {slots} slots")


def check_copies(k_pages, v_pages, sources, targets) -> None:
    """Raise ValueError unless there is a target for each source, and copies do not get in each other's way."""
    check_pages(k_pages, v_pages)
    for name, array in (("sources", sources), ("targets", targets)):
        need(array.ndim == 1 and array.dtype == "int32", f"{name} must be int32 [n], got {array.dtype} {array.shape}")
        check_range(name, array, k_pages.shape[0], f"the pool has {k_pages.shape[0]} pages")
    need(sources.shape == targets.shape, f"{sources.shape[0]} sources and {targets.shape[0]} targets: give as many")
    if isinstance(sources, np.ndarray) and isinstance(targets, np.ndarray):
        pages, counts = np.unique(targets[targets != 0], return_counts=True)
        need(not (counts > 1).any(), f"targets has {pages[counts > 1][:1].tolist()} twice: give each page one source")
        both = np.intersect1d(sources, pages)
        need(not both.size, f"page {both[:1].tolist()} is a source and a target: copy in two calls")


def check_range(name: str, array: Any, end: int, why: str) -> None:
    """Raise ValueError for a number outside `[0, end)`, where the numbers are known: in arrays of NumPy.

    For arrays on a device it is a check for `jax.experimental.checkify.checkify`, and nothing without that: there, a
    wrong id reads or writes memory that is not its row's.
    """
    if isinstance(array, np.ndarray):
        wrong = array[(array < 0) | (array >= end)]
        need(not wrong.size, f"{name} has {wrong[:1].tolist()}, but {why}: give numbers from 0 to {end - 1}")
    else:
        checkify.debug_check(
            jnp.all((array >= 0) & (array < end)),
            name + " has a number outside [0, {end}): " + why,
            end=jnp.int32(end),
        )
