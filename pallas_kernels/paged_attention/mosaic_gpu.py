"""Owns the decode kernel for Hopper: pages by TMA, transposed products by wgmma, splits over the context."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_tiles as tiles
from pallas_kernels.target import Target

WGMMA = plgpu.Layout.WGMMA
A_HEAD = WGMMA.reduce(0)  # one number for each column of a WGMMA array

MAX_GROUP = 16  # query heads a KV head: with more of them, and head_dim 256, registers spill
MIN_SPLIT = 256  # tokens: a shorter split costs more to start and to combine than it saves
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")


def unsupported(target: Target, q: Any, k_pages: Any, block_tables: Any) -> str | None:
    reason = tiles.unsupported_pool(target, q, k_pages, EIGHT_BITS)
    group = q.shape[1] // k_pages.shape[1]
    if reason is None and group > MAX_GROUP:
        return f"{group} query heads a KV head, supported are up to {MAX_GROUP}"
    return reason


def bytes_in_flight(head_dim: int, itemsize: int, *, block_tokens: int, num_stages: int) -> int:
    """Bytes of keys and values that one thread block has asked memory for at once: all slots but the one in use."""
    return 2 * (num_stages - 1) * block_tokens * head_dim * itemsize


def paged_attention(
    q,
    k_pages,
    v_pages,
    block_tables,
    context_lens,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks,
    k_scale,
    v_scale,
    split_size: int | None,
    num_cores: int,
    interpret: Any,
    block_tokens: int,
    num_stages: int,
):
    """`pallas_kernels.paged_attention` with one thread block for each row, KV head and split of the context.

    One warpgroup issues the TMA loads of K and V, `num_stages` blocks of `block_tokens` tokens ahead. The other
    multiplies, both times with the pool's tile on the left, whose rows must be 64 or more, and the group's few query
    heads on the right: scores^T [tokens, heads] = K q^T and result^T [head_dim, heads] += V^T P^T. The usual order
    would pad the heads to 64 and cost eight times the products and exponentials.

    A tile is [tokens, head_dim padded to 64s with zeros], swizzled. Scores, sums and results are float32, the weights
    are rounded to q's dtype for the second product. Softmax is the running one in base 2. Tiles of a pool of 8 bits are
    widened to q's dtype. With more than one split, each leaves its unnormalized result, and a second kernel adds them
    up in their order.

    Source: as in `pallas_kernels.paged_attention`; the division of labour is FlashAttention-3's, Shah et al. 2024
    (arXiv:2407.08608).
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    heads, width = -(-group // 8) * 8, tiles.padded(head_dim)
    room = block_tables.shape[1] * page_size
    if split_size is None:
        at_once = (2 if width <= 128 else 1) * (num_cores or 132)  # thread blocks, by their shared memory
        num_splits = max(1, min(at_once // (num_seqs * num_kv_heads), room // MIN_SPLIT))
    else:
        num_splits = max(1, -(-room // split_size))
    cut = Cut(block_tokens, sliding_window, split_size and split_size // block_tokens, num_splits)
    plan = Plan(scale, soft_cap, cut, page_size, num_stages, heads, width)

    q = q.reshape(num_seqs, num_kv_heads, group, head_dim)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(num_kv_heads, group), [(0, 0), (0, heads - group)]).reshape(-1)
    result_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = (num_seqs, num_kv_heads, num_splits)
    part_types = [jax.ShapeDtypeStruct((*parts, *x, heads), jnp.float32) for x in ((width,), (), ())]

    swizzle = tiles.swizzle_bytes(head_dim)
    head_tile = tiles.tile((heads, width), q.dtype, swizzle)
    pool_swizzle = tiles.swizzle_bytes(head_dim, 8 * k_pages.dtype.itemsize)
    pool_tiles = tiles.tile((num_stages, block_tokens, width), k_pages.dtype, pool_swizzle)
    loads = plgpu.Barrier(num_arrivals=tiles.loads_per_block(block_tokens, page_size), num_barriers=num_stages)
    memory = dict(
        q_tile=head_tile,
        k_tiles=pool_tiles,
        v_tiles=pool_tiles,
        weight_tile=tiles.tile((heads, block_tokens), q.dtype, swizzle),
        q_ready=plgpu.Barrier(),
        k_ready=loads,
        v_ready=loads,
        k_free=plgpu.Barrier(num_barriers=num_stages),
        v_free=plgpu.Barrier(num_barriers=num_stages),
    )
    if k_pages.dtype != q.dtype:
        memory["wide_tile"] = tiles.tile((block_tokens, width), q.dtype, swizzle)

    out = launch(
        attend,
        plan,
        Inputs(q, k_pages, v_pages, block_tables, context_lens, sinks, k_scale, v_scale),
        part_types if num_splits > 1 else [result_type],
        memory,
        interpret,
        grid=(num_splits, num_kv_heads, num_seqs),
        grid_names=("split", "head", "row"),
        num_threads=2,
        thread_name="wg",
    )
    if num_splits > 1:
        out = launch(
            combine,
            plan,
            Parts(out[0], out[1], out[2], context_lens, sinks, v_scale),
            [result_type],
            dict(result_tile=head_tile),
            interpret,
            grid=(num_kv_heads, num_seqs),
            grid_names=("head", "row"),
        )
    return out[0].reshape(num_seqs, num_q_heads, head_dim)


class Cut(NamedTuple):
    """How the contexts are cut: into blocks at multiples of `block_tokens`, the blocks into splits."""

    block_tokens: int
    sliding_window: int | None
    split_blocks: int | None  # None: a row's blocks are dealt out evenly
    num_splits: int

    def seen(self, length):
        """The first token seen of a context, and the blocks [begin, end) that hold any."""
        first = jnp.int32(0) if self.sliding_window is None else jnp.maximum(length - self.sliding_window, 0)
        return first, lax.div(first, jnp.int32(self.block_tokens)), pl.cdiv(length, jnp.int32(self.block_tokens))

    def blocks(self, length, split):
        """The first token seen, and the blocks [begin, end) of one split; no blocks where end <= begin."""
        first, begin, end = self.seen(length)
        if self.split_blocks is None:
            start, size = begin, pl.cdiv(end - begin, jnp.int32(self.num_splits))
        else:
            start, size = jnp.int32(0), jnp.int32(self.split_blocks)
        start = start + split * size
        return first, jnp.maximum(begin, start), jnp.minimum(end, start + size)

    def splits(self, length):
        """The splits [begin, end) that have blocks."""
        _, begin, end = self.seen(length)
        if self.split_blocks is None:
            size = jnp.maximum(pl.cdiv(end - begin, jnp.int32(self.num_splits)), 1)
            return jnp.int32(0), pl.cdiv(end - begin, size)
        return lax.div(begin, jnp.int32(self.split_blocks)), pl.cdiv(end, jnp.int32(self.split_blocks))


class Plan(NamedTuple):
    """What is known when the kernels are traced."""

    scale: float
    soft_cap: float | None
    cut: Cut
    page_size: int
    num_stages: int
    heads: int  # a group's query heads, padded to a whole product
    width: int  # of a tile

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.num_stages))


class Inputs(NamedTuple):
    """Of the kernel that attends; the optional ones are None."""

    q: Any
    k_pages: Any
    v_pages: Any
    block_tables: Any
    context_lens: Any
    sinks: Any
    k_scale: Any
    v_scale: Any


class Parts(NamedTuple):
    """Inputs of the kernel that combines: the splits' unnormalized results^T, largest scores and sums, and the rest."""

    results: Any
    tops: Any
    totals: Any
    context_lens: Any
    sinks: Any
    v_scale: Any


class Memory(NamedTuple):
    """What the two warpgroups of a thread block share. A slot holds a block of tokens."""

    q_tile: Any
    k_tiles: Any
    v_tiles: Any
    weight_tile: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    wide_tile: Any = None


def launch(body, plan: Plan, inputs: Inputs | Parts, out_types: list, memory: dict, interpret: Any, **grid):
    """Run `body(plan, inputs, outputs, **memory)` with references for the arrays and the memory."""
    given = [array for array in inputs if array is not None]

    def call(*refs, **memory):
        rest = iter(refs)
        body(plan, type(inputs)(*(None if array is None else next(rest) for array in inputs)), [*rest], **memory)

    kernel = plgpu.kernel(
        call,
        out_type=out_types,
        scratch_types=memory,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tiles.interpreter(interpret),
        kernel_name=f"paged_attention_{body.__name__}",
        **grid,
    )
    return kernel(*given)


def attend(plan: Plan, inputs: Inputs, outputs: list, **memory):
    row, head, split = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("split")
    length = inputs.context_lens[row]
    first, begin, end = plan.cut.blocks(length, split)
    place = (row, head, begin, end - begin, (first, length))

    @pl.when(lax.axis_index("wg") == 1)
    def _():
        produce(plan, inputs, Memory(**memory), *place)

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        top, total, out = consume(plan, inputs, Memory(**memory), *place)
        if plan.cut.num_splits == 1:
            finish(plan, row, head, top, total, out, inputs, outputs[0], memory["q_tile"])
        else:

            @pl.when(end > begin)
            def _():
                for ref, value in zip(outputs, (out, top, total)):
                    tiles.store(ref.at[row, head, split], value)


def produce(plan: Plan, inputs: Inputs, memory: Memory, row, head, begin, count, seen):
    """Load the blocks [begin, begin + count) into the slots, as these become free."""

    def load(step, _):
        slot, block = plan.slot(step), begin + step
        k_slot, v_slot = memory.k_tiles.at[slot], memory.v_tiles.at[slot]
        page_ids = tiles.pages_of_block(inputs.block_tables, row, block, seen, k_slot, plan.page_size)
        pl.when(step >= plan.num_stages)(lambda: plgpu.barrier_wait(memory.k_free.at[slot]))
        tiles.load_block(inputs.k_pages, page_ids, head, block, k_slot, memory.k_ready.at[slot])
        pl.when(step >= plan.num_stages)(lambda: plgpu.barrier_wait(memory.v_free.at[slot]))
        tiles.load_block(inputs.v_pages, page_ids, head, block, v_slot, memory.v_ready.at[slot])

    lax.fori_loop(0, count, load, None)


def consume(plan: Plan, inputs: Inputs, memory: Memory, row, head, begin, count, seen):
    """The largest score, the sum of the weights [heads] and the unnormalized result^T [width, heads] of the blocks."""

    @pl.when(count > 0)
    def _():
        overhang = (tiles.overhanging(plan.heads, head), tiles.overhanging(plan.width, head))
        plgpu.copy_gmem_to_smem(inputs.q.at[row, head, *overhang], memory.q_tile, memory.q_ready)
        plgpu.barrier_wait(memory.q_ready)

    scale = plan.scale if inputs.k_scale is None else plan.scale * inputs.k_scale[head]

    def release(free, step):
        # Only if the slot is to be filled again: each arrival must be waited for.
        pl.when(step + plan.num_stages < count)(lambda: plgpu.barrier_arrive(free.at[plan.slot(step)]))

    def attend_block(step, carry):
        top, total, out = carry
        slot, start = plan.slot(step), (begin + step) * plan.cut.block_tokens
        k_tile, v_tile = memory.k_tiles.at[slot], memory.v_tiles.at[slot]
        plgpu.barrier_wait(memory.k_ready.at[slot])
        if memory.wide_tile is not None:
            tiles.widen(k_tile, memory.wide_tile)
            k_tile = memory.wide_tile
        products = product(k_tile, memory.q_tile.transpose((1, 0)))
        release(memory.k_free, step)
        scores = tiles.base_2_scores(products, scale, plan.soft_cap)
        scores = jnp.where(tiles.seen_rows(scores.shape, start, *seen, WGMMA), scores, tiles.MASKED)
        new_top = jnp.maximum(top, scores.max(axis=0))
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - by_column(new_top, scores))
        # Each thread sums up its own tokens; their sums are added up at the end.
        total = total * by_column(keep, total) + weights
        memory.weight_tile.transpose((1, 0))[...] = weights.astype(memory.weight_tile.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(memory.v_ready.at[slot])
        if memory.wide_tile is not None:
            tiles.widen(v_tile, memory.wide_tile, start, *seen)
            v_tile = memory.wide_tile
        else:
            tiles.zero_unseen(v_tile, start, *seen)
        new = product(v_tile.transpose((1, 0)), memory.weight_tile.transpose((1, 0)))
        release(memory.v_free, step)
        return new_top, total, out * by_column(keep, out) + new

    nothing = (
        filled((plan.heads,), tiles.MASKED, A_HEAD),
        filled((plan.cut.block_tokens, plan.heads), 0, WGMMA),
        filled((plan.width, plan.heads), 0, WGMMA),
    )
    top, total, out = lax.fori_loop(0, count, attend_block, nothing)
    return top, total.sum(axis=0), out


def combine(plan: Plan, parts: Parts, outputs: list, result_tile):
    """Add up the splits' results, in their order."""
    row, head = lax.axis_index("row"), lax.axis_index("head")
    begin, end = plan.cut.splits(parts.context_lens[row])
    # So many parts fit into 64 registers a thread, and are under way together.
    count = max(1, min(8, 64 * 128 // (plan.width * plan.heads)))

    def add(turn, carry):
        top, total, out = carry
        new = []
        for split in (turn * count + i for i in range(count)):
            # Of a split that the row has not, another's results are read, and given no weight.
            place = (row, head, jnp.clip(split, begin, end - 1))
            part = plgpu.load(parts.results.at[place], layout=WGMMA, optimized=False)
            part_top = plgpu.load(parts.tops.at[place], layout=A_HEAD, optimized=False)
            part_total = plgpu.load(parts.totals.at[place], layout=A_HEAD, optimized=False)
            new.append((part_top + jnp.where((split >= begin) & (split < end), 0.0, tiles.MASKED), part_total, part))
        new_top = top
        for part_top, _, _ in new:
            new_top = jnp.maximum(new_top, part_top)
        keep = jnp.exp2(top - new_top)
        total, out = total * keep, out * by_column(keep, out)
        for part_top, part_total, part in new:
            weight = jnp.exp2(part_top - new_top)
            total, out = total + part_total * weight, out + part * by_column(weight, out)
        return new_top, total, out

    nothing = (
        filled((plan.heads,), tiles.MASKED, A_HEAD),
        filled((plan.heads,), 0, A_HEAD),
        filled((plan.width, plan.heads), 0, WGMMA),
    )
    turns = (lax.div(begin, jnp.int32(count)), pl.cdiv(end, jnp.int32(count)))
    top, total, out = lax.fori_loop(*turns, add, nothing)
    finish(plan, row, head, top, total, out, parts, outputs[0], result_tile)


def finish(plan: Plan, row, head, top, total, out, inputs: Inputs | Parts, result, result_tile):
    """Count the sinks in, normalize, and write the result by way of `result_tile`."""
    if inputs.sinks is not None:
        sinks = inputs.sinks.at[pl.ds(head * plan.heads, plan.heads)]
        sink = plgpu.load(sinks, layout=A_HEAD, optimized=False) * tiles.LOG2_E
        new_top = jnp.maximum(top, sink)
        keep = jnp.exp2(top - new_top)
        total = total * keep + jnp.exp2(sink - new_top)
        out = out * by_column(keep, out)
    # A row that saw nothing has a total of 0, and a result of 0 too.
    share = (1 if inputs.v_scale is None else inputs.v_scale[head]) / jnp.maximum(total, 1e-37)
    result_tile.transpose((1, 0))[...] = (out * by_column(share, out)).astype(result_tile.dtype)
    plgpu.commit_smem()
    overhang = (tiles.overhanging(plan.heads, head), tiles.overhanging(plan.width, head))
    plgpu.copy_smem_to_gmem(result_tile, result.at[row, head, *overhang])
    plgpu.wait_smem_to_gmem(0)


def product(left, right):
    """`left @ right` of two matrices in shared memory, in float32."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def by_column(values, like):
    """One number a column, as wide as `like`."""
    return lax.broadcast_in_dim(values, like.shape, [1])


def filled(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
