"""Kernels over a paged KV cache, usable without the rest of jpaged: arrays in, arrays out.

Layout of a pool: `k_pages` and `v_pages` are `[num_pages, num_kv_heads, page_size, head_dim]`, so that one page of one
head is one contiguous tile. `block_tables[row, i]` is the page that holds tokens `i * page_size ...` of a row. Page 0
is never a row's own: padding points to it.

Every kernel takes `implementation=None | "mosaic_gpu" | "triton" | "xla"`. None picks the best that can serve the
inputs; a named one serves them or raises `NotImplementedError`.
"""

from pallas_kernels.implementation import IMPLEMENTATIONS, default_implementation
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.write_kv import write_kv

__all__ = [
    "IMPLEMENTATIONS",
    "default_implementation",
    "paged_attention",
    "ragged_paged_attention",
    "write_kv",
]
