"""Owns what the Mosaic GPU attention kernels share: their limits, swizzled tiles, loads of pages by TMA, scores."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.target import Target

MASKED = -1e30  # finite: the difference of two masked scores must not turn into NaN
LOG2_E = math.log2(math.e)
ROWS = 64  # of a product on the tensor cores; also the tokens that whole pages, or one page, must make up


def unsupported_pool(target: Target, q: Any, k_pages: Any, eight_bits: tuple[str, ...] = ()) -> str | None:
    """Why a Mosaic kernel that can `widen` pools of `eight_bits` cannot attend over such a pool, or None."""
    if target.platform != "cuda" or target.capability != (9, 0):
        # Elsewhere the compiler aborts the process.
        capability = ".".join(map(str, target.capability or ("none",)))
        return f"compute capability {capability} ({target.device_kind}), supported is 9.0 (Hopper, for its wgmma)"
    if q.dtype not in ("bfloat16", "float16"):
        return f"q holds {q.dtype}, supported are bfloat16 and float16 (what its tensor cores multiply)"
    if k_pages.dtype not in (q.dtype, *eight_bits):
        return f"the pool holds {k_pages.dtype} and q {q.dtype}, supported are {(str(q.dtype), *eight_bits)}"
    page_size, head_dim = k_pages.shape[2:]
    if head_dim % 16 or head_dim > 256:
        return f"head_dim {head_dim}, supported are multiples of 16 up to 256 (32 bytes, the smallest swizzled row)"
    if k_pages.dtype.itemsize == 1 and head_dim > 128 and head_dim % 32:
        return f"head_dim {head_dim} of a pool of 8 bits, supported are multiples of 16 up to 128 and of 32 up to 256"
    if page_size % 8 or (ROWS % page_size and page_size % ROWS):
        return f"pages of {page_size} tokens, supported are 8, 16, 32 and multiples of 64 (whole tiles)"
    return None


def interpreter(interpret: Any) -> Any:
    """What `plgpu.kernel` is to be told: True stands for its interpreter of GPU memory, threads and barriers."""
    return plgpu.InterpretGPUParams() if interpret is True else interpret


def swizzle_bytes(head_dim: int, bits: int = 16) -> int:
    """The widest swizzle, in bytes, for tiles of rows in memory of `head_dim` numbers of 16 or 8 bits."""
    if bits == 8 and head_dim <= 128:  # a row shorter than the swizzle is filled up with zeros
        return min(padded(head_dim), 128)
    return next(width for width in (128, 64, 32) if head_dim * bits // 8 % width == 0)


def padded(head_dim: int) -> int:
    """The width of a tile for such rows: whole products in either orientation. TMA fills the rest with zeros."""
    return -(-head_dim // ROWS) * ROWS


def tile(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Shared memory for matrices that TMA fills and the tensor cores read."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def overhanging(size: int, traced: Any) -> pl.Slice:
    """The first `size` places of an axis that may have fewer: TMA reads zeros there and writes nothing.

    The start is made of any traced integer, since a constant slice is checked against the axis.
    """
    return pl.ds(traced * 0, size)


def loads_per_block(block_tokens: int, page_size: int) -> int:
    """How many pages, or parts of one, a block of tokens consists of: the arrivals that its barrier awaits."""
    return max(1, block_tokens // page_size)


def pages_of_block(block_tables: Any, row: Any, block: Any, seen: tuple[Any, Any], slot: Any, page_size: int) -> list:
    """The ids of the pages of a block as large as `slot`, for a row of which the tokens [first, end) are `seen`.

    The row's first and last page with such tokens stand in for the block's others, which are never read.
    """
    block_tokens = slot.shape[0]
    first_page, last_page = (lax.div(at, jnp.int32(page_size)) for at in (seen[0], seen[1] - 1))
    if block_tokens <= page_size:
        return [block_tables[row, lax.div(block * block_tokens, jnp.int32(page_size))]]
    count = block_tokens // page_size
    return [block_tables[row, jnp.clip(block * count + i, first_page, last_page)] for i in range(count)]


def load_block(pages: Any, page_ids: list, head: Any, block: Any, slot: Any, barrier: Any) -> None:
    """Start the loads of one head's block of tokens into `slot` [block_tokens, padded(head_dim)]."""
    block_tokens, width = slot.shape
    page_size = pages.shape[2]
    size = min(block_tokens, page_size)
    begin = lax.rem(block * block_tokens, jnp.int32(page_size)) if block_tokens < page_size else 0
    for i, page in enumerate(page_ids):
        source = pages.at[page, head, pl.ds(begin, size), overhanging(width, head)]
        plgpu.copy_gmem_to_smem(source, slot.at[pl.ds(i * size, size)], barrier)


def seen_rows(shape: tuple[int, ...], start: Any, first: Any, end: Any, layout: Any) -> Any:
    """Which rows of a tile whose first is token `start` hold a token of [first, end)."""
    token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + start
    return (token >= first) & (token < end)


def zero_unseen(slot: Any, start: Any, first: Any, end: Any) -> None:
    """Zero the rows of `slot` that hold no token of [first, end), its first row being token `start`.

    What lies there may be NaN, and a weight of 0 times NaN is NaN. Only blocks that have such rows pay for it.
    """
    block_tokens, width = slot.shape

    @pl.when((start < first) | (start + block_tokens > end))
    def _():
        for at in range(0, block_tokens, ROWS):
            rows = slot.at[pl.ds(at, ROWS)]
            values = plgpu.load(rows, layout=plgpu.Layout.WGMMA)
            seen = seen_rows((ROWS, width), start + at, first, end, plgpu.Layout.WGMMA)
            rows[...] = jnp.where(seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()  # before the tensor cores, or the next load, see the slot


def widen(slot: Any, tile: Any, start: Any = None, first: Any = None, end: Any = None) -> None:
    """Write the 8-bit numbers of `slot` into `tile`, as numbers that the tensor cores multiply.

    With a start, rows that hold no token of [first, end) become zeros, as by `zero_unseen`.
    """
    layout = plgpu.Layout.WGMMA_8BIT
    for at in range(0, slot.shape[0], ROWS):
        rows = pl.ds(at, ROWS)
        values = plgpu.load(slot.at[rows], layout=layout)
        values = values.astype(jnp.float32).astype(tile.dtype)  # not every pair of types has an instruction
        if start is not None:
            seen = seen_rows(values.shape, start + at, first, end, layout)
            values = jnp.where(seen, values, jnp.zeros_like(values))
        tile[rows] = values
    plgpu.commit_smem()


def base_2_scores(products: Any, scale: Any, soft_cap: float | None) -> Any:
    """Scores times log2(e), for `exp2`: the products scaled, then capped."""
    if soft_cap is None:
        return products * (scale * LOG2_E)
    # tanh from an exponential: the hardware's own is off by 2**-11, which a cap of 50 makes 0.02.
    power = jnp.exp2(products * (scale * (2 * LOG2_E / soft_cap)))
    return (soft_cap * LOG2_E) - (2 * soft_cap * LOG2_E) / (power + 1)


def store(ref: Any, value: Any) -> None:
    """Write registers to global memory, of which some threads may write less than whole cache lines."""
    if hasattr(plgpu, "store"):  # jax >= 0.12; before, all such stores were allowed
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
