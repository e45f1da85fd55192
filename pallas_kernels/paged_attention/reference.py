"""The meaning of `paged_attention`, in plain XLA. Work follows `context_lens`: padded pages are not read."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

# Rows that share a loop, and tokens read in one turn of it: small enough for the gathered tiles to stay in a CPU's
# cache, large enough to pay for the turn.
ROWS = 4
TOKENS = 128

MASKED = -1e30  # finite: a row of only masked scores must not turn into NaN


def paged_attention(q, k_pages, v_pages, block_tables, context_lens, *, scale, sliding_window, soft_cap):
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    pages = max(1, min(TOKENS // page_size, block_tables.shape[1]))
    tokens = pages * page_size
    rows = min(ROWS, num_seqs)

    # Rows are taken longest first, so that those in one group have about the same number of turns.
    order = jnp.argsort(-context_lens)
    padded = -(-num_seqs // rows) * rows
    pad_rows = [(0, padded - num_seqs)]
    q_rows = jnp.pad(q[order].reshape(num_seqs, num_kv_heads, group, head_dim), pad_rows + [(0, 0)] * 3)
    lens = jnp.pad(context_lens[order], pad_rows)
    tables = jnp.pad(block_tables[order], pad_rows + [(0, -block_tables.shape[1] % pages)])

    def attend_rows(_, operands):
        q, tables, lens = operands  # [rows, kv, group, d], [rows, turns, pages], [rows]
        first = jnp.zeros_like(lens) if sliding_window is None else jnp.maximum(lens - sliding_window, 0)

        def turn(i, carry):
            top, total, out = carry
            page_ids = lax.dynamic_index_in_dim(tables, i, axis=1, keepdims=False)
            at = i * tokens + jnp.arange(tokens, dtype=jnp.int32)
            seen = (at >= first[:, None]) & (at < lens[:, None])  # [rows, tokens]
            by_page = seen.reshape(-1, pages, 1, page_size, 1)
            k = k_pages.at[page_ids].get(mode="promise_in_bounds")  # [rows, pages, kv, page_size, d]
            # An unwritten slot may hold anything, NaN included, and 0 * NaN is NaN.
            v = jnp.where(by_page, v_pages.at[page_ids].get(mode="promise_in_bounds"), 0)
            scores = jnp.einsum("rkgd,rpktd->rkgpt", q, k.astype(q.dtype), preferred_element_type=jnp.float32) * scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(seen[:, None, None], scores.reshape(*scores.shape[:3], tokens), MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            keep = jnp.exp(top - new_top)
            weights = jnp.exp(scores - new_top[..., None])
            total = total * keep + weights.sum(-1)
            weights = weights.astype(v.dtype).reshape(*scores.shape[:3], pages, page_size)
            out = out * keep[..., None] + jnp.einsum(
                "rkgpt,rpktd->rkgd", weights, v, preferred_element_type=jnp.float32
            )
            return new_top, total, out

        shape = q.shape[:3]
        start = (jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32))
        begin = 0 if sliding_window is None else first.min() // tokens
        _, total, out = lax.fori_loop(begin, -(-lens.max() // tokens), turn, start)
        # A padding row saw nothing: its weights are exp(0) on masked scores, or none at all.
        return None, jnp.where((lens > 0)[:, None, None, None], out / jnp.maximum(total, 1e-37)[..., None], 0)

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
    return jnp.zeros_like(out).at[order].set(out)
