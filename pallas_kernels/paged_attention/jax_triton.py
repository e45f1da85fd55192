"""Owns the decode kernel written in Triton itself and run through `jax-triton`: `triton.py`'s algorithm without Pallas.

For the day on which JAX drops its Triton lowering. It is taken only where it is named, and needs the packages
`jax-triton` 0.3 and `triton` 3.6, which are imported when it is first called.

- Tiling, layout of splits, page ids carried one turn ahead, float32 sums, 8-bit pools as pairs: see `triton.py`.
- It serves queries of the pool's type, and 16-bit queries with an 8-bit pool.
- Page ids are widened to 64 bits before they become offsets, so pools may have any size.

It cannot be interpreted through JAX. Triton's own interpreter (TRITON_INTERPRET=1) runs the bare kernels, given NumPy
before 2.4, tensors that only wrap NumPy arrays, and the helpers of `kernels` as globals: it knows no closures.
Source: as for `triton.py`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import triton as pallas
from pallas_kernels.target import current_target

NEEDS = {"jax-triton": "0.3", "triton": "3.6"}  # jax-triton 0.4.1 cannot be lowered with JAX 0.12
KINDS = {"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3}  # of 8-bit pools; 0: any other


class Kernels(NamedTuple):
    split: Any
    combine: Any


def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    context_lens,
    *,
    scale,
    sliding_window,
    soft_cap,
    sinks,
    k_scale,
    v_scale,
    split_size,
    num_cores,
    interpret,
    block_tokens,
    num_warps,
    num_stages,
):
    if interpret:
        raise NotImplementedError("paged_attention's 'jax_triton' kernel cannot be interpreted")
    import jax_triton

    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    if split_size is not None:
        block_tokens = gcd(block_tokens, split_size)
    plan = pallas.make_plan(
        num_seqs * num_kv_heads,
        block_tables.shape[1] * page_size,
        sliding_window=sliding_window,
        split_size=split_size,
        num_cores=num_cores,
        block_tokens=block_tokens,
    )
    kind = KINDS.get(k_pages.dtype.name, 0)
    if kind:
        k_pages, v_pages = (
            lax.bitcast_convert_type(pages.reshape(*pages.shape[:3], -1, 2), jnp.int16) for pages in (k_pages, v_pages)
        )
    columns = k_pages.shape[3]
    # Absent arrays: any pointer will do, which is never read.
    absent = context_lens
    heads = dict(HAS_SINKS=sinks is not None, HAS_K_SCALE=k_scale is not None, HAS_V_SCALE=v_scale is not None)
    sinks = absent if sinks is None else sinks * pallas.LOG2E
    common = dict(
        HEAD_DIM=head_dim,
        NUM_SPLITS=plan.num_splits,
        SPLIT_BLOCKS=plan.split_blocks or 0,
        WINDOW=sliding_window or 0,
        BLOCK=block_tokens,
        NUM_Q_HEADS=num_q_heads,
        HAS_SINKS=heads.pop("HAS_SINKS"),
    )
    target = current_target()
    capability = 10 * target.capability[0] + target.capability[1]
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    statistics = jax.ShapeDtypeStruct((num_seqs, num_q_heads, plan.num_splits), jnp.float32)
    partial_out = jax.ShapeDtypeStruct((*statistics.shape, head_dim), jnp.float32)
    result, total, top = jax_triton.triton_call(
        *(q, k_pages, v_pages, block_tables, context_lens, sinks),
        *(absent if x is None else x for x in (k_scale, v_scale)),
        kernel=kernels().split,
        out_shape=(out if plan.num_splits == 1 else partial_out, statistics, statistics),
        grid=(num_seqs, num_kv_heads, plan.num_splits),
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=capability,
        NUM_KV_HEADS=num_kv_heads,
        COLUMNS=columns,
        COLUMN_TILE=pallas.padded(columns),
        GROUP_TILE=pallas.padded(num_q_heads // num_kv_heads),
        PAGE_SIZE=page_size,
        PAGES_PER_SEQ=block_tables.shape[1],
        KIND=kind,
        SCALE=float(scale),
        SOFT_CAP=float(soft_cap or 0),
        **heads,
        **common,
    )
    if plan.num_splits == 1:
        return result
    return jax_triton.triton_call(
        *(result, total, top, context_lens, sinks),
        kernel=kernels().combine,
        out_shape=out,
        grid=(num_seqs, num_q_heads),
        num_warps=max(2, pallas.padded(head_dim) // 32),
        num_stages=1,
        compute_capability=capability,
        COLUMN_TILE=pallas.padded(head_dim),
        COMBINED=pallas.COMBINED,
        **common,
    )


def unsupported(target, q, k_pages, block_tables) -> str | None:
    """Why the kernel cannot serve these arrays on `target`, or None."""
    for package, needed in NEEDS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"the package {package} is not installed, it needs {needed}"
        if not f"{found}.".startswith(f"{needed}."):
            return f"{package} {found}, where it needs {needed}"
    if k_pages.dtype.itemsize == 1 and q.dtype == "float32":
        return f"queries of {q.dtype} with pages of {k_pages.dtype}, where it takes bfloat16 and float16"
    if k_pages.dtype.itemsize > 1 and q.dtype != k_pages.dtype:
        return f"queries of {q.dtype} with pages of {k_pages.dtype}, where it takes one type for both"
    return pallas.unsupported(target, q, k_pages, block_tables)


@cache
def kernels() -> Kernels:
    """The Triton kernels, made when they are first needed: Triton need not be installed."""
    import triton
    import triton.language as tl

    log2e, masked = tl.constexpr(pallas.LOG2E), tl.constexpr(pallas.MASKED)

    @triton.jit
    def splits_of(
        length, NUM_SPLITS: tl.constexpr, SPLIT_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr
    ):
        """The blocks that the query sees, and the row's own number of splits."""
        first = length * 0
        if WINDOW > 0:
            first = tl.maximum(length - WINDOW, 0)
        begin, end = first // BLOCK, (length + BLOCK - 1) // BLOCK
        if SPLIT_BLOCKS == 0:
            count = tl.minimum(end - begin, NUM_SPLITS)
        else:
            count = (end + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS - begin // SPLIT_BLOCKS
        return first, begin, end, count

    @triton.jit
    def page_ids_of(
        tables, row, block, length, BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES_PER_SEQ: tl.constexpr
    ):
        at = block * BLOCK + tl.arange(0, BLOCK)
        return tl.load(tables + row * PAGES_PER_SEQ + at // PAGE_SIZE, mask=at < length, other=0)

    @triton.jit
    def unpack(pairs, KIND: tl.constexpr):
        """`triton.unpack` in Triton's words: even and odd columns in float16."""
        wide = pairs.to(tl.int32)
        if KIND == 1:
            low = ((wide & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
            high = (((wide >> 8) & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
        elif KIND == 2:
            low = (((wide << 24) >> 17) & 0xBF80).to(tl.int16).to(tl.float16, bitcast=True)
            high = ((wide >> 1) & 0xBF80).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            low = (wide << 8).to(tl.int16).to(tl.float16, bitcast=True)
            high = (wide & 0xFF00).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)

    @triton.jit
    def scaled(x, y):
        """Numbers in the range of float16, and the power of two that they were divided by."""
        size = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), tl.max(tl.abs(y.to(tl.float32)), 1))
        exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
        unit = tl.maximum(exponent.to(tl.float32, bitcast=True), 7.888609052210118e-31)
        return (x / unit[:, None]).to(tl.float16), (y / unit[:, None]).to(tl.float16), unit

    @triton.jit
    def split_kernel(
        q,
        k_pages,
        v_pages,
        tables,
        lens,
        sinks,
        k_scale,
        v_scale,
        out,
        totals,
        tops,
        HEAD_DIM: tl.constexpr,
        NUM_SPLITS: tl.constexpr,
        SPLIT_BLOCKS: tl.constexpr,
        WINDOW: tl.constexpr,
        BLOCK: tl.constexpr,
        NUM_Q_HEADS: tl.constexpr,
        HAS_SINKS: tl.constexpr,
        HAS_K_SCALE: tl.constexpr,
        HAS_V_SCALE: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr,
        COLUMNS: tl.constexpr,
        COLUMN_TILE: tl.constexpr,
        GROUP_TILE: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        PAGES_PER_SEQ: tl.constexpr,
        KIND: tl.constexpr,
        SCALE: tl.constexpr,
        SOFT_CAP: tl.constexpr,
    ):
        row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        parts: tl.constexpr = HEAD_DIM // COLUMNS
        group: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
        length = tl.load(lens + row)
        first, begin, end, count = splits_of(length, NUM_SPLITS, SPLIT_BLOCKS, WINDOW, BLOCK)
        if NUM_SPLITS > 1:
            if split >= count:
                return
            if SPLIT_BLOCKS == 0:
                blocks = end - begin
                end = begin + (split + 1) * blocks // count
                begin = begin + split * blocks // count
            else:
                start = (begin // SPLIT_BLOCKS + split) * SPLIT_BLOCKS
                begin, end = tl.maximum(begin, start), tl.minimum(end, start + SPLIT_BLOCKS)

        head, column = tl.arange(0, GROUP_TILE), tl.arange(0, COLUMN_TILE)
        q_head = kv_head * group + head
        q_mask = (head < group)[:, None] & (column < COLUMNS)[None, :]
        q_at = q + (row * NUM_Q_HEADS + q_head[:, None]) * HEAD_DIM + parts * column[None, :]
        q_low = tl.load(q_at, mask=q_mask, other=0.0)
        factor = tl.full([GROUP_TILE], SCALE, tl.float32)
        if HAS_K_SCALE:
            factor = factor * tl.load(k_scale + kv_head)
        if KIND > 0:
            q_high = tl.load(q_at + 1, mask=q_mask, other=0.0)
            if q_low.dtype != tl.float16:
                q_low, q_high, unit = scaled(q_low, q_high)
                factor = factor * unit
            if KIND == 2:
                factor = factor * 256.0
        top = tl.full([GROUP_TILE], masked, tl.float32)
        total = tl.zeros([GROUP_TILE], tl.float32)
        low = tl.zeros([GROUP_TILE, COLUMN_TILE], tl.float32)
        high = tl.zeros([GROUP_TILE, COLUMN_TILE], tl.float32)
        page_ids = page_ids_of(tables, row, begin, length, BLOCK, PAGE_SIZE, PAGES_PER_SEQ)
        for block in range(begin, end):
            at = block * BLOCK + tl.arange(0, BLOCK)
            seen = at < length
            if WINDOW > 0:
                seen = seen & (at >= first)
            slot = (page_ids.to(tl.int64) * NUM_KV_HEADS + kv_head) * PAGE_SIZE + at % PAGE_SIZE
            offset = slot[:, None] * COLUMNS + column[None, :]
            mask = seen[:, None] & (column < COLUMNS)[None, :]
            k = tl.load(k_pages + offset, mask=mask, other=0)
            v = tl.load(v_pages + offset, mask=mask, other=0)
            page_ids = page_ids_of(tables, row, block + 1, length, BLOCK, PAGE_SIZE, PAGES_PER_SEQ)
            if KIND > 0:
                k_low, k_high = unpack(k, KIND)
                scores = tl.dot(q_low, tl.trans(k_low)) + tl.dot(q_high, tl.trans(k_high))
            else:
                scores = tl.dot(q_low, tl.trans(k), input_precision="tf32x3")
            if SOFT_CAP > 0:
                power = tl.exp2(scores * (factor * (2 * log2e / SOFT_CAP))[:, None])
                scores = SOFT_CAP * log2e - (2 * SOFT_CAP * log2e) / (power + 1)
            else:
                scores = scores * (factor * log2e)[:, None]
            scores = tl.where(seen[None, :], scores, masked)
            new_top = tl.maximum(top, tl.max(scores, 1))
            keep = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            total = total * keep + tl.sum(weights, 1)
            top = new_top
            if KIND > 0:
                v_low, v_high = unpack(v, KIND)
                weights = weights.to(tl.float16)
                low = tl.dot(weights, v_low, low * keep[:, None])
                high = tl.dot(weights, v_high, high * keep[:, None])
            else:
                low = tl.dot(weights.to(v.dtype), v, low * keep[:, None], input_precision="tf32x3")

        value_factor = 1.0
        if KIND == 2:
            value_factor = 256.0
        if HAS_V_SCALE:
            value_factor = value_factor * tl.load(v_scale + kv_head)
        low, high = low * value_factor, high * value_factor
        head_at = row * NUM_Q_HEADS + q_head
        if NUM_SPLITS == 1:
            if HAS_SINKS:
                total += tl.exp2(tl.load(sinks + q_head, mask=head < group, other=masked) - top)
            share = tl.maximum(total, 1e-37)[:, None]
            low, high = low / share, high / share
        else:
            head_at = head_at.to(tl.int64) * NUM_SPLITS + split
            tl.store(totals + head_at, total, mask=head < group)
            tl.store(tops + head_at, top, mask=head < group)
        out_at = out + head_at[:, None] * HEAD_DIM + parts * column[None, :]
        tl.store(out_at, low.to(out.dtype.element_ty), mask=q_mask)
        if KIND > 0:
            tl.store(out_at + 1, high.to(out.dtype.element_ty), mask=q_mask)

    @triton.jit
    def combine_kernel(
        partials,
        totals,
        tops,
        lens,
        sinks,
        out,
        HEAD_DIM: tl.constexpr,
        NUM_SPLITS: tl.constexpr,
        SPLIT_BLOCKS: tl.constexpr,
        WINDOW: tl.constexpr,
        BLOCK: tl.constexpr,
        NUM_Q_HEADS: tl.constexpr,
        HAS_SINKS: tl.constexpr,
        COLUMN_TILE: tl.constexpr,
        COMBINED: tl.constexpr,
    ):
        row, head = tl.program_id(0), tl.program_id(1)
        head_at = row * NUM_Q_HEADS + head
        _, _, _, count = splits_of(tl.load(lens + row), NUM_SPLITS, SPLIT_BLOCKS, WINDOW, BLOCK)
        column = tl.arange(0, COLUMN_TILE)
        top = tl.full([1], masked, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([COLUMN_TILE], tl.float32)
        for turn in range(0, (count + COMBINED - 1) // COMBINED):
            split = turn * COMBINED + tl.arange(0, COMBINED)
            live = split < count
            at = head_at.to(tl.int64) * NUM_SPLITS + split
            some_tops = tl.load(tops + at, mask=live, other=masked)
            some_totals = tl.load(totals + at, mask=live, other=0.0)
            mask = live[:, None] & (column < HEAD_DIM)[None, :]
            results = tl.load(partials + at[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(some_tops, 0))
            keep = tl.exp2(top - new_top)
            weights = tl.exp2(some_tops - new_top)
            total = total * keep + tl.sum(some_totals * weights, 0)
            acc = acc * keep + tl.sum(results * weights[:, None], 0)
            top = new_top
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head) - top)
        result = acc / tl.maximum(total, 1e-37)
        tl.store(out + head_at * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)

    return Kernels(split_kernel, combine_kernel)
