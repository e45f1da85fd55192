"""Owns how the queries of a batch are cut into tiles, and in which order the programs of a kernel take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

RECORD = 8  # numbers that describe a tile: one sector of memory


class Tile(NamedTuple):
    """Consecutive queries of one row, and the blocks of tokens that they see: `count` of them down from `last`."""

    row: Any
    begin: Any  # the first query in q
    queries: Any
    position: Any  # of the first query in its row
    length: Any  # of the row's context
    last: Any
    count: Any

    def first_seen(self, sliding_window):
        """The first token that a query of the tile sees."""
        return jnp.int32(0) if sliding_window is None else jnp.maximum(self.position - sliding_window + 1, 0)


def tile_table(query_starts, context_lens, num_tokens, *, tile_tokens, block_tokens, sliding_window):
    """The tiles of all rows [num_tiles, RECORD], those with the most blocks first, and how many there are [1].

    A tile has `tile_tokens` queries, the last of a row what is left. `num_tiles` is an upper bound: behind the tiles
    that there are come some without blocks.
    """
    num_seqs = context_lens.shape[0]
    num_tiles = max(1, min(num_tokens, num_tokens // tile_tokens + min(num_tokens, num_seqs)))
    query_lens = query_starts[1:] - query_starts[:-1]
    ends = jnp.cumsum(-(-query_lens // tile_tokens))
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum((index[:, None] >= ends).sum(1, dtype=jnp.int32), num_seqs - 1)
    done = (index - jnp.where(row > 0, ends[row - 1], 0)) * tile_tokens
    queries = jnp.minimum(query_lens[row] - done, tile_tokens)
    position = context_lens[row] - query_lens[row] + done
    tile = Tile(row, query_starts[row] + done, queries, position, context_lens[row], 0, 0)
    last = (position + queries - 1) // block_tokens
    count = last - tile.first_seen(sliding_window) // block_tokens + 1
    # A context shorter than its queries is an error of the caller's, which is not to hang the device.
    count = jnp.where((index < ends[-1]) & (position >= 0), count, 0)
    numbers = jnp.stack([*tile[:5], last, count, jnp.zeros_like(count)], axis=1)
    return numbers[jnp.argsort(-count)], ends[-1:]


def each_tile(table, used, num_heads, num_programs, visit):
    """Call `visit(tile, head, before)` for this program's tiles, which follow on `before` blocks. Returns all blocks.

    Programs take tiles in their order and back again, so that none gets the longest of each round. The heads of a tile
    are taken together: those of neighbouring tiles read the same pages at about the same time.
    """
    program = lax.axis_index("program")
    items = used[0] * num_heads

    def turn(i, before):
        back = lax.rem(i, jnp.int32(2)) == 1
        item = i * num_programs + jnp.where(back, num_programs - 1 - program, program)
        index, head = (f(jnp.minimum(item, items - 1), jnp.int32(num_heads)) for f in (lax.div, lax.rem))
        tile = Tile(*(table[index, i] for i in range(len(Tile._fields))))
        count = jnp.where(item < items, tile.count, 0)
        pl.when(count > 0)(lambda: visit(tile, head, before))
        return before + count

    return lax.fori_loop(0, lax.div(items + num_programs - 1, jnp.int32(num_programs)), turn, jnp.int32(0))
