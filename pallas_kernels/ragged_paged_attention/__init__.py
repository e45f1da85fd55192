"""Attention of any number of queries a row over that row's pages: prefill chunks and mixed batches."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels.implementation import check_pool, check_scores, resolve_implementation
from pallas_kernels.ragged_paged_attention import reference


def ragged_paged_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k_pages: Float[Array, "num_pages num_kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_pages num_kv_heads page_size head_dim"],
    block_tables: Int32[Array, "num_seqs pages_per_seq"],
    context_lens: Int32[Array, " num_seqs"],
    query_starts: Int32[Array, " num_seqs_plus_1"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """Causal attention of packed queries: row r owns `q[query_starts[r]:query_starts[r + 1]]`, its last tokens.

    The keys and values of those tokens are in the pages already: `context_lens[r]` counts them. Query j of n sees the
    row's first `context_lens[r] - n + j + 1` tokens, or the last `sliding_window` of these. All else is as in
    `paged_attention`. Tokens at and after `query_starts[-1]` are padding, whose results mean nothing; a row may have no
    queries.

    Raises ValueError for shapes that do not fit, NotImplementedError for an implementation that cannot serve them.
    Source: PagedAttention, Kwon et al. 2023 (arXiv:2309.06180); FlashAttention-2's order of loops, Dao 2023
    (arXiv:2307.08691).
    """
    check_pool(q, k_pages, v_pages, block_tables, context_lens)
    check_scores(sliding_window, soft_cap)
    if query_starts.shape != (block_tables.shape[0] + 1,) or query_starts.dtype != "int32":
        raise ValueError(
            f"query_starts must be int32 [{block_tables.shape[0] + 1}] (num_seqs + 1), "
            f"got {query_starts.dtype} {query_starts.shape}"
        )
    resolve_implementation("ragged_paged_attention", implementation)
    return reference.ragged_paged_attention(
        q,
        k_pages,
        v_pages,
        block_tables,
        context_lens,
        query_starts,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
