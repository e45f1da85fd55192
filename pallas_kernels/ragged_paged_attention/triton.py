"""Owns the kernel for chunks and mixed batches in Pallas' Triton lowering: blocks of queries over their row's context.

One program serves a tile: a block of queries of one row, times the query heads of one KV head.

- Tiling: a tile has `block_rows` rows, each a query and a head of the group, packed without gaps: with 7 heads a group,
  128 rows are 18 queries and two idle rows. The grid has a fixed number of tiles, `num_tokens // queries + num_seqs`:
  row r's tiles begin at `query_starts[r] // queries + r`, which leaves room for all of them and needs no sum over the
  rows before it. A program finds its row by counting the rows that begin at or before its tile (one load of
  `query_starts` and one reduction, no kernel in front). Tiles left over do nothing. The tiles of a row run last block
  first, as that sees the most tokens, and all tiles of a head run before those of the next: the programs that are on
  the card at a time share keys and values in its cache.
- Blocks of `block_tokens` tokens that no query of the tile sees are skipped. Those that all its queries see take a loop
  without masks; only blocks on the borders of the causal range and of the window are masked, scores and loads alike.
- Rows with few queries, most of a mixed batch: one query of a group of 4 would be 4 rows of 128. Reading a block of its
  keys and values takes a core of an H200 about as long as 128 rows of products with it: a large tile would run at the
  limit of both, and keep the tensor cores from the chunks beside it. Such a row takes a tile of `FEW_ROWS` rows, a
  second branch of the same kernel: its memory traffic then hides behind the products of the chunks, which a decode
  kernel before or after this one could not do. Where most rows must have few queries (by the shapes: at most
  `FEW_QUERIES` a row on average, or few queries at all) all tiles are of that size, and many programs share a core.
- Splits: where there are fewer tiles than the card has room for (a few speculative rows with long contexts), each
  tile's context is cut into equal shares. Each leaves its maximum, its sum and its unnormalised result in float32, and
  XLA combines them.
- With `invariant`, all tiles are the large ones and no context is split: blocks of tokens then lie the same for every
  query, and are added up in the same order.
- Accumulation: running softmax to base 2; scores, sums and the accumulator are float32.
- Products: bfloat16 and float16 on the tensor cores. Float32, of queries or pool, takes float32 products without tensor
  cores, in tiles of 16 rows: as accurate as float32 is, and slow.
- Bytes in flight: the page ids of a block are loaded one turn ahead, so that `num_stages - 1` blocks of keys and values
  are being copied to shared memory while one is used.
- 8-bit pools are read as pairs of numbers and unpacked to float16 as in `pallas_kernels.paged_attention.triton`.

Source: FlashAttention-2, Dao 2023 (arXiv:2307.08691); PagedAttention, Kwon et al. 2023 (arXiv:2309.06180); running
softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); splits: Flash-Decoding, Dao et al. 2023.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.checks import POOL_DTYPES
from pallas_kernels.paged_attention.triton import UNPACK, power_of_two, unpack
from pallas_kernels.target import current_target

QUERY_DTYPES = ("bfloat16", "float16", "float32")
MAX_GROUP = 32
FEW_ROWS = 32  # of a tile for few queries
FEW_WARPS = 4  # of a kernel that has no other tiles
FEW_QUERIES = 4  # a row, on average
FEW_TOKENS = 128  # in all, which large tiles would not spread over a card
SPLIT_BLOCKS = 4  # the fewest worth a program of their own
MASKED = -1e30  # finite: the difference of two masked scores must not be NaN
LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """The size of a program's work."""

    rows: int
    few_rows: int  # of the tiles of rows with few queries; 0: they have no tiles of their own
    tokens: int
    num_warps: int
    num_stages: int
    programs_per_core: int


class Plan(NamedTuple):
    """What the kernel is traced for, apart from the shapes of its arrays."""

    blocks: Blocks
    num_splits: int
    group: int
    num_kv_heads: int
    page_size: int
    pool_type: str
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    interpret: bool


class Extra(NamedTuple):
    """Arrays that may be absent."""

    sinks: Any
    k_scale: Any
    v_scale: Any


