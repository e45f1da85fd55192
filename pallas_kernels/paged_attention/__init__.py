"""Attention of one query a row over that row's pages: the decode kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.checks import check_attention, jax_arrays, need, number
from pallas_kernels.implementation import choose, in_32_bits
from pallas_kernels.paged_attention import reference


@in_32_bits
def paged_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    k_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    v_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    block_tables: Int32[Array, "num_seqs pages_per_seq"],
    context_lens: Int32[Array, " num_seqs"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    k_scale: Float[Array, " num_kv_heads"] | None = None,
    v_scale: Float[Array, " num_kv_heads"] | None = None,
    split_size: int | None = None,
    implementation: str | None = None,
    interpret: Any = False,
) -> Float[Array, "num_seqs num_q_heads head_dim"]:
    """`softmax(cap(q k^T * scale)) v` for the last token of each row, over the row's first `context_lens` tokens.

    Query head h reads KV head `h // (num_q_heads // num_kv_heads)`. Scores and sums are float32, the result has q's
    dtype. A row with `context_lens` 0 (padding) gives zeros. Slots that the query does not see are never used, whatever
    they hold, and work follows `context_lens`.

    scale: above 0 (from 1e-20 to 1e20), and like the other options a number known while tracing.
    sliding_window: only the last that many tokens are seen; pages before them are not read.
    soft_cap: c, from 0.001 to 10000, maps a score s to `c * tanh(s / c)`.
    sinks: a float32 score a query head that takes its part of the softmax and has no value.
    k_scale, v_scale: float32 above 0; what a pool of few bits holds, times its head's scale, is the key or value.
    split_size: cut each row's context into splits of so many tokens (a multiple of 64 and of the page size, at most
        2**30), whose results are combined: a row's result then does not depend, to the last bit, on the rows beside
        it, on the padding, or on `pages_per_seq`. None: as many splits as fill the device.
    implementation: see `pallas_kernels`. `interpret=True` runs a GPU kernel on a CPU, slowly, for tests.

    Raises ValueError for arguments that do not fit, NotImplementedError for an implementation that cannot serve them.
    Source: PagedAttention, Kwon et al. 2023 (arXiv:2309.06180); running softmax, Milakov and Gimelshein 2018
    (arXiv:1805.02867); splits over the context: Flash-Decoding, Dao et al. 2023.
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
    need(
        q.shape[0] == block_tables.shape[0],
        f"q has {q.shape[0]} rows, block_tables has {block_tables.shape[0]}: one query a row",
    )
    page_size = k_pages.shape[2]
    if split_size is not None:
        split_size = number("split_size", split_size, int, 64, 2**30)
        need(
            split_size % 64 == 0 and split_size % page_size == 0,
            f"split_size must be a multiple of 64 and of the page size ({page_size}), got {split_size}",
        )
    name, module, target = choose("paged_attention", implementation, interpret, q, k_pages, block_tables)
    if not q.size:
        return jnp.zeros(q.shape, q.dtype)
    *arrays, sinks, k_scale, v_scale = jax_arrays(
        "paged_attention", q, k_pages, v_pages, block_tables, context_lens, sinks, k_scale, v_scale
    )
    options |= {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "split_size": split_size}
    if module is None:
        return reference.paged_attention(*arrays, **options)
    blocks = block_sizes("paged_attention", name, target, head_dim=q.shape[2], kv_bits=8 * k_pages.dtype.itemsize)
    return module.paged_attention(*arrays, **options, num_cores=target.num_cores, interpret=interpret, **blocks)
