"""The meaning of `paged_attention`, in plain XLA. Work follows `context_lens`: padded pages are not read."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

# Rows that share a loop, and tokens read in one turn of it: small enough for the gathered tiles to stay in a CPU's
# cache, large enough to pay for the turn.
ROWS = 8
TOKENS = 96

MASKED = -1e30  # finite: a row of only masked scores must not turn into NaN


def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    context_lens,
    *,
    scale,
    sliding_window,
    soft_cap,
    sinks,
    k_scale,
    v_scale,
    split_size,
):
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    rows, pages, least = ROWS, max(1, TOKENS // page_size), 2
    if split_size is None:  # in other shapes, or in one turn alone, sums may be made in another order
        rows, pages, least = min(rows, num_seqs), min(pages, block_tables.shape[1]), 1
    tokens, turns = pages * page_size, max(least, -(-block_tables.shape[1] // pages))
    dtype = product_dtype(q, k_pages)
    scale = by_head(scale, k_scale)

    # Rows are taken longest first, so that those in one group have about the same number of turns.
    order = jnp.argsort(-context_lens)
    padded = -(-num_seqs // rows) * rows
    pad_rows = [(0, padded - num_seqs)]
    q_rows = jnp.pad(q[order].reshape(num_seqs, num_kv_heads, group, head_dim), pad_rows + [(0, 0)] * 3)
    lens = jnp.pad(context_lens[order], pad_rows)
    tables = jnp.pad(block_tables[order], pad_rows + [(0, turns * pages - block_tables.shape[1])])

    def attend_rows(_, operands):
        q, tables, lens = operands  # [rows, kv, group, d], [rows, turns, pages], [rows]
        first = jnp.zeros_like(lens) if sliding_window is None else jnp.maximum(lens - sliding_window, 0)

        def turn(i, carry):
            top, total, out = carry
            page_ids = lax.dynamic_index_in_dim(tables, i, axis=1, keepdims=False)  # [rows, pages]
            at = i * tokens + jnp.arange(tokens, dtype=jnp.int32)
            seen = (at >= first[:, None]) & (at < lens[:, None])  # [rows, tokens]
            k = gather_pages(k_pages, page_ids, dtype)  # [rows, kv, tokens, d]
            # An unwritten slot may hold anything, NaN included, and 0 * NaN is NaN.
            v = jnp.where(seen[:, None, :, None], gather_pages(v_pages, page_ids, dtype), 0)
            scores = jnp.einsum("rktd,rkgd->rktg", k, q.astype(dtype), preferred_element_type=jnp.float32)
            scores = scores.transpose(0, 1, 3, 2) * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(seen[:, None, None], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            keep = jnp.exp(top - new_top)
            weights = jnp.exp(scores - new_top[..., None])
            total = total * keep + weights.sum(-1)
            new = jnp.einsum("rkgt,rktd->rkgd", weights.astype(dtype), v, preferred_element_type=jnp.float32)
            out = out * keep[..., None] + new
            return new_top, total, out

        top, total = before_first(sinks, q.shape[:3], (num_kv_heads, group))
        start = (top, total, jnp.zeros(q.shape, jnp.float32))
        begin = 0 if sliding_window is None else first.min() // tokens
        _, total, out = lax.fori_loop(begin, -(-lens.max() // tokens), turn, start)
        # A padding row saw nothing: all its values were masked to 0, and its total may be 0 too.
        return None, out / jnp.maximum(total, 1e-37)[..., None] * by_head(1, v_scale)

    groups = padded // rows
    _, out = lax.scan(
        attend_rows,
        None,
        (
            q_rows.reshape(groups, rows, num_kv_heads, group, head_dim),
            tables.reshape(groups, rows, -1, pages),
            lens.reshape(groups, rows),
        ),
    )
    out = out.reshape(padded, num_q_heads, head_dim)[:num_seqs].astype(q.dtype)
    return out[jnp.argsort(order)]


def by_head(factor, scale):
    """`factor` times a scale a KV head, to be multiplied with `[num_kv_heads, ., .]`; without one, `factor`."""
    return factor if scale is None else factor * scale[:, None, None]


def before_first(sinks, shape, heads):
    """The largest score and the sum of weights, of `shape`, before any token is read: those of the sinks, if there are.

    `heads`, (num_kv_heads, group), are the last two axes of `shape` or can be broadcast to them.
    """
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    return jnp.broadcast_to(sinks.reshape(heads), shape), jnp.ones(shape, jnp.float32)


def product_dtype(q, k_pages):
    """The type of the products: q's, which holds all numbers of eight bits, or float32 if the pool has another one."""
    return q.dtype if k_pages.dtype.itemsize == 1 or k_pages.dtype == q.dtype else jnp.dtype(jnp.float32)


def gather_pages(pages, page_ids, dtype):
    """The tokens of some pages, by head, as `dtype`: [..., num_kv_heads, pages * page_size, head_dim]."""
    num_kv_heads, page_size, head_dim = pages.shape[1:]
    heads = jnp.arange(num_kv_heads, dtype=page_ids.dtype)[:, None]
    # One row to copy for each page and head, so that the heads come out in front without a transposition; the barrier
    # keeps XLA from folding the copy into loops over single numbers.
    rows = pages.reshape(-1, page_size * head_dim)
    gathered = rows.at[page_ids[..., None, :] * num_kv_heads + heads].get(mode="promise_in_bounds")
    gathered = lax.optimization_barrier(gathered).astype(dtype)
    return gathered.reshape(*page_ids.shape[:-1], num_kv_heads, -1, head_dim)
