"""Owns the decode kernel in Pallas' Triton lowering: attention over splits of each row's context, then a combination.

One program serves the query heads of one KV head of one row, over one split of the row's context.

- Tiling: the group's queries are one tile, padded to 16 rows for the tensor cores. A loop walks the split in blocks of
  `block_tokens` tokens, cut at absolute positions. The pages of a block are looked up in the block table, once a token,
  or once a block where a page holds whole blocks.
- Accumulation: running softmax to base 2; scores, sums and the accumulator are float32. More than one split: each
  leaves its maximum, its sum and its unnormalised result in float32, and a second kernel combines those that had work.
- Bytes in flight: the page ids of a block are loaded one turn ahead and carried by the loop, so that the loads of keys
  and values depend on nothing loaded in the same turn. Triton then copies them asynchronously to shared memory
  (cp.async), `num_stages - 1` blocks ahead. Loaded in the turn itself, the ids would cost half of the stages.
- Products have the type of the pool, float16 for one of 8 bits. Queries and weights of more precision are sums of two
  or three numbers of that type, so that float32 queries keep theirs. A float32 pool takes three TF32 products each.
- 8-bit pools are read as pairs of numbers (int16, a view that costs nothing): even and odd columns are two tiles, each
  with its own products. So a tile moves like a 16-bit one (ldmatrix), and its offsets fit 32 bits wherever Pallas
  chooses 32 bits. Both are unpacked by bit operations to float16, which holds every int8, e4m3 and e5m2 value exactly:
  no target has a fast conversion of all three to bfloat16. Queries that are not float16 are divided by a power of two a
  row first, which keeps them in float16's range. NaN stored as e4m3 reads as 480.

Source: FlashDecoding, Dao et al. 2023 (crfm.stanford.edu/2023/10/12/flashdecoding.html); PagedAttention, Kwon et al.
2023 (arXiv:2309.06180); running softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.checks import POOL_DTYPES

PROGRAMS_PER_CORE = 2  # how many the splits of a small batch aim at
COMBINED = 32  # splits that the second kernel takes in one turn: fixed, so that sums do not depend on their number
MASKED = -1e30  # finite: the difference of two masked scores must not be NaN
LOG2E = math.log2(math.e)
QUERY_DTYPES = ("bfloat16", "float16", "float32")
# How many numbers of the product's type stand for a query of more precision, and for a weight.
TERMS = {("float32", "bfloat16"): 3, ("float32", "float16"): 2, ("float16", "bfloat16"): 2}


class Plan(NamedTuple):
    """How a row's context is cut: the same for all rows, known when the kernel is traced."""

    block_tokens: int
    num_splits: int  # programs a row and head; those past the row's own number of splits do nothing
    split_blocks: int | None  # length of a split; None: equal shares of the row's context
    sliding_window: int | None


