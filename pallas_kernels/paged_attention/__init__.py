"""Attention of one query a row over that row's pages: the decode kernel."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels.implementation import check_pool, check_scores, resolve_implementation
from pallas_kernels.paged_attention import reference


def paged_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    k_pages: Float[Array, "num_pages num_kv_heads page_size head_dim"],
    v_pages: Float[Array, "num_pages num_kv_heads page_size head_dim"],
    block_tables: Int32[Array, "num_seqs pages_per_seq"],
    context_lens: Int32[Array, " num_seqs"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "num_seqs num_q_heads head_dim"]:
    """`softmax(cap(q k^T * scale)) v` for the last token of each row, over the row's first `context_lens` tokens.

    Query head h reads KV head `h // (num_q_heads // num_kv_heads)`. `sliding_window` keeps the last that many tokens.
    `soft_cap` c maps a score s to `c * tanh(s / c)`. Scores and sums are float32, the result has q's dtype. A row with
    `context_lens` 0 (padding) gives zeros. Slots that the query does not see are never used, whatever they hold.

    Raises ValueError for shapes that do not fit, NotImplementedError for an implementation that cannot serve them.
    Source: PagedAttention, Kwon et al. 2023 (arXiv:2309.06180); running softmax, Milakov and Gimelshein 2018
    (arXiv:1805.02867).
    """
    check_pool(q, k_pages, v_pages, block_tables, context_lens)
    check_scores(sliding_window, soft_cap)
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows, block_tables has {block_tables.shape[0]}: one query a row")
    resolve_implementation("paged_attention", implementation)
    return reference.paged_attention(
        q, k_pages, v_pages, block_tables, context_lens, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )
