"""Owns the checks of the kernels' arguments: shapes and dtypes while tracing, numbers where they are known."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

# What a pool may hold. Eight bits are meant to be used with `k_scale` and `v_scale`.
POOL_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


QUERY_DTYPES = ("bfloat16", "float16", "float32")


def need(fits: bool, message: str) -> None:
    if not fits:
        raise ValueError(message)


def number(name: str, value: Any, kind: type, low: float, high: float, hint: str = "") -> Any:
    """`value` as a Python number of `kind`. Raise ValueError unless it is a number from `low` to `high`.

    It must be known while tracing: kernels are compiled for it.
    """
    kinds = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    within = f"of at least {low}" if high == inf else f"from {low} to {high}"
    need(
        isinstance(value, kinds) and not isinstance(value, bool) and bool(low <= value <= high),
        f"{name} must be a {'whole number' if kind is int else 'number'} {within}, one of Python's or NumPy's, "
        f"got {value!r}{hint}",
    )
    return kind(value)


def check_arrays(**arrays: Any) -> None:
    """Raise ValueError unless all are arrays."""
    for name, array in arrays.items():
        fits = all(hasattr(array, attribute) for attribute in ("shape", "ndim", "dtype"))
        need(fits, f"{name} must be an array, got {type(array).__name__}")


def check_pages(k_pages, v_pages) -> None:
    """Raise ValueError unless the two arrays are a pool."""
    check_arrays(k_pages=k_pages, v_pages=v_pages)
    need(k_pages.ndim == 4, f"k_pages must be [num_pages, num_kv_heads, page_size, head_dim], got {k_pages.shape}")
    for axis, size in zip(("num_pages", "num_kv_heads", "page_size", "head_dim"), k_pages.shape):
        need(size > 0, f"{axis} of k_pages must be at least 1, got shape {k_pages.shape}")
    need(v_pages.shape == k_pages.shape, f"v_pages {v_pages.shape} must have the shape of k_pages {k_pages.shape}")
    need(v_pages.dtype == k_pages.dtype, f"v_pages ({v_pages.dtype}) must have the dtype of k_pages ({k_pages.dtype})")
    need(k_pages.dtype in POOL_DTYPES, f"k_pages must hold one of {POOL_DTYPES}, got {k_pages.dtype}")


def check_scales(k_pages, k_scale, v_scale) -> None:
    """Raise ValueError unless the scales are one float32 above 0 a KV head, both or neither."""
    need((k_scale is None) == (v_scale is None), "k_scale and v_scale go together: give both or neither")
    if k_scale is None:
        need(k_pages.dtype != "int8", "an int8 pool needs k_scale and v_scale: whole numbers alone say nothing")
        return
    check_arrays(k_scale=k_scale, v_scale=v_scale)
    for name, array in (("k_scale", k_scale), ("v_scale", v_scale)):
        need(
            array.shape == (k_pages.shape[1],) and array.dtype == "float32",
            f"{name} must be float32 [num_kv_heads] ({k_pages.shape[1]},), got {array.dtype} {array.shape}",
        )
        fits = (array > 0) & (array < inf)
        check_values(~fits, name + " has [{number}]: give finite numbers above 0", number=array)


def check_attention(
    q, k_pages, v_pages, block_tables, context_lens, *, scale, sliding_window, soft_cap, sinks, k_scale, v_scale
) -> dict[str, Any]:
    """The options of all attention kernels as these take them: numbers of Python's, and no window that hides nothing.

    Raise ValueError unless the arguments fit each other.
    """
    check_arrays(q=q, block_tables=block_tables, context_lens=context_lens)
    need(q.ndim == 3, f"q must be [tokens, num_q_heads, head_dim], got shape {q.shape}")
    need(q.dtype in QUERY_DTYPES, f"q must hold one of {QUERY_DTYPES}, got {q.dtype}")
    check_pages(k_pages, v_pages)
    need(q.shape[2] == k_pages.shape[3], f"head_dim of q ({q.shape[2]}) and of the pages ({k_pages.shape[3]}) differ")
    need(
        q.shape[1] > 0 and q.shape[1] % k_pages.shape[1] == 0,
        f"num_q_heads ({q.shape[1]}) must be a multiple of num_kv_heads ({k_pages.shape[1]})",
    )
    need(
        block_tables.ndim == 2 and block_tables.shape[1] > 0,
        f"block_tables must be [num_seqs, pages_per_seq] with a column or more, got shape {block_tables.shape}",
    )
    need(
        context_lens.shape == block_tables.shape[:1],
        f"context_lens {context_lens.shape} must be [num_seqs] as block_tables {block_tables.shape} says",
    )
    for name, array in (("block_tables", block_tables), ("context_lens", context_lens)):
        need(array.dtype == "int32", f"{name} must be int32, got {array.dtype}")
    if sinks is not None:
        check_arrays(sinks=sinks)
        need(
            sinks.shape == (q.shape[1],) and sinks.dtype == "float32",
            f"sinks must be float32 [num_q_heads] ({q.shape[1]},), got {sinks.dtype} {sinks.shape}",
        )
    check_scales(k_pages, k_scale, v_scale)
    # Beyond these, float32 would not tell masked scores from others, nor the weights of capped ones.
    scale = number("scale", scale, float, 1e-20, 1e20)
    if soft_cap is not None:
        far = ": a cap far above the scores changes nothing, leave it out"
        soft_cap = number("soft_cap", soft_cap, float, 0.001, 10_000, far)
    slots = block_tables.shape[1] * k_pages.shape[2]
    if sliding_window is not None:
        sliding_window = number("sliding_window", sliding_window, int, 1, inf)
        sliding_window = sliding_window if sliding_window < slots else None
    check_range("block_tables", block_tables, k_pages.shape[0], f"the pool has {k_pages.shape[0]} pages")
    check_range("context_lens", context_lens, slots + 1, f"block_tables has room for {slots} tokens a row")
    return {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}


def check_query_starts(query_starts, context_lens, num_tokens: int) -> None:
    """Raise ValueError unless `query_starts` cuts `num_tokens` queries into rows, none longer than its context."""
    check_arrays(query_starts=query_starts)
    (num_seqs,) = context_lens.shape
    need(
        query_starts.shape == (num_seqs + 1,) and query_starts.dtype == "int32",
        f"query_starts must be int32 [{num_seqs + 1}] (num_seqs + 1), got {query_starts.dtype} {query_starts.shape}",
    )
    check_range("query_starts", query_starts, num_tokens + 1, f"q has {num_tokens} tokens")
    queries = query_starts[1:] - query_starts[:-1]
    begins = "query_starts must begin at 0 and never fall, got "
    check_values(query_starts[:1] != 0, begins + "{number} first", number=query_starts[:1])
    check_values(queries < 0, begins + "{number} after row {at}", number=query_starts[1:])
    check_values(
        queries > context_lens,
        "row {at} has {queries} queries and a context of {tokens} tokens: context_lens counts the queries' own too",
        queries=queries,
        tokens=context_lens,
    )


def check_write(k_pages, v_pages, k, v, slot_mapping, *, k_scale, v_scale) -> None:
    """Raise ValueError unless there is one key and one value of every head for each slot."""
    check_pages(k_pages, v_pages)
    check_scales(k_pages, k_scale, v_scale)
    check_arrays(k=k, v=v, slot_mapping=slot_mapping)
    need(
        slot_mapping.ndim == 1 and slot_mapping.dtype == "int32",
        f"slot_mapping must be int32 [num_tokens], got {slot_mapping.dtype} {slot_mapping.shape}",
    )
    # A shape that could be broadcast would fill many slots with one value.
    shape = (slot_mapping.shape[0], k_pages.shape[1], k_pages.shape[3])
    for name, array in (("k", k), ("v", v)):
        need(array.shape == shape, f"{name} must be [num_tokens, num_kv_heads, head_dim] {shape}, got {array.shape}")
        need(jnp.issubdtype(array.dtype, jnp.floating), f"{name} must hold floats, got {array.dtype}")
    slots = k_pages.shape[0] * k_pages.shape[2]
    check_range("slot_mapping", slot_mapping, slots, f"the pool has {slots} slots")


def check_copies(k_pages, v_pages, sources, targets) -> None:
    """Raise ValueError unless there is a target for each source, and copies do not get in each other's way."""
    check_pages(k_pages, v_pages)
    check_arrays(sources=sources, targets=targets)
    for name, array in (("sources", sources), ("targets", targets)):
        need(array.ndim == 1 and array.dtype == "int32", f"{name} must be int32 [n], got {array.dtype} {array.shape}")
        check_range(name, array, k_pages.shape[0], f"the pool has {k_pages.shape[0]} pages")
    need(sources.shape == targets.shape, f"{sources.shape[0]} sources and {targets.shape[0]} targets: give as many")
    pages = library(targets).sort(targets)
    twice = (pages[1:] == pages[:-1]) & (pages[1:] != 0)
    check_values(twice, "targets has [{page}] twice: give each page one source", page=pages[1:])
    both = library(sources, targets).isin(sources, targets) & (sources != 0)
    check_values(both, "page [{page}] is a source and a target: copy in two calls", page=sources)


