"""Owns what the three warpgroups of the Hopper kernel for chunks do: one loads pages, two attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_tiles as tiles
from pallas_kernels.ragged_paged_attention.query_tiles import Tile, each_tile

WGMMA = plgpu.Layout.WGMMA
A_ROW = WGMMA.reduce(1)  # one number for each row of a WGMMA array

CONSUMERS = 2  # warpgroups that attend
ROWS = tiles.ROWS  # of a consumer's part of a tile: queries times the query heads of a KV head
WARPS = 4  # of a warpgroup


class Shape(NamedTuple):
    """What is known while tracing."""

    group: int
    block_tokens: int
    num_stages: int  # at least 2: a block is cleaned when the next one is on its way
    page_size: int
    sliding_window: int | None
    soft_cap: float | None

    @property
    def part_tokens(self) -> int:
        """Queries of one consumer's part of a tile: as many as have all their heads in its rows."""
        return ROWS // self.group

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.num_stages))


@dataclass(frozen=True)
class Barriers:
    """Some of an array of barriers, from `first` on. Few arrays save registers: each has one for its phases."""

    array: Any
    first: int

    def __getitem__(self, index):
        return self.array.at[self.first + index]


class Memory(NamedTuple):
    """The arrays in global memory, then those in shared memory and the barriers."""

    table: Any
    used: Any
    block_tables: Any
    rows: Any
    k_pages: Any
    v_pages: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    result: Any
    q_tile: Any
    result_tile: Any
    k_tiles: Any
    v_tiles: Any
    q_ready: Barriers
    q_free: Barriers
    k_ready: Barriers
    v_ready: Barriers  # of each slot, then once more of each slot: loaded, but not clean
    k_free: Barriers
    v_free: Barriers
    turn: Barriers
    weight_tile: Any = None

    def each_tile(self, num_programs, visit):
        return each_tile(self.table, self.used, self.k_pages.shape[1], num_programs, visit)


def produce(memory: Memory, shape: Shape, num_programs) -> None:
    """Load the blocks of K and V of every tile, as slots become free."""

    def load_tile(tile, head, before):
        seen = (tile.first_seen(shape.sliding_window), tile.length)

        def start_of(i):
            return (tile.last - i) * shape.block_tokens

        def is_unclean(i):
            return (start_of(i) < seen[0]) | (start_of(i) + shape.block_tokens > seen[1])

        def clean(i):
            slot = shape.slot(before + i)
            wait(memory.v_ready, slot + shape.num_stages)
            width = memory.v_tiles.shape[2]
            columns = min(width, ROWS)  # this warpgroup has few registers
            for at in range(0, width, columns):
                part = memory.v_tiles.at[slot, :, pl.ds(at, min(columns, width - at))]
                tiles.zero_unseen(part, start_of(i), *seen)
            for _ in range(tiles.loads_per_block(shape.block_tokens, shape.page_size)):
                plgpu.barrier_arrive(memory.v_ready[slot])

        # A block is cleaned when the loads of the next one are under way.
        @pl.loop(0, tile.count + 1)
        def _(i):
            @pl.when(i < tile.count)
            def _():
                slot = shape.slot(before + i)
                v_ready = memory.v_ready[slot + jnp.where(is_unclean(i), shape.num_stages, 0)]
                load_block(memory, shape, tile, head, tile.last - i, seen, before + i, v_ready)

            pl.when(i == 0)(lambda: load_queries(memory, shape, tile, head, before))
            pl.when((i > 0) & is_unclean(i - 1))(lambda: clean(i - 1))

    steps = memory.each_tile(num_programs, load_tile)

    @pl.loop(0, jnp.minimum(steps, shape.num_stages))  # no barrier ends while it is in use
    def _(slot):
        for free in (memory.k_free, memory.v_free):
            wait(free, slot)

    @pl.loop(0, jnp.where(steps > 0, CONSUMERS, 0))
    def _(part):
        wait(memory.q_free, part)


