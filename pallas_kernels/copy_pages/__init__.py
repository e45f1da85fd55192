"""Copying whole pages of the pool to other pages: for copy-on-write and for swapping."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.checks import check_copies, jax_arrays
from pallas_kernels.copy_pages import reference
from pallas_kernels.implementation import choose, in_32_bits


@in_32_bits
def copy_pages(
    k_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    v_pages: Shaped[Array, "num_pages num_kv_heads page_size head_dim"],
    sources: Int32[Array, " num_copies"],
    targets: Int32[Array, " num_copies"],
    *,
    implementation: str | None = None,
    interpret: Any = False,
):
    """The pools with page `targets[i]` equal to page `sources[i]`, for every i.

    Donate the pools to the surrounding `jit` and the pages are copied in place. All copies happen at once: no target
    may also be a source, and no target come twice. Page 0 aside: pad with copies of page 0 to page 0.

    Raises ValueError for arguments that do not fit, NotImplementedError for an implementation that cannot serve them.
    """
    check_copies(k_pages, v_pages, sources, targets)
    name, module, target = choose("copy_pages", implementation, interpret, k_pages)
    if not sources.size:
        return jnp.asarray(k_pages), jnp.asarray(v_pages)
    arrays = jax_arrays("copy_pages", k_pages, v_pages, sources, targets)
    if module is None:
        return reference.copy_pages(*arrays)
    blocks = block_sizes("copy_pages", name, target, head_dim=k_pages.shape[3], kv_bits=8 * k_pages.dtype.itemsize)
    return module.copy_pages(*arrays, interpret=interpret, **blocks)