def check_range(name: str, array: Any, end: int, why: str) -> None:
    """`check_values` of numbers outside `[0, end)`."""
    message = f"{name} has [{{number}}], but {why}: give numbers from 0 to {end - 1}"
    check_values((array < 0) | (array >= end), message, number=array)


def check_values(wrong: Any, message: str, **numbers: Any) -> None:
    """Raise ValueError where something is wrong; `message` is told the numbers at the first such place, and the place.

    That is for what is known, from arrays of NumPy. For arrays on a device it is a check for
    `jax.experimental.checkify.checkify`, and nothing without that: there, a wrong id reads or writes memory that is not
    its row's.
    """
    if not wrong.size:
        return
    at = wrong.ravel().argmax()
    told = {name: library(wrong).ravel(array)[at] for name, array in numbers.items()}
    if isinstance(wrong, np.ndarray):
        need(not wrong.any(), message.format(at=at, **told))
    else:
        checkify.debug_check(~wrong.any(), message, at=at, **told)


def library(*arrays: Any) -> Any:
    """NumPy for arrays of NumPy, whose numbers are known, otherwise its likeness in JAX."""
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp


def jax_arrays(kernel: str, *arrays: Any) -> list[Any]:
    """The arrays as JAX's, None where one is None. To differentiate what is made of them raises NotImplementedError."""
    return _without_gradient(kernel, [None if array is None else jnp.asarray(array) for array in arrays])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_gradient(kernel: str, arrays: list[Any]) -> list[Any]:
    return arrays


@_without_gradient.defjvp
def _no_gradient(kernel, primals, tangents):
    raise NotImplementedError(
        f"{kernel} has no gradient: take that of dense attention, or put jax.lax.stop_gradient around its arguments"
    )
