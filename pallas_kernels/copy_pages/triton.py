"""Owns the copy of pages in Pallas' Triton lowering.

A page of all heads is one contiguous piece of memory. Each program copies `block_numbers` numbers of it, of the keys
and of the values; both are under way before either is stored.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def copy_pages(k_pages, v_pages, sources, targets, *, interpret, block_numbers, num_warps):
    shape, dtype = k_pages.shape, k_pages.dtype
    pools = [as_moved(pages) for pages in (k_pages, v_pages)]
    moved_shape = pools[0].shape
    pools = [pages.reshape(shape[0], -1) for pages in pools]
    numbers = pools[0].shape[1]
    block = min(block_numbers, pl.next_power_of_2(numbers))
    copied = pl.pallas_call(
        partial(_kernel, numbers=numbers, block=block),
        grid=(sources.shape[0], pl.cdiv(numbers, block)),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={2: 0, 3: 1},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="copy_pages",
    )(sources, targets, *pools)
    return tuple(as_stored(pages.reshape(moved_shape), dtype) for pages in copied)


def unsupported(target, k_pages) -> str | None:
    """Why the kernel cannot serve a pool on `target`, or None."""
    if target.capability < (8, 0):
        return f"compute capability {'.'.join(map(str, target.capability))}, where it needs 8.0"
    size = math.prod(k_pages.shape)
    if k_pages.dtype.itemsize == 1 and k_pages.shape[3] % 2 and size > 2**31:
        return f"{size} eight-bit numbers with an odd head_dim ({k_pages.shape[3]}), where it takes 2**31 at most"
    return None


def bytes_in_flight(head_dim: int, itemsize: int, *, block_numbers: int, num_warps: int) -> int:
    """Bytes that one program has asked memory for at once."""
    return 2 * block_numbers * max(itemsize, 2)  # eight bits travel as pairs


def as_moved(array):
    """A view for what is only moved and need not be understood. Eight-bit numbers travel as pairs, which every GPU can
    load and store: Pallas counts offsets in 32 bits up to 4 GiB, which single bytes would overflow from 2 GiB on."""
    if array.dtype.itemsize > 1:
        return array
    if array.shape[-1] % 2:
        return lax.bitcast_convert_type(array, jnp.int8)
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 2), jnp.int16)


def as_stored(array, dtype):
    if array.dtype.itemsize > dtype.itemsize:
        array = lax.bitcast_convert_type(array, jnp.int8)
        array = array.reshape(*array.shape[:-2], -1)
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def _kernel(sources_ref, targets_ref, *refs, numbers, block):
    pools = refs[2:]  # results, in the memory of the arguments
    source, target = sources_ref[pl.program_id(0)], targets_ref[pl.program_id(0)]
    at = pl.program_id(1) * block + jnp.arange(block, dtype=jnp.int32)

    @pl.when(source != target)  # not so for padding, page 0 to page 0
    def _():
        mask = None if numbers % block == 0 else at < numbers
        other = None if mask is None else jnp.zeros((), pools[0].dtype)
        moved = [plt.load(pool.at[source, at], mask=mask, other=other) for pool in pools]
        for pool, tile in zip(pools, moved):
            plt.store(pool.at[target, at], tile, mask=mask)
