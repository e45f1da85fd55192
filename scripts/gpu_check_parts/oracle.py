"""Owns the definitions that kernels are held to, in float64 with NumPy, and what they are given: poisoned pools."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu_check_parts.tasks import EIGHT_BITS, TYPES


def attention(q, k, v, *, scale, sliding_window, soft_cap, sinks) -> tuple[np.ndarray, np.ndarray]:
    """The results for the last queries of one row, and the sum of weights times |v|: what rounding is measured by.

    q: [queries, num_q_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim]. All float64.
    """
    queries, num_q_heads, head_dim = q.shape
    tokens, num_kv_heads = k.shape[:2]
    grouped = q.reshape(queries, num_kv_heads, -1, head_dim)
    scores = np.einsum("qkgd,tkd->kgqt", grouped, k, optimize=True) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    at, position = np.arange(tokens), tokens - queries + np.arange(queries)[:, None]
    seen = at <= position
    if sliding_window is not None:
        seen &= at > position - sliding_window
    scores = np.where(seen, scores, -np.inf)
    sink = np.full(num_q_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    sink = sink.reshape(num_kv_heads, -1, 1, 1)
    top = np.maximum(scores.max(-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
    out = np.einsum("kgqt,tkd->qkgd", weights, v, optimize=True)
    size = np.einsum("kgqt,tkd->qkgd", weights, np.abs(v), optimize=True)
    return out.reshape(q.shape), size.reshape(q.shape)


class Pool(NamedTuple):
    """Pages [n, num_kv_heads, page_size, head_dim] and their places in a pool of `num_pages`, else full of poison."""

    page_ids: np.ndarray
    k: np.ndarray
    v: np.ndarray
    num_pages: int

    def on_device(self) -> tuple[jax.Array, jax.Array]:
        return tuple(_scattered(pages, self.page_ids, self.num_pages) for pages in (self.k, self.v))


def poison(dtype: Any) -> Any:
    """What no kernel may let through: NaN, or the largest of whole numbers, which have none."""
    return 127 if dtype == np.int8 else np.nan


def _scattered(pages: np.ndarray, page_ids: np.ndarray, num_pages: int) -> jax.Array:
    if num_pages * pages[0].nbytes < 1 << 28:
        whole = np.full((num_pages, *pages.shape[1:]), poison(pages.dtype), pages.dtype)
        whole[page_ids] = pages
        return jnp.asarray(whole)

    def scatter(page_ids, pages):
        whole = jnp.full((num_pages, *pages.shape[1:]), poison(pages.dtype), pages.dtype)
        return whole.at[page_ids].set(pages, unique_indices=True)

    return jax.jit(scatter)(page_ids, pages)


def to_pages(tokens: np.ndarray, page_size: int) -> np.ndarray:
    """[tokens, num_kv_heads, head_dim] as pages, the slots behind the last token poisoned."""
    padded = np.full((-(-len(tokens) // page_size) * page_size, *tokens.shape[1:]), poison(tokens.dtype), tokens.dtype)
    padded[: len(tokens)] = tokens
    return padded.reshape(-1, page_size, *tokens.shape[1:]).transpose(0, 2, 1, 3)


def normal(rng: np.random.Generator, shape: tuple[int, ...], kind: str, scale: np.ndarray | None = None) -> np.ndarray:
    """Numbers as a pool of this type stores them; `scale`: one for each head, the second axis from the end."""
    numbers = rng.standard_normal(shape, dtype=np.float32)
    if scale is not None:
        numbers /= scale[:, None]
    return (numbers.round() if kind == "int8" else numbers).astype(TYPES[kind])


def scales(kind: str, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray] | None:
    """`k_scale` and `v_scale` for a pool of eight bits."""
    if kind not in EIGHT_BITS:
        return None
    unit = 0.03 if kind == "int8" else 0.7
    return tuple(np.linspace(a * unit, b * unit, num_kv_heads, dtype=np.float32) for a, b in ((1, 1.5), (2, 1)))


def poison_free_memory(rehearse: bool) -> None:
    """Leave NaN behind in memory that the next calls are given for what they keep between kernels."""
    size = 1 << (10 if rehearse else 26)
    jnp.full(size, jnp.nan, jnp.float32).block_until_ready().delete()
