"""Owns the write into slots in Pallas' Triton lowering: keys and values in one kernel.

Each program moves the keys and the values of one token: those of all heads, or of as many as `BLOCK_NUMBERS` allow. The
conversion to the pool's dtype (`to_pool`: scales, rounding, clipping) comes before, in XLA, which makes it one with the
rotation of the keys: what the kernel reads is then as small as what it writes, and no card rounds in a way of its own.
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

BLOCK_NUMBERS = 8192  # of a program, and as many values: more would not fit its registers


def write_kv(k_pages, v_pages, k, v, slot_mapping, *, k_scale, v_scale, interpret, num_warps):
    dtype = k_pages.dtype
    pools = [as_moved(pages) for pages in (k_pages, v_pages)]
    new = [as_moved(to_pool(x, scale, dtype)) for x, scale in ((k, k_scale), (v, v_scale))]
    num_tokens, num_heads, columns = new[0].shape
    heads = min(pl.next_power_of_2(num_heads), max(1, BLOCK_NUMBERS // pl.next_power_of_2(columns)))
    written = pl.pallas_call(
        partial(_kernel, page_size=k_pages.shape[2], heads=heads),
        grid=(num_tokens, pl.cdiv(num_heads, heads)),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(slot_mapping, *new, *pools)
    return tuple(as_stored(pages, dtype) for pages in written)


def unsupported(target, k_pages, k) -> str | None:
    return unsupported_pool(target, k_pages)


def _kernel(slots_ref, k_ref, v_ref, *refs, page_size, heads):
    pools = refs[2:]  # results, in the memory of the arguments
    token = pl.program_id(0)
    slot = slots_ref[token]
    page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
    num_heads, columns = k_ref.shape[1:]
    head = (pl.program_id(1) * heads + jnp.arange(heads))[:, None]
    column = jnp.arange(pl.next_power_of_2(columns))[None, :]
    mask = (head < num_heads) & (column < columns)
    other = jnp.zeros((), k_ref.dtype)
    moved = [plt.load(ref.at[token, head, column], mask=mask, other=other) for ref in (k_ref, v_ref)]
    for pool, tile in zip(pools, moved):
        plt.store(pool.at[page, head, offset, column], tile, mask=mask)
