"""Owns the prefill and mixed-batch kernel for Hopper: two warpgroups that multiply, one that loads pages by TMA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_tiles as tiles
from pallas_kernels.ragged_paged_attention.mosaic_warpgroups import (
    CONSUMERS,
    ROWS,
    Barriers,
    Memory,
    Shape,
    consume,
    produce,
)
from pallas_kernels.ragged_paged_attention.query_tiles import tile_table
from pallas_kernels.target import current_target

MAX_GROUP = 32  # query heads a KV head: shared memory has room for the results of no more
MAX_HEAD_DIM = 128
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 224, 56  # a thread; 2 * 224 + 56 are what three warpgroups share


def unsupported(target, q, k_pages, block_tables) -> str | None:
    reason = tiles.unsupported_pool(target, q, k_pages)
    group = q.shape[1] // k_pages.shape[1]
    if reason is None and group > MAX_GROUP:
        return f"{group} query heads a KV head, supported are up to {MAX_GROUP}"
    if reason is None and q.shape[2] > MAX_HEAD_DIM:
        return f"head_dim {q.shape[2]}, supported is up to {MAX_HEAD_DIM} (beyond, registers are spilled)"
    return reason


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
    block_tokens,
    num_stages,
    num_programs=None,
):
    """`pallas_kernels.ragged_paged_attention` with one program for each multiprocessor, which takes tile after tile.

    A tile is 128 rows of one KV head: up to `2 * (64 // group)` consecutive queries of one row of the batch with all
    their heads. Each of two consumers has 64 of them. A producer loads blocks of `block_tokens` tokens, page by page,
    into `num_stages` slots that the consumers share, from the last block that a query sees down to the first. Blocks
    that no query sees are skipped, only those that some do not see in whole are masked, and unwritten values in them
    are zeroed by the producer. It also brings the queries of the next tile while the consumers finish one.

    A consumer issues the scores of a block and, behind them, the product of the block before, whose softmax is done;
    the softmax of the new scores runs while that product does. The consumers take turns in issuing. Scores, sums and
    results are float32 in registers, the weights are rounded to the pool's dtype. Softmax is the running one in base 2.
    A query's result depends on its own row alone, and not on how the row's queries were cut into chunks: that is so
    whether `invariant` asks for it or not.

    Rows with a single query, most of a mixed batch, are tiles too, one of whose parts stands by. A block of 128 tokens
    and head_dim 128 takes about 3200 cycles of a multiprocessor's share of an H200's memory and the 64 rows' two
    products 1000: memory stays the limit, and other programs compute meanwhile. What they lack is a split of long
    contexts: one program reads about 75 GB/s, so that fewer than some 60 of them do not fill the memory's 4.8 TB/s.

    Source: as in `pallas_kernels.ragged_paged_attention`; the overlaps are FlashAttention-3's, Shah et al. 2024
    (arXiv:2407.08608).
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    shape = Shape(group, block_tokens, num_stages, page_size, sliding_window, soft_cap)
    table, used = tile_table(
        query_starts,
        context_lens,
        num_tokens,
        tile_tokens=CONSUMERS * shape.part_tokens,
        block_tokens=block_tokens,
        sliding_window=sliding_window,
    )
    num_programs = num_programs or (2 if interpret else current_target().num_cores or 132)
    num_programs = min(num_programs, table.shape[0] * num_kv_heads)

    # Rows of one KV head: query after query, all heads of each. Whole parts are read, hence the rows at the end.
    rows = q.reshape(num_tokens, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
    rows = jnp.pad(rows.reshape(num_kv_heads, num_tokens * group, head_dim), [(0, 0), (0, CONSUMERS * ROWS), (0, 0)])
    if sinks is not None:
        heads = jnp.arange(ROWS, dtype=jnp.int32) % group
        sinks = jnp.maximum(sinks.reshape(num_kv_heads, group)[:, heads] * tiles.LOG2_E, tiles.MASKED)
    inputs = (table, used, block_tables, rows, k_pages, v_pages, sinks, k_scale, v_scale)
    present = [x for x in inputs if x is not None]

    def body(*refs, filled, emptied, passed, **scratch):
        given = iter(refs[:-1])
        barriers = dict(
            k_ready=Barriers(filled, 0),
            v_ready=Barriers(filled, num_stages),
            k_free=Barriers(emptied, 0),
            v_free=Barriers(emptied, num_stages),
            q_ready=Barriers(passed, 0),
            q_free=Barriers(passed, CONSUMERS),
            turn=Barriers(passed, 2 * CONSUMERS),
        )
        memory = Memory(*(None if x is None else next(given) for x in inputs), refs[-1], **scratch, **barriers)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            consume(memory, shape, scale, warpgroup, num_programs)

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            produce(memory, shape, num_programs)

    swizzle = tiles.swizzle_bytes(head_dim)
    # Results leave through a tile of their own. Shared memory has no room for the widest ones as a whole.
    stored = head_dim if head_dim <= 192 else next(n for n in range(120, 0, -8) if head_dim % n == 0)
    kv_tiles = tiles.tile((num_stages, block_tokens, head_dim), q.dtype, swizzle)
    loads = tiles.loads_per_block(block_tokens, page_size)
    scratch = dict(
        q_tile=tiles.tile((CONSUMERS, ROWS, head_dim), q.dtype, swizzle),
        result_tile=plgpu.SMEM((CONSUMERS, -(-ROWS // group), group, stored), q.dtype),
        k_tiles=kv_tiles,
        v_tiles=kv_tiles,
        filled=plgpu.Barrier(num_arrivals=loads, num_barriers=3 * num_stages),
        emptied=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2 * num_stages),
        passed=plgpu.Barrier(num_barriers=3 * CONSUMERS),
    )
    if interpret:  # its products take nothing from registers
        scratch["weight_tile"] = tiles.tile((CONSUMERS, ROWS, block_tokens), q.dtype, 128)
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        interpret=tiles.interpreter(interpret),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged_attention",
    )
    return call(*present)