def ragged_paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    context_lens,
    query_starts,
    *,
    scale,
    sliding_window,
    soft_cap,
    sinks,
    k_scale,
    v_scale,
    invariant,
    interpret,
    block_rows,
    block_tokens,
    num_warps,
    num_stages,
    few_tokens,
    few_stages,
    num_cores=None,
):
    """`num_cores`: of the card, for the number of splits; None asks the device that the call is traced for."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    num_seqs, pages_per_seq = block_tables.shape
    group = num_q_heads // num_kv_heads
    if product_dtype(q.dtype, k_pages.dtype.name) == jnp.float32:
        blocks = float32_blocks(group, head_dim)
    elif invariant:
        blocks = Blocks(block_rows, 0, block_tokens, num_warps, num_stages, 1)
    elif num_tokens <= max(FEW_QUERIES * num_seqs, FEW_TOKENS):
        rows = 16 if -(-num_tokens // num_seqs) * group <= 16 else FEW_ROWS
        blocks = Blocks(rows, 0, few_tokens, FEW_WARPS, few_stages, 4)
    else:
        blocks = Blocks(block_rows, FEW_ROWS, block_tokens, num_warps, num_stages, 1)
    num_tiles = num_tokens // (blocks.rows // group) + num_seqs
    seen = pages_per_seq * page_size
    if sliding_window is not None:
        seen = min(seen, sliding_window + blocks.rows // group)
    if num_cores is None:
        num_cores = current_target().num_cores
    wanted = blocks.programs_per_core * num_cores // (num_tiles * num_kv_heads)
    num_splits = 1 if invariant else max(1, min(wanted, seen // (SPLIT_BLOCKS * blocks.tokens)))
    plan = Plan(
        blocks,
        num_splits,
        group,
        num_kv_heads,
        page_size,
        k_pages.dtype.name,
        scale,
        sliding_window,
        soft_cap,
        interpret,
    )
    extra = Extra(sinks, k_scale, v_scale)
    out = jax.ShapeDtypeStruct((num_tokens * num_q_heads, head_dim), q.dtype)
    statistics = jax.ShapeDtypeStruct((num_splits * num_tokens * num_q_heads,), jnp.float32)
    partial_out = jax.ShapeDtypeStruct((*statistics.shape, head_dim), jnp.float32)
    result = pl.pallas_call(
        partial(tile_kernel, plan=plan),
        grid=(num_tiles, num_splits, num_kv_heads),
        out_shape=(out,) if num_splits == 1 else (partial_out, statistics, statistics),
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="ragged_paged_attention",
    )(
        query_starts,
        context_lens,
        block_tables,
        q.reshape(-1, head_dim),
        *(tokens_of_heads(pages) for pages in (k_pages, v_pages)),
        extra,
    )
    if num_splits == 1:
        return result[0].reshape(q.shape)
    return combine(*(x.reshape(num_splits, *q.shape[:2], -1) for x in result), extra, plan).astype(q.dtype)


def unsupported(target, q, k_pages, block_tables) -> str | None:
    """Why the kernel cannot serve these arrays on `target`, or None."""
    if target.capability < (8, 0):
        return f"compute capability {'.'.join(map(str, target.capability))}, where it needs 8.0"
    if q.dtype not in QUERY_DTYPES:
        return f"queries of {q.dtype}, where it takes {', '.join(QUERY_DTYPES)}"
    if k_pages.dtype not in POOL_DTYPES:
        return f"pages of {k_pages.dtype}, where it takes {', '.join(POOL_DTYPES)}"
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    if head_dim > 256:
        return f"head_dim {head_dim}, where it takes 256 at most"
    if k_pages.dtype.itemsize == 1 and head_dim % 2:
        return f"an odd head_dim ({head_dim}) with pages of {k_pages.dtype}, which it reads in pairs"
    if q.shape[1] // num_kv_heads > MAX_GROUP:
        return f"{q.shape[1] // num_kv_heads} query heads a KV head, where it takes {MAX_GROUP} at most"
    if num_pages * num_kv_heads * page_size > 2**31:
        return f"{num_pages * num_kv_heads * page_size} slots times KV heads, where it takes 2**31 at most"
    return None


def float32_blocks(group: int, head_dim: int) -> Blocks:
    """Float32 products keep whole operands in registers: larger tiles, or wider parts of a head, are spilled."""
    stages = 3 if 80 < head_dim <= 96 else 2  # with two, an assembler spilled 8 bytes of 64 registers
    return Blocks(16 if group <= 16 else 32, 0, 32 if head_dim <= 64 else 16, 4, stages, 4)


def tokens_of_heads(pages):
    """The pool as rows, one a token and head. Eight-bit numbers become pairs, whose offsets fit 32 bits where Pallas
    chooses 32 bits. Both are views."""
    if pages.dtype.itemsize == 1:
        pages = lax.bitcast_convert_type(pages.reshape(*pages.shape[:3], -1, 2), jnp.int16)
    return pages.reshape(-1, pages.shape[3])


def tile_kernel(starts_ref, lens_ref, tables_ref, q_ref, k_ref, v_ref, extra, *out_refs, plan):
    tile, split, head = (pl.program_id(axis) for axis in range(3))
    blocks, group = plan.blocks, plan.group
    queries_per_tile = blocks.rows // group
    num_seqs = lens_ref.shape[0]
    seqs = jnp.arange(pl.next_power_of_2(num_seqs))
    starts = plt.load(starts_ref.at[seqs], mask=seqs < num_seqs, other=0)
    begun = (seqs < num_seqs) & (div(starts, queries_per_tile) + seqs <= tile)
    row = begun.astype(jnp.int32).sum() - 1
    start = starts_ref[row]
    num_queries = starts_ref[row + 1] - start
    # Counted from the row's last block of queries.
    block = cdiv(num_queries, queries_per_tile) - 1 - (tile - div(start, queries_per_tile) - row)
    refs = (tables_ref, q_ref, k_ref, v_ref, extra, out_refs)
    serve = partial(attend, *refs, plan=plan, row=row, head=head, split=split)
    context = lens_ref[row] - num_queries  # tokens before the row's first query

    def serve_block():
        done = block * queries_per_tile
        queries = jnp.minimum(num_queries - done, queries_per_tile)
        serve(rows=blocks.rows, start=start + done, queries=queries, position=context + done)

    if not blocks.few_rows:
        pl.when(block >= 0)(serve_block)
        return
    few = num_queries * group <= blocks.few_rows
    pl.when((block >= 0) & ~few)(serve_block)

    @pl.when((block == 0) & few)
    def _():
        serve(rows=blocks.few_rows, start=start, queries=num_queries, position=context)


def attend(tables_ref, q_ref, k_ref, v_ref, extra, out_refs, *, plan, row, head, split, rows, start, queries, position):
    """Serve `queries` queries of a row, from `start` on in q; `position` is the first one's place in its row."""
    group, window, tokens = plan.group, plan.sliding_window, plan.blocks.tokens
    head_dim = q_ref.shape[1]
    packed = head_dim // k_ref.shape[1]  # numbers in one of the pool's
    dtype = product_dtype(q_ref.dtype, plan.pool_type)
    parts = column_parts(head_dim, 64 if dtype == jnp.float32 else 256)
    dot = partial(jnp.dot, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)

    index = jnp.arange(rows)
    query = div(index, group)
    q_head = head * group + index - query * group
    q_row = (start + query) * (plan.num_kv_heads * group) + q_head
    is_mine = query < jnp.minimum(queries, rows // group)
    q = [load_tile(q_ref, q_row, is_mine, *part) for part in parts]
    # Weights are `exp2(factor * score - factor * top)`, which keeps the order of scores and makes masked ones 0 if the
    # factor is above 0.
    factor = plan.scale if extra.k_scale is None else plan.scale * extra.k_scale[head]
    value_factor = 1.0 if extra.v_scale is None else extra.v_scale[head]
    if packed > 1:
        bias = UNPACK[plan.pool_type][1]
        factor, value_factor = factor * bias, value_factor * bias
    factor = jnp.full((rows,), factor, jnp.float32)
    if packed > 1 and q_ref.dtype == jnp.bfloat16:
        unit = power_of_two(q)
        q, factor = [x / unit[:, None] for x in q], factor * unit
    q = [x.astype(dtype) for x in q]
    if plan.soft_cap is None:
        inner, factor = None, jnp.maximum(factor * LOG2E, 1e-20)
    else:
        inner, factor = factor / plan.soft_cap, jnp.full((rows,), plan.soft_cap * LOG2E, jnp.float32)

    # The queries of the tile see tokens from `first_seen` on, and before `end`.
    end = position + queries
    first_seen = jnp.int32(0) if window is None else jnp.maximum(position - window + 1, 0)

    def load_page_ids(block):
        at = block * tokens
        if plan.page_size % tokens == 0:
            return tables_ref[row, jnp.minimum(div(at, plan.page_size), tables_ref.shape[1] - 1)]
        at = at + jnp.arange(tokens)
        return plt.load(tables_ref.at[row, div(at, plan.page_size)], mask=at < end, other=0)

    def load_block(ref, slots, mask):
        tiles = (load_tile(ref, slots, mask, first // packed, width // packed) for first, width in parts)
        return [unpacked(tile, plan.pool_type).astype(dtype) for tile in tiles]

    def turn(block, carry, *, border):
        page_ids, top, total, acc = carry
        at = block * tokens + jnp.arange(tokens)
        slots = (page_ids * plan.num_kv_heads + head) * plan.page_size + rem(at, plan.page_size)
        # An unwritten slot may hold anything, NaN included, and 0 * NaN is NaN: it is not loaded at all.
        mask = (at >= first_seen) & (at < end) if border else None
        k, v = (load_block(ref, slots, mask) for ref in (k_ref, v_ref))
        next_ids = load_page_ids(block + 1)
        scores = sum(dot(x, y.T) for x, y in zip(q, k))
        if inner is not None:
            scores = tanh(scores * inner[:, None], dtype)
        if border:
            last = (position - block * tokens + query)[:, None]  # that the query sees, counted from the block's first
            sees = jnp.arange(tokens)[None, :] <= last
            if window is not None:
                sees &= jnp.arange(tokens)[None, :] > last - window
            scores = jnp.where(sees, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(1))
        # Where a query has seen nothing yet, the weights of masked scores must be 0 and not 1.
        base = jnp.where(new_top == MASKED, 0, new_top) if border else new_top
        keep = jnp.exp2((top - base) * factor)
        weights = exp2(scores, factor, base, plan.interpret)
        total = total * keep + weights.sum(1)
        weights = weights.astype(dtype)
        acc = [x * keep[:, None] + dot(weights, y) for x, y in zip(acc, v)]
        return next_ids, new_top, total, acc

    begin, stop = div(first_seen, tokens), cdiv(end, tokens)
    if plan.num_splits > 1:
        share = cdiv(stop - begin, plan.num_splits)
        begin = jnp.minimum(begin + split * share, stop)
        stop = jnp.minimum(begin + share, stop)
    carry = (
        load_page_ids(begin),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        [jnp.zeros((rows, width), jnp.float32) for _, width in parts],
    )
    if rows > FEW_ROWS:
        if window is not None:
            clear = jnp.clip(cdiv(jnp.maximum(end - window, 0), tokens), begin, stop)
            carry = lax.fori_loop(begin, clear, partial(turn, border=True), carry)
            begin = clear
        clear = jnp.clip(div(position + 1, tokens), begin, stop)
        carry = lax.fori_loop(begin, clear, partial(turn, border=False), carry)
        begin = clear
    _, top, total, acc = lax.fori_loop(begin, stop, partial(turn, border=True), carry)

    top = top * factor
    if plan.num_splits == 1:
        if extra.sinks is not None:
            sink = plt.load(extra.sinks.at[q_head], mask=is_mine, other=0) * LOG2E
            new_top = jnp.maximum(top, sink)
            value_factor *= jnp.exp2(top - new_top)
            total = total * jnp.exp2(top - new_top) + jnp.exp2(sink - new_top)
        acc = [x * (value_factor / total)[:, None] for x in acc]
        out_row = q_row
    else:
        out_row = split * q_ref.shape[0] + q_row
    out_ref, *statistics = out_refs
    for x, (first, _) in zip(acc, parts):
        store_tile(out_ref, out_row, is_mine, first, x.astype(out_ref.dtype))
    for ref, value in zip(statistics, (total, top)):
        plt.store(ref.at[out_row], value, mask=is_mine)


def combine(acc, total, top, extra: Extra, plan: Plan):
    """The results of whole contexts from those of splits: [num_splits, num_tokens, num_q_heads, head_dim or 1]."""
    new_top = top.max(0)
    if extra.sinks is not None:
        sink = extra.sinks[:, None] * LOG2E
        new_top = jnp.maximum(new_top, sink)
    shares = jnp.exp2(top - new_top)
    total = (total * shares).sum(0)
    if extra.sinks is not None:
        total += jnp.exp2(sink - new_top)
    out = (acc * shares).sum(0) / total
    if plan.pool_type in UNPACK:
        out *= UNPACK[plan.pool_type][1]
    return out if extra.v_scale is None else out * jnp.repeat(extra.v_scale, plan.group)[:, None]


def product_dtype(q_dtype, pool_type: str):
    """The type of the products. Eight bits go to float16, which holds all their values, or to float32."""
    if pool_type in UNPACK:
        return jnp.dtype(jnp.float32 if q_dtype == jnp.float32 else jnp.float16)
    return jnp.promote_types(q_dtype, pool_type)


def column_parts(head_dim: int, widest: int) -> list[tuple[int, int]]:
    """The columns of a head as tiles, (first, width): widths must be powers of two, and 16 or more for tensor cores.

    80 = 64 + 16 and 96 = 64 + 32 need no padding to 128, which would cost a third of the products.
    """
    parts, first = [], 0
    while first < head_dim:
        width = min(widest, max(16, 1 << (head_dim - first).bit_length() - 1))
        parts.append((first, width))
        first += width
    return parts


def tile_at(ref, rows, mask, first: int, width: int):
    """Some rows of `width` columns from `first` on, and the mask that loads and stores of them take."""
    column = first + jnp.arange(width)
    mask = None if mask is None else mask[:, None]
    if first + width > ref.shape[1]:
        is_column = (column < ref.shape[1])[None, :]
        mask = is_column if mask is None else mask & is_column
    return ref.at[rows[:, None], column[None, :]], mask if mask is None else jnp.broadcast_to(mask, (len(rows), width))


def load_tile(ref, rows, mask, first: int, width: int):
    where, mask = tile_at(ref, rows, mask, first, width)
    return plt.load(where) if mask is None else plt.load(where, mask=mask, other=jnp.zeros((), ref.dtype))


def store_tile(ref, rows, mask, first: int, value) -> None:
    where, mask = tile_at(ref, rows, mask, first, value.shape[1])
    plt.store(where, value, mask=mask)


def unpacked(tile, pool_type: str):
    """A tile of the pool as numbers. Pairs become neighbours again: that puts the tile, once converted, into shared
    memory for all warps, each of which would otherwise convert it anew."""
    if pool_type not in UNPACK:
        return tile
    return jnp.stack(unpack(tile, pool_type), -1).reshape(tile.shape[0], -1)


def exp2(scores, factor, top, interpret):
    """`exp2(factor * scores - factor * top)` by rows, in two instructions. Triton's own would multiply, subtract, and
    take three more to keep weights below 2**-126."""
    if interpret:
        return jnp.exp2(scores * factor[:, None] - (top * factor)[:, None])
    by_row = (jnp.broadcast_to(x[:, None], scores.shape) for x in (factor, -top * factor))
    (weights,) = plt.elementwise_inline_asm(
        "{ .reg .f32 x; fma.rn.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x; }",
        args=[scores, *by_row],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)],
    )
    return weights


def tanh(x, dtype):
    if dtype == jnp.float32:
        return jnp.tanh(x)
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1)  # off by a ten millionth, in a third of the instructions


def div(a, b: int):
    """Of numbers that are not negative: `//` would take care of signs."""
    return lax.div(a, jnp.int32(b))


def rem(a, b: int):
    return lax.rem(a, jnp.int32(b))


def cdiv(a, b: int):
    return div(a + (b - 1), b)
