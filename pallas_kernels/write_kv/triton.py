"""Owns the write into slots in Pallas' Triton lowering: keys and values in one kernel.

Each program moves the keys and the values of one token, all heads. The conversion to the pool's dtype comes before, in
XLA, which makes it one with the rotation of the keys: what the kernel reads is then as small as what it writes.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.copy_pages.triton import as_moved, as_stored
from pallas_kernels.copy_pages.triton import unsupported as unsupported_pool
from pallas_kernels.write_kv.reference import to_pool


def write_kv(k_pages, v_pages, k, v, slot_mapping, *, k_scale, v_scale, interpret, num_warps):
    dtype = k_pages.dtype
    pools = [as_moved(pages) for pages in (k_pages, v_pages)]
    new = [as_moved(to_pool(x, scale, dtype)) for x, scale in ((k, k_scale), (v, v_scale))]
    written = pl.pallas_call(
        partial(_kernel, page_size=k_pages.shape[2]),
        grid=slot_mapping.shape,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(slot_mapping, *new, *pools)
    return tuple(as_stored(pages, dtype) for pages in written)


def unsupported(target, k_pages, k) -> str | None:
    return unsupported_pool(target, k_pages)


def _kernel(slots_ref, k_ref, v_ref, *refs, page_size):
    pools = refs[2:]  # results, in the memory of the arguments
    token = pl.program_id(0)
    slot = slots_ref[token]
    page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
    num_heads, head_dim = k_ref.shape[1:]
    head = jnp.arange(pl.next_power_of_2(num_heads), dtype=jnp.int32)[:, None]
    column = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)[None, :]
    mask = (head < num_heads) & (column < head_dim)
    other = jnp.zeros((), k_ref.dtype)
    moved = [plt.load(ref.at[token, head, column], mask=mask, other=other) for ref in (k_ref, v_ref)]
    for pool, tile in zip(pools, moved):
        plt.store(pool.at[page, head, offset, column], tile, mask=mask)