def load_queries(memory: Memory, shape: Shape, tile: Tile, head, before) -> None:
    """Bring the queries of a tile into shared memory: not by TMA, for which rows would have to begin at multiples of 8.

    Consumers have no registers to spare for that, and while they finish the tile before, it is done.
    """
    width = memory.q_tile.shape[2]
    columns = min(width, ROWS)

    @pl.loop(0, CONSUMERS)
    def _(part):
        first = part * shape.part_tokens
        pl.when(before > 0)(lambda: wait(memory.q_free, part))

        @pl.when(first < tile.queries)
        def _():
            for at in range(0, width, columns):
                size = min(columns, width - at)
                rows = memory.rows.at[head, pl.ds((tile.begin + first) * shape.group, ROWS), pl.ds(at, size)]
                queries = plgpu.load(rows, layout=WGMMA, optimized=False)
                memory.q_tile.at[part, :, pl.ds(at, size)][...] = queries
            plgpu.commit_smem()

        plgpu.barrier_arrive(memory.q_ready[part])


def load_block(memory: Memory, shape: Shape, tile: Tile, head, block, seen, step, v_ready) -> None:
    """Start the loads of a block's pages, by each warp some if there are as many as warps."""
    slot = shape.slot(step)
    k_slot = memory.k_tiles.at[slot]
    ways = (
        (memory.k_pages, memory.k_free, k_slot, memory.k_ready[slot]),
        (memory.v_pages, memory.v_free, memory.v_tiles.at[slot], v_ready),
    )

    def wait_until(free):
        pl.when(step >= shape.num_stages)(lambda: wait(free, slot))

    size, loads = shape.page_size, tiles.loads_per_block(shape.block_tokens, shape.page_size)
    if loads % WARPS:
        page_ids = tiles.pages_of_block(memory.block_tables, tile.row, block, seen, k_slot, size)
        for pages, free, tile_slot, ready in ways:
            wait_until(free)
            tiles.load_block(pages, page_ids, head, block, tile_slot, ready)
        return

    first_page, last_page = (lax.div(at, jnp.int32(size)) for at in (seen[0], seen[1] - 1))

    @plgpu.warp_map
    def _(warp):
        indices = [i * WARPS + warp for i in range(loads // WARPS)]
        columns = [jnp.clip(block * loads + i, first_page, last_page) for i in indices]
        page_ids = [memory.block_tables[tile.row, column] for column in columns]
        for pages, free, tile_slot, ready in ways:
            wait_until(free)
            for i, page in zip(indices, page_ids):
                plgpu.copy_gmem_to_smem(pages.at[page, head], tile_slot.at[pl.ds(i * size, size)], ready)


def consume(memory: Memory, shape: Shape, scale, this_part, num_programs) -> None:
    """Attend for one part of every tile: its queries `part * part_tokens` to `(part + 1) * part_tokens`."""
    # The consumers take turns in issuing products, so that one multiplies while the other is at its softmax.
    plgpu.barrier_arrive(memory.turn[1 - this_part], predicate=this_part == 1)

    def attend_tile(tile, head, before):
        # Else what follows from it is computed before the first tile, and the registers for the tiles do not suffice.
        part = lax.optimization_barrier(this_part)
        mine = jnp.clip(tile.queries - part * shape.part_tokens, 0, shape.part_tokens)
        pl.when(mine > 0)(lambda: attend(memory, shape, scale, part, tile, head, before, mine))
        pl.when(mine == 0)(lambda: stand_by(memory, shape, part, tile, before))

    memory.each_tile(num_programs, attend_tile)
    # No barrier ends with an arrival that nobody waited for. The first consumer's last one comes after its wait: before
    # it, the second may not have seen the one before, and would then wait for ever.
    wait(memory.turn, this_part)
    plgpu.barrier_arrive(memory.turn[1 - this_part], predicate=this_part == 0)
    plgpu.wait_smem_to_gmem(0)  # shared memory is gone after the end


def stand_by(memory: Memory, shape: Shape, part, tile: Tile, before) -> None:
    """Keep the barriers going for a part without queries."""
    wait(memory.q_ready, part)
    plgpu.barrier_arrive(memory.q_free[part])

    @pl.loop(0, tile.count)
    def _(i):
        slot = shape.slot(before + i)
        wait(memory.turn, part)
        plgpu.barrier_arrive(memory.turn[1 - part])
        for ready, free in ((memory.k_ready, memory.k_free), (memory.v_ready, memory.v_free)):
            wait(ready, slot)
            plgpu.barrier_arrive(free[slot])


def attend(memory: Memory, shape: Shape, scale, part, tile: Tile, head, before, mine) -> None:
    """The results of one part of a tile, which has `mine` > 0 queries."""
    block_tokens, window = shape.block_tokens, shape.sliding_window
    head_dim = memory.q_tile.shape[2]
    q_tile, first = memory.q_tile.at[part], part * shape.part_tokens
    score_scale = scale if memory.k_scale is None else scale * memory.k_scale[head]
    first_position = tile.position + first
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=A_ROW)
    # Rows behind the last query see what it sees, and nothing unwritten. Their results are not stored.
    position = first_position + jnp.minimum(lax.div(row, jnp.int32(shape.group)), mine - 1)

    def softmax(products, i, top, total, masked):
        """Weights, not normalized, the new top and total, and the share that what came before keeps."""
        factor = score_scale * tiles.LOG2_E
        if shape.soft_cap is not None:
            # As `tiles.base_2_scores`, but 1 / x is the square of 1 / sqrt(x): a division takes more registers.
            root = lax.rsqrt(jnp.exp2(products * (score_scale * (2 * tiles.LOG2_E / shape.soft_cap))) + 1)
            products, factor = shape.soft_cap - (2 * shape.soft_cap) * (root * root), tiles.LOG2_E
        if masked:
            end = position - (tile.last - i) * block_tokens
            products = mask(products, end, None if window is None else end - window)
        new_top = jnp.maximum(top, products.max(axis=1) * factor)
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(products * factor - by_row(new_top, products))
        return weights, new_top, total * keep + weights.sum(axis=1), keep

    def issue_scores(scores, i):
        slot = shape.slot(before + i)
        wait(memory.k_ready, slot)
        wait(memory.turn, part)
        plgpu.wgmma(scores, q_tile, memory.k_tiles.at[slot].transpose((1, 0)))

    def issue_values(out, weights, i):
        slot = shape.slot(before + i)
        wait(memory.v_ready, slot)
        plgpu.wgmma(out, weights, memory.v_tiles.at[slot])

    def pass_turn():
        plgpu.barrier_arrive(memory.turn[1 - part])

    def release(free, i):
        plgpu.barrier_arrive(free[shape.slot(before + i)])

    def narrow(weights):
        weights = weights.astype(q_tile.dtype)
        if not interpreted:
            return lax.optimization_barrier(weights)  # else the wider ones stay in registers until they are used
        memory.weight_tile.at[part][...] = weights
        plgpu.commit_smem()
        return 0

    def first_scores(scores):
        issue_scores(scores, 0)
        pass_turn()
        return scores[...]

    def step(i, carry, masked):
        """The scores and weights of block i, while the product of the weights and values of block i - 1 is made."""
        out, top, total, weights = carry

        def products(state):
            def scores_of(scores):
                issue_scores(scores, i)
                issue_values(state[0], weights, i - 1)
                pass_turn()
                return plgpu.wgmma_accumulator_load(scores, wait_n=1)

            scores = pl.run_scoped(scores_of, accumulator)
            release(memory.k_free, i)
            for ref, new in zip(state[1:], softmax(scores, i, top, total, masked)):
                ref[...] = new

        unset = (full((ROWS, block_tokens), 0, WGMMA), *[full((ROWS,), 0, A_ROW)] * 3)
        out, wide, top, total, keep = pl.run_state(products)((plgpu.ACC.init(out), *unset))
        release(memory.v_free, i - 1)
        return out * by_row(keep, out), top, total, narrow(wide)

    def interpreted_step(i, carry, masked):
        """`step` in the same order, without overlap: weights in shared memory are overwritten by the next ones."""
        out, top, total, _ = carry

        def values_of(new):
            issue_values(new, memory.weight_tile.at[part], i - 1)
            pass_turn()
            return new[...]

        def scores_of(scores):
            issue_scores(scores, i)
            new = pl.run_scoped(values_of, plgpu.ACC(out.shape, jnp.float32))
            return scores[...], new

        scores, new = pl.run_scoped(scores_of, accumulator)
        release(memory.k_free, i)
        wide, top, total, keep = softmax(scores, i, top, total, masked)
        release(memory.v_free, i - 1)
        return (out + new) * by_row(keep, out), top, total, narrow(wide)

    interpreted = memory.weight_tile is not None
    accumulator = plgpu.ACC((ROWS, block_tokens), jnp.float32)
    if memory.sinks is None:
        top, total = full((ROWS,), tiles.MASKED, A_ROW), full((ROWS,), 0, A_ROW)
    else:
        top, total = plgpu.load(memory.sinks.at[head], layout=A_ROW, optimized=False), full((ROWS,), 1, A_ROW)
    wait(memory.q_ready, part)
    scores = pl.run_scoped(first_scores, accumulator)
    release(memory.k_free, 0)
    wide, top, total, _ = softmax(scores, 0, top, total, True)

    # Blocks of which each query sees every token, [begin, end) of the count down, need no mask.
    begin = jnp.clip(tile.last - lax.div(first_position + 1, jnp.int32(block_tokens)) + 1, 1, tile.count)
    end = tile.count
    if window is not None:
        hidden = lax.div(jnp.maximum(first_position + mine - window, 0) + block_tokens - 1, jnp.int32(block_tokens))
        end = jnp.clip(tile.last - hidden + 1, begin, tile.count)
    advance = interpreted_step if interpreted else step
    carry = (full((ROWS, head_dim), 0, WGMMA), top, total, narrow(wide))
    carry = lax.fori_loop(1, begin, lambda i, c: advance(i, c, True), carry)
    carry = lax.fori_loop(begin, end, lambda i, c: advance(i, c, False), carry)
    if window is not None:
        carry = lax.fori_loop(end, tile.count, lambda i, c: advance(i, c, True), carry)
    out, _, total, weights = carry
    plgpu.barrier_arrive(memory.q_free[part])

    def last_values(new):
        issue_values(new, memory.weight_tile.at[part], tile.count - 1)
        return new[...]

    if interpreted:
        out += pl.run_scoped(last_values, plgpu.ACC(out.shape, jnp.float32))
    else:
        out = pl.run_state(lambda ref: issue_values(ref, weights, tile.count - 1))(plgpu.ACC.init(out))
    release(memory.v_free, tile.count - 1)
    share = (1 if memory.v_scale is None else memory.v_scale[head]) / total
    store(memory, shape, part, tile.begin + first, head, mine, out * by_row(share, out))


def mask(products, last, before):
    """The products of the columns in (before, last], MASKED elsewhere. Both are by row.

    Done by strips of 8 columns, for which the bounds move: numbers for all columns would take 32 registers, and keep
    them as they are the same for each block.
    """
    strips = []
    for at in range(0, products.shape[1], 8):
        strip = products[:, at : at + 8]
        column = plgpu.broadcasted_iota(jnp.int32, strip.shape, 1, layout=WGMMA)
        seen = column <= by_row(last - at, strip)
        if before is not None:
            seen &= column > by_row(before - at, strip)
        strips.append(jnp.where(seen, strip, tiles.MASKED))
    return jnp.concatenate(strips, axis=1)


def store(memory: Memory, shape: Shape, part, begin, head, mine, out) -> None:
    """Start the stores of `mine` queries' results, of all in one piece if they are a whole part."""
    tile, tokens = memory.result_tile.at[part], shape.part_tokens
    width = tile.shape[2]
    out = out.astype(tile.dtype)
    for at in range(0, out.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was in the tile is on its way
        put(tile, out, at, memory.weight_tile is not None)
        plgpu.commit_smem()
        where = (pl.ds(head * shape.group, shape.group), pl.ds(at, width))

        @pl.when(mine == tokens)
        def _(where=where):
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, tokens)], memory.result.at[pl.ds(begin, tokens), *where])

        @pl.when(mine < tokens)
        def _(where=where):
            @pl.loop(0, mine)
            def _(i):
                plgpu.copy_smem_to_gmem(tile.at[i], memory.result.at[begin + i, *where])


def put(tile, values, at, interpreted) -> None:
    """Write the columns of `values` from `at` on to `tile` [tokens, heads, columns]: plain rows, of which any number
    can be stored."""
    group, width = tile.shape[1:]
    if interpreted:
        tokens = ROWS // group
        tile.at[pl.ds(0, tokens)][...] = values[: tokens * group, at : at + width].reshape(tokens, group, width)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def write(_, ref, values):
        rows = mgpu.memref_slice(mgpu.memref_fold(ref, 0, 2), slice(0, ROWS))
        values[:, at : at + width].store_untiled(rows, optimized=False)

    write(tile, values)


def wait(barriers, index) -> None:
    plgpu.barrier_wait(barriers[index])


def by_row(values, like):
    """One number a row, as wide as `like`."""
    return lax.broadcast_in_dim(values, like.shape, [0])


def full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
