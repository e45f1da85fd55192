"""Attention of any number of queries a row over that row's pages: prefill chunks and mixed batches."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.checks import check_attention, check_query_starts, jax_arrays, need
from pallas_kernels.implementation import choose, in_32_bits
from pallas_kernels.ragged_paged_attention import reference


@in_32_bits
def ragged_paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    v_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    block_tables: Int32[Array, "num_seqs pages_per_seq"],
    context_lens: Int32[Array, " num_seqs"],
    query_starts: Int32[Array, " num_seqs_plus_1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    k_scale: Float[Array, " num_kv_heads"] | None = None,
    v_scale: Float[Array, " num_kv_heads"] | None = None,
    invariant: bool = False,
    implementation: str | None = None,
    interpret: Any = False,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """Causal attention of packed queries: row r owns `q[query_starts[r]:query_starts[r + 1]]`, its last tokens.

    The keys and values of those tokens are in the pages already: `context_lens[r]` counts them, so that a row has no
    more queries than context. Query j of n sees the row's first `context_lens[r] - n + j + 1` tokens, or the last
    `sliding_window` of these. All else is as in `paged_attention`. Tokens at and after `query_starts[-1]` are padding,
    whose results mean nothing; a row may have no queries.

    invariant: a query's result does not depend, to the last bit, on the rows beside its own, on how its row's queries
        were cut into chunks, on the padding, on the page size, or on `pages_per_seq`. It costs what is gained elsewhere
        by tiles and splits that suit the batch.

    Raises ValueError for arguments that do not fit, NotImplementedError for an implementation that cannot serve them.
    Source: PagedAttention, Kwon et al. 2023 (arXiv:2309.06180); FlashAttention-2's order of loops, Dao 2023
    (arXiv:2307.08691).
    """
    options = check_attention(
        q,
        k_pages,
        v_pages,
        block_tables,
        context_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    check_query_starts(query_starts, context_lens, q.shape[0])
    need(isinstance(invariant, bool), f"invariant must be True or False, got {invariant!r}")
    name, module, target = choose("ragged_paged_attention", implementation, interpret, q, k_pages, block_tables)
    if not q.size or not block_tables.size:
        return jnp.zeros(q.shape, q.dtype)
    *arrays, sinks, k_scale, v_scale = jax_arrays(
        "ragged_paged_attention",
        *(q, k_pages, v_pages, block_tables, context_lens, query_starts),
        *(sinks, k_scale, v_scale),
    )
    options |= {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "invariant": invariant}
    if module is None:
        return reference.ragged_paged_attention(*arrays, **options)
    blocks = block_sizes(
        "ragged_paged_attention", name, target, head_dim=q.shape[2], kv_bits=8 * k_pages.dtype.itemsize
    )
    return module.ragged_paged_attention(*arrays, **options, interpret=interpret, **blocks)
