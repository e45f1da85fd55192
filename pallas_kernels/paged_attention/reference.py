"""The meaning of `paged_attention`, in plain XLA. Work follows `context_lens`: padded pages are not read."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

# Rows that share a loop, and tokens read in one turn of it: small enough for the gathered tiles to stay in a CPU's
# cache, large enough to pay for the turn.
ROWS = 8
TOKENS = 96

# Tokens read in a turn where bits must not depend on the page size, and what the widths of products are a multiple of
# where they must not depend on the number of their rows: a CPU's products are then single running sums, each in the
# same order, whatever tiles they are computed in.
INVARIANT_TOKENS = 128
INVARIANT_WIDTH = 64

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
    invariant=False,
):
    """`invariant`: as in `pallas_kernels.ragged_paged_attention`, bit by bit the same as its reference."""
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    rows, tokens, least = ROWS, max(1, TOKENS // page_size) * page_size, 2
    heads = group
    if invariant:
        tokens, heads = INVARIANT_TOKENS, max(group, 2)  # not one: it would be another kind of product
    elif split_size is None:  # in other shapes, or in one turn alone, sums may be made in another order
        rows, tokens, least = min(rows, num_seqs), min(tokens, block_tables.shape[1] * page_size), 1
    turns = max(least, -(-block_tables.shape[1] * page_size // tokens))
    dtype = product_dtype(q, k_pages)
    scale = by_head(scale, k_scale)

    # Rows are taken longest first, so that those in one group have about the same number of turns.
    order = jnp.argsort(-context_lens)
    padded = -(-num_seqs // rows) * rows
    pad_rows = [(0, padded - num_seqs)]
    q_rows = jnp.pad(q[order].reshape(num_seqs, num_kv_heads, group, head_dim), pad_rows + [(0, 0)] * 3)
    lens = jnp.pad(context_lens[order], pad_rows)
    tables = jnp.pad(block_tables[order], pad_rows + [(0, -(-turns * tokens // page_size) - block_tables.shape[1])])

    def attend_rows(_, operands):
        q, tables, lens = operands  # [rows, kv, group, d], [rows, pages], [rows]
        first = jnp.zeros_like(lens) if sliding_window is None else jnp.maximum(lens - sliding_window, 0)

        def turn(i, carry):
            at = i * tokens + jnp.arange(tokens, dtype=jnp.int32)
            seen = (at >= first[:, None]) & (at < lens[:, None])  # [rows, tokens]
            k = read_tokens(k_pages, tables, i, tokens, dtype)  # [rows, kv, tokens, d]
            # An unwritten slot may hold anything, NaN included, and 0 * NaN is NaN.
            v = jnp.where(seen[:, None, :, None], read_tokens(v_pages, tables, i, tokens, dtype), 0)
            if invariant:
                few = jnp.pad(q.astype(dtype), [(0, 0), (0, 0), (0, heads - group), (0, 0)])
                scores = product("rkgd,rktd->rkgt", few, k)[:, :, :group]
            else:
                scores = product("rktd,rkgd->rktg", k, q.astype(dtype)).transpose(0, 1, 3, 2)
            seen = seen[:, None, None]

            def values(weights):
                weights = jnp.pad(weights, [(0, 0), (0, 0), (0, heads - group), (0, 0)])
                return weigh("rkgt,rktd->rkgd", v, invariant, weights)[:, :, :group]

            return add_tokens(carry, scores * scale, seen, values, soft_cap, invariant)

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
            tables.reshape(groups, rows, -1),
            lens.reshape(groups, rows),
        ),
    )
    out = out.reshape(padded, num_q_heads, head_dim)[:num_seqs].astype(q.dtype)
    return out[jnp.argsort(order)]


def product(axes, a, b):
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)


def weigh(axes, v, invariant, weights):
    """The sum of values by weights: float32, the tokens being the last axis of `weights`."""
    head_dim = v.shape[-1]
    if invariant:
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -head_dim % INVARIANT_WIDTH)])
    return product(axes, weights.astype(v.dtype), v)[..., :head_dim]


def add_tokens(carry, scores, seen, weigh, soft_cap, invariant):
    """A running softmax gone on by some tokens: the largest score, the sum of weights, and that of weighted values.

    scores: [..., tokens], float32; `seen` tells which count; `weigh` sums the tokens' values by their weights.
    """
    top, total, out = carry
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    keep = jnp.exp(top - new_top)
    weights = jnp.exp(scores - new_top[..., None])
    if not invariant:
        return new_top, total * keep + weights.sum(-1), out * keep[..., None] + weigh(weights)
    # What XLA fuses with what decides which products and sums are rounded once or twice, and in which order it sums.
    weights, kept = lax.optimization_barrier((weights, total * keep))
    new, added = lax.optimization_barrier((weigh(weights), sum_of_halves(weights)))
    return new_top, kept + added, out * keep[..., None] + new


def sum_of_halves(x):
    """The sum over the last axis, whose length is a power of two, in an order that is always the same."""
    while (length := x.shape[-1]) > 1:
        x = x[..., : length // 2] + x[..., length // 2 :]
    return x[..., 0]


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


def read_tokens(pages, tables, turn, number, dtype):
    """The `turn`th `number` tokens of some rows, by head, as `dtype`: [..., num_kv_heads, number, head_dim]."""
    num_kv_heads, page_size, head_dim = pages.shape[1:]
    heads = jnp.arange(num_kv_heads, dtype=tables.dtype)[:, None]
    # One row to copy for each page and head, so that the heads come out in front without a transposition; the barrier
    # keeps XLA from folding the copy into loops over single numbers.
    if number % page_size == 0:
        count = number // page_size
        page_ids = lax.dynamic_slice_in_dim(tables, turn * count, count, axis=-1)
        rows, index = pages.reshape(-1, page_size * head_dim), page_ids[..., None, :] * num_kv_heads + heads
    else:
        at = turn * number + jnp.arange(number, dtype=tables.dtype)
        page_ids = jnp.take(tables, at // page_size, axis=-1, mode="clip")
        rows = pages.reshape(-1, head_dim)
        index = (page_ids[..., None, :] * num_kv_heads + heads) * page_size + at % page_size
    gathered = lax.optimization_barrier(rows.at[index].get(mode="promise_in_bounds")).astype(dtype)
    return gathered.reshape(*tables.shape[:-1], num_kv_heads, number, head_dim)