class Extra(NamedTuple):
    """Arrays that may be absent."""

    sinks: Any  # to base 2
    k_scale: Any
    v_scale: Any


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
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    if split_size is not None:
        block_tokens = math.gcd(block_tokens, split_size)  # a split is cut into whole blocks
    plan = make_plan(
        num_seqs * num_kv_heads,
        block_tables.shape[1] * page_size,
        sliding_window=sliding_window,
        split_size=split_size,
        num_cores=num_cores,
        block_tokens=block_tokens,
    )
    pool_type = k_pages.dtype.name
    if k_pages.dtype.itemsize == 1:
        k_pages, v_pages = (
            lax.bitcast_convert_type(pages.reshape(*pages.shape[:3], -1, 2), jnp.int16) for pages in (k_pages, v_pages)
        )
    params = plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    # To base 2 out here: a product inside could be fused with the difference that follows, in one kernel and not in the
    # other, and a row with one split would not have the bits that it has among many.
    extra = Extra(None if sinks is None else sinks * LOG2E, k_scale, v_scale)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    statistics = jax.ShapeDtypeStruct((num_seqs, num_q_heads, plan.num_splits), jnp.float32)
    partial_out = jax.ShapeDtypeStruct((*statistics.shape, head_dim), jnp.float32)
    result = pl.pallas_call(
        functools.partial(
            split_kernel, plan=plan, pool_type=pool_type, scale=scale, soft_cap=soft_cap, interpret=interpret
        ),
        grid=(num_seqs, num_kv_heads, plan.num_splits),
        out_shape=(out,) if plan.num_splits == 1 else (partial_out, statistics, statistics),
        compiler_params=params,
        interpret=interpret,
        name="paged_attention",
    )(q, k_pages, v_pages, block_tables, context_lens, extra)
    if plan.num_splits == 1:
        return result[0]
    return pl.pallas_call(
        functools.partial(combine_kernel, plan=plan),
        grid=(num_seqs, num_q_heads),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=max(2, pl.next_power_of_2(head_dim) // 32), num_stages=1),
        interpret=interpret,
        name="paged_attention_combine",
    )(*result, context_lens, extra.sinks)


def unsupported(target, q, k_pages, block_tables) -> str | None:
    """Why the kernel cannot serve these arrays on `target`, or None."""
    if target.capability < (8, 0):
        return f"compute capability {'.'.join(map(str, target.capability))}, where it needs 8.0"
    if q.dtype not in QUERY_DTYPES:
        return f"queries of {q.dtype}, where it takes {', '.join(QUERY_DTYPES)}"
    if k_pages.dtype not in POOL_DTYPES:
        return f"pages of {k_pages.dtype}, where it takes {', '.join(POOL_DTYPES)}"
    head_dim = k_pages.shape[3]
    if head_dim > 256:
        return f"head_dim {head_dim}, where it takes 256 at most"
    if k_pages.dtype.itemsize == 1 and head_dim % 2:
        return f"an odd head_dim ({head_dim}) with pages of {k_pages.dtype}, which it reads in pairs"
    return None


def bytes_in_flight(head_dim: int, itemsize: int, *, block_tokens: int, num_warps: int, num_stages: int) -> int:
    """Bytes of keys and values that one program has under way while it waits for a block."""
    return (num_stages - 1) * 2 * block_tokens * head_dim * itemsize


def make_plan(pairs, max_tokens, *, sliding_window, split_size, num_cores, block_tokens) -> Plan:
    """`pairs` of a row and a KV head, whose contexts have at most `max_tokens` tokens."""
    size = block_tokens if split_size is None else split_size
    most = -(-max_tokens // size)
    if sliding_window is not None:
        most = min(most, (sliding_window - 2) // size + 2)
    if split_size is not None:
        return Plan(block_tokens, max(most, 1), split_size // block_tokens, sliding_window)
    wanted = -(-PROGRAMS_PER_CORE * num_cores // pairs)
    return Plan(block_tokens, max(1, min(most, wanted)), None, sliding_window)


def first_seen(plan: Plan, length):
    """The first token that the query sees."""
    return jnp.int32(0) if plan.sliding_window is None else jnp.maximum(length - plan.sliding_window, 0)


def seen_blocks(plan: Plan, length):
    """The first block that the query sees, and the one after the last."""
    size = plan.block_tokens
    return lax.div(first_seen(plan, length), jnp.int32(size)), lax.div(length + (size - 1), jnp.int32(size))


def count_splits(plan: Plan, length):
    """The row's own number of splits: each has a block or more."""
    begin, end = seen_blocks(plan, length)
    if plan.split_blocks is None:
        return jnp.minimum(end - begin, plan.num_splits)
    size = jnp.int32(plan.split_blocks)
    return lax.div(end + (size - 1), size) - lax.div(begin, size)


def split_blocks(plan: Plan, length, split, count):
    """The first block of a row's split, and the one after the last."""
    begin, end = seen_blocks(plan, length)
    if plan.num_splits == 1:
        return begin, end
    if plan.split_blocks is None:
        blocks, count = end - begin, jnp.maximum(count, 1)
        return begin + lax.div(split * blocks, count), begin + lax.div((split + 1) * blocks, count)
    size = jnp.int32(plan.split_blocks)
    start = (lax.div(begin, size) + split) * size
    return jnp.maximum(begin, start), jnp.minimum(end, start + size)


def padded(size: int) -> int:
    """Tiles are powers of two, and 16 or more where the tensor cores take them."""
    return max(16, pl.next_power_of_2(size))


def split_kernel(
    q_ref, k_ref, v_ref, tables_ref, lens_ref, extra, *out_refs, plan, pool_type, scale, soft_cap, interpret
):
    row, kv_head, split = (pl.program_id(axis) for axis in range(3))
    num_kv_heads, page_size, columns = k_ref.shape[1:]
    group, head_dim = q_ref.shape[1] // num_kv_heads, q_ref.shape[2]
    block_tokens, parts = plan.block_tokens, head_dim // columns
    dtype = jnp.dtype(jnp.float16) if parts == 2 else k_ref.dtype
    num_terms = TERMS.get((q_ref.dtype.name, dtype.name), 1)
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32, precision=precision(dtype, interpret))

    length = lens_ref[row]
    first, count = first_seen(plan, length), count_splits(plan, length)
    begin, end = split_blocks(plan, length, split, count)
    # Rows of the query tile, and columns of a tile of keys or values.
    heads, column = jnp.arange(padded(group)), jnp.arange(padded(columns))
    q_head = kv_head * group + heads
    is_head, is_column = heads < group, column < columns
    q_mask = is_head[:, None] & is_column[None, :]

    def load_page_ids(block):
        if page_size % block_tokens == 0:
            index = lax.div(block, jnp.int32(page_size // block_tokens))
            return tables_ref[row, jnp.minimum(index, tables_ref.shape[1] - 1)]
        at = block * block_tokens + jnp.arange(block_tokens)
        index = divide(at, page_size)[0]
        return plt.load(tables_ref.at[row, index], mask=at < length, other=0)

    def attend():
        q = [
            plt.load(q_ref.at[row, q_head[:, None], parts * column[None, :] + part], mask=q_mask, other=0)
            for part in range(parts)
        ]
        factor = scale if extra.k_scale is None else scale * extra.k_scale[kv_head]
        value_factor = None if extra.v_scale is None else extra.v_scale[kv_head]
        if pool_type in UNPACK:
            bias = UNPACK[pool_type][1]
            factor = factor * bias
            value_factor = bias if value_factor is None else value_factor * bias
        if dtype == jnp.float16 and q_ref.dtype != jnp.float16:
            unit = power_of_two(q)[:, None]
            q, factor = [x / unit for x in q], factor * unit
        q = [as_sum(x, dtype, num_terms) for x in q]

        def turn(block, carry):
            page_ids, top, total, acc = carry
            at = block * block_tokens + jnp.arange(block_tokens)
            seen = at < length
            if plan.sliding_window is not None:
                seen &= at >= first
            mask = jnp.broadcast_to(seen[:, None], (block_tokens, len(column)))
            if len(column) != columns:
                mask &= is_column[None, :]
            pages = page_ids[:, None] if page_ids.ndim else page_ids
            slots = (pages, kv_head, divide(at, page_size)[1][:, None], column[None, :])
            # An unwritten slot may hold anything, NaN included, and 0 * NaN is NaN: it is not loaded at all.
            nothing = jnp.zeros((), k_ref.dtype)
            k = unpack(plt.load(k_ref.at[slots], mask=mask, other=nothing), pool_type)
            v = unpack(plt.load(v_ref.at[slots], mask=mask, other=nothing), pool_type)
            next_ids = load_page_ids(block + 1)
            scores = sum(dot(term, y.T) for terms, y in zip(q, k) for term in terms)
            if soft_cap is None:
                scores = scores * (factor * LOG2E)
            else:
                # tanh(x) = 1 - 2 / (exp(2x) + 1)
                power = jnp.exp2(scores * (factor * (2 * LOG2E / soft_cap)))
                scores = soft_cap * LOG2E - (2 * soft_cap * LOG2E) / (power + 1)
            scores = jnp.where(seen[None, :], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(1))
            keep = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - new_top[:, None])
            total = total * keep + weights.sum(1)
            weights = as_sum(weights, dtype, num_terms)
            acc = tuple(x * keep[:, None] + sum(dot(term, y) for term in weights) for x, y in zip(acc, v))
            return next_ids, new_top, total, acc

        top = jnp.full(heads.shape, MASKED, jnp.float32)
        acc = (jnp.zeros(q_mask.shape, jnp.float32),) * parts
        start = (load_page_ids(begin), top, jnp.zeros_like(top), acc)
        _, top, total, acc = lax.fori_loop(begin, end, turn, start)
        if value_factor is not None:
            acc = [x * value_factor for x in acc]

        if plan.num_splits == 1:
            sink = None if extra.sinks is None else plt.load(extra.sinks.at[q_head], mask=is_head, other=MASKED)
            share = denominator(top, total, sink)[:, None]
            acc, place = [x / share for x in acc], (row, q_head[:, None])
        else:
            place = (row, q_head[:, None], split)
            for ref, value in zip(out_refs[1:], (total, top)):
                plt.store(ref.at[row, q_head, split], value, mask=is_head)
        for part, x in enumerate(acc):
            where = out_refs[0].at[*place, parts * column[None, :] + part]
            plt.store(where, x.astype(out_refs[0].dtype), mask=q_mask)

    if plan.num_splits == 1:
        attend()
    else:
        pl.when(split < count)(attend)


def combine_kernel(partial_ref, total_ref, top_ref, lens_ref, sinks_ref, out_ref, *, plan):
    row, head = pl.program_id(0), pl.program_id(1)
    head_dim = out_ref.shape[2]
    count = count_splits(plan, lens_ref[row])
    column = jnp.arange(pl.next_power_of_2(head_dim))

    def turn(i, carry):
        top, total, acc = carry
        split = i * COMBINED + jnp.arange(COMBINED)
        live = split < count
        tops = plt.load(top_ref.at[row, head, split], mask=live, other=MASKED)
        totals = plt.load(total_ref.at[row, head, split], mask=live, other=0)
        mask = live[:, None] & (column < head_dim)[None, :]
        results = plt.load(partial_ref.at[row, head, split[:, None], column[None, :]], mask=mask, other=0)
        new_top = jnp.maximum(top, tops.max())
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(tops - new_top)
        total = total * keep + (totals * weights).sum()
        return new_top, total, acc * keep + (results * weights[:, None]).sum(0)

    start = (jnp.float32(MASKED), jnp.float32(0), jnp.zeros(column.shape, jnp.float32))
    turns = lax.div(count + (COMBINED - 1), jnp.int32(COMBINED))
    top, total, acc = lax.fori_loop(jnp.int32(0), turns, turn, start)
    share = denominator(top, total, None if sinks_ref is None else sinks_ref[head])
    plt.store(out_ref.at[row, head, column], (acc / share).astype(out_ref.dtype), mask=column < head_dim)


def denominator(top, total, sink):
    """The sum of weights, of which a sink takes its part. Where nothing was seen it is not 0, so that the result is.

    The same operations serve one split and many: a row with one split gets the same bits either way.
    """
    if sink is not None:
        total = total + jnp.exp2(sink - top)
    return jnp.maximum(total, 1e-37)


def divide(at, size: int):
    """Quotient and remainder of token positions, which are not negative: a shift and a mask where `size` allows."""
    at, by = at.astype(jnp.uint32), jnp.uint32(size)
    return lax.div(at, by).astype(jnp.int32), lax.rem(at, by).astype(jnp.int32)


def precision(dtype, interpret):
    if dtype != jnp.float32:
        return None
    # Tensor cores reach float32's accuracy in three products; CPUs have no such algorithm.
    return lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def power_of_two(parts):
    """The largest power of two that is not above the largest |x| of each row."""
    size = functools.reduce(jnp.maximum, [jnp.abs(x.astype(jnp.float32)).max(1) for x in parts])
    exponent = lax.bitcast_convert_type(size, jnp.int32) & 0x7F800000
    return jnp.maximum(lax.bitcast_convert_type(exponent, jnp.float32), 2.0**-100)


def as_sum(x, dtype, count: int) -> list:
    """Numbers of `dtype` whose sum is x, to twice or three times the precision of `dtype`."""
    terms = []
    if count > 1:
        x = x.astype(jnp.float32)
        kept = jnp.int32(-1 << (24 - jnp.finfo(dtype).nmant - 1))
        for _ in range(count - 1):
            # Cut off by a mask: compilers may drop a conversion there and back.
            term = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & kept, jnp.float32)
            terms.append(term.astype(dtype))
            x = x - term
    return [*terms, x.astype(dtype)]


def unpack(tile, pool_type: str) -> tuple:
    """The tile's numbers, divided by the bias of their type: one tile, or even and odd columns of packed pairs."""
    if pool_type not in UNPACK:
        return (tile,)
    return UNPACK[pool_type][0](tile.astype(jnp.int32))  # in 32 bits a number costs two or three operations


def as_float16(bits):
    return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16)


def unpack_int8(pairs):
    """1024 + n is float16 of bits 0x6400 | n for n from 0 to 255; here n is the number + 128."""
    low, high = pairs & 0xFF, lax.shift_right_logical(pairs, 8) & 0xFF
    return tuple(as_float16(x ^ 0x6480) - jnp.float16(1024 + 128) for x in (low, high))


def unpack_e4m3(pairs):
    """Sign, 4 bits of exponent and 3 of mantissa move to their places in float16, whose exponent is biased 8 more."""
    low, high = lax.shift_right_arithmetic(pairs << 24, 17), lax.shift_right_arithmetic(pairs, 1)
    return tuple(as_float16(x & 0xBF80) for x in (low, high))


def unpack_e5m2(pairs):
    """The upper half of a float16."""
    return as_float16(pairs << 8), as_float16(pairs & 0xFF00)


# How to unpack a pair, and what the result is to be multiplied by.
UNPACK = {"int8": (unpack_int8, 1.0), "float8_e4m3fn": (unpack_e4m3, 256.0), "float8_e5m2": (unpack_e5m2, 1.0)}
