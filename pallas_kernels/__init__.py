"""Kernels over a paged KV cache, usable without the rest of jpaged: arrays in, arrays out.

Layout of a pool: `k_pages` and `v_pages` are `[num_pages, num_kv_heads, page_size, head_dim]`, so that one page of one
head is one contiguous tile. `block_tables[row, i]` is the page that holds tokens `i * page_size ...` of a row. Page 0
is never a row's own: padding points to it.

Every kernel takes `implementation`: None picks the best that can serve the call on the device it is traced for, a named
one serves it or raises `NotImplementedError`.

- "mosaic_gpu": for Hopper GPUs; loads pages asynchronously, runs on the tensor cores.
- "triton": for Ampere GPUs and newer, through Pallas' Triton lowering.
- "jax_triton": the decode kernel once more, as a kernel of Triton itself; needs the `jax-triton` package, and its name.
- "xla": plain JAX on any device. It defines what the others mean.

`interpret=True` runs a GPU kernel on a CPU, slowly, for tests. Options are numbers of Python's or NumPy's, known while
tracing. What arrays hold, such as page ids and lengths, is checked where they are NumPy's, and under
`jax.experimental.checkify.checkify` on the device; otherwise it is trusted. No kernel has a gradient.
"""

from pallas_kernels.copy_pages import copy_pages
from pallas_kernels.implementation import IMPLEMENTATIONS, default_implementation
from pallas_kernels.keep_top import keep_top
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.write_kv import write_kv

__all__ = [
    "IMPLEMENTATIONS",
    "copy_pages",
    "default_implementation",
    "keep_top",
    "paged_attention",
    "ragged_paged_attention",
    "write_kv",
]
