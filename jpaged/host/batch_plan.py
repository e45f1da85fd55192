"""Owns `BatchPlan`: which tokens a step computes, and what is to be moved before it."""

from __future__ import annotations

from typing import NamedTuple

from .decode_rows import DecodeStep, Row
from .swap_space import NO_MOVES, Moves


class BatchPlan(NamedTuple):
    rows: list[Row]
    num_tokens: int
    # (source, target): pages to be copied before the rows are computed, all at once. No target is a source too.
    page_copies: list[tuple[int, int]]
    # Between the pool and the swap space: what goes out before the copies are made, and what comes in after that.
    moves: Moves = NO_MOVES
    decoding: DecodeStep | None = None  # what is known of the first rows
