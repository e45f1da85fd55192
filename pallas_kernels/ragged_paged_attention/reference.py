"""The meaning of `ragged_paged_attention`, in plain XLA: blocks of queries, each over the pages it can see."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import reference as decode

QUERIES = 128  # queries of one row taken at once
TOKENS = 128  # tokens of its context read in one turn


def ragged_paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    context_lens,
    query_starts,
    *,
    scale,
    sliding_window,
    soft_cap,
    sinks,
    k_scale,
    v_scale,
    invariant=False,
):
    num_tokens, num_q_heads, head_dim = q.shape
    num_seqs = block_tables.shape[0]
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    tokens = max(1, min(TOKENS // page_size, block_tables.shape[1])) * page_size
    if invariant:
        tokens = decode.INVARIANT_TOKENS
    dtype = decode.product_dtype(q, k_pages)
    queries = min(QUERIES, num_tokens)
    query_lens = query_starts[1:] - query_starts[:-1]

    # Rows with a single query, most of a mixed batch, would waste a whole block each: they are decode rows.
    single = query_lens == 1
    last = jnp.maximum(query_starts[1:] - 1, 0)
    single_out = decode.paged_attention(
        q[last],
        k_pages,
        v_pages,
        block_tables,
        jnp.where(single, context_lens, 0),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        split_size=None,
        invariant=invariant,
    )
    # One array holds the queries still to be served and the results of those served: no second one to fill and copy.
    q = q.at[jnp.where(single, last, num_tokens)].set(single_out, mode="drop")

    scale = decode.by_head(scale, k_scale)
    scale = scale if k_scale is None else scale[..., None]  # [num_kv_heads, 1, 1, 1]
    # The others are cut into blocks: block i is the (i - ends[row - 1])th of its row.
    ends = jnp.cumsum(jnp.where(single, 0, -(-query_lens // queries)))
    longest = -(-block_tables.shape[1] * page_size // tokens) * tokens
    tables = jnp.pad(block_tables, [(0, 0), (0, -(-longest // page_size) - block_tables.shape[1])])

    def attend_block(i, q):
        row = jnp.searchsorted(ends, i, side="right")
        done = (i - jnp.where(row > 0, ends[row - 1], 0)) * queries  # queries of the row in blocks before this one
        begin = jnp.minimum(query_starts[row] + done, num_tokens - queries)
        skip = query_starts[row] + done - begin  # at the end of the array a block begins among queries served before
        stop = skip + jnp.minimum(query_lens[row] - done, queries)
        index = jnp.arange(queries, dtype=jnp.int32)
        position = context_lens[row] - query_lens[row] + done - skip + index
        old = lax.dynamic_slice_in_dim(q, begin, queries)
        block = old.reshape(queries, num_kv_heads, group, head_dim)
        block = block.transpose(1, 0, 2, 3).reshape(num_kv_heads, queries * group, head_dim)
        # The block's queries see tokens from `first_seen` on, and before `end`.
        first_seen = 0 if sliding_window is None else jnp.maximum(position[0] + skip - sliding_window + 1, 0)
        end = position[0] + stop

        table = lax.dynamic_index_in_dim(tables, row, keepdims=False)

        def turn(j, carry):
            at = j * tokens + jnp.arange(tokens, dtype=jnp.int32)
            k = decode.read_tokens(k_pages, table, j, tokens, dtype)  # [kv, tokens, d]
            v = decode.read_tokens(v_pages, table, j, tokens, dtype)
            v = jnp.where(((at >= first_seen) & (at < end))[:, None], v, 0)
            scores = decode.product("kqd,ktd->kqt", block.astype(dtype), k)
            scores = scores.reshape(num_kv_heads, queries, group, tokens) * scale
            seen = at <= position[:, None]
            if sliding_window is not None:
                seen &= at > position[:, None] - sliding_window

            def weigh(weights):
                weights = weights.reshape(num_kv_heads, queries * group, tokens)
                out = decode.weigh("kqt,ktd->kqd", v, invariant, weights)
                return out.reshape(num_kv_heads, queries, group, head_dim)

            return decode.add_tokens(carry, scores, seen[None, :, None], weigh, soft_cap, invariant)

        shape = (num_kv_heads, queries, group)
        top, total = decode.before_first(sinks, shape, (num_kv_heads, 1, group))
        start = (top, total, jnp.zeros((*shape, head_dim), jnp.float32))
        _, total, acc = lax.fori_loop(first_seen // tokens, -(-end // tokens), turn, start)
        result = acc / jnp.maximum(total, 1e-37)[..., None]
        if v_scale is not None:
            result *= v_scale[:, None, None, None]
        result = result.transpose(1, 0, 2, 3)
        result = result.reshape(queries, num_q_heads, head_dim).astype(q.dtype)
        mine = ((index >= skip) & (index < stop))[:, None, None]
        return lax.dynamic_update_slice_in_dim(q, jnp.where(mine, result, old), begin, 0)

    return lax.fori_loop(0, ends[num_seqs - 1], attend_block, q)
