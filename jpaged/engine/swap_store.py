"""Owns `SwapStore`: the contents of the pages in swap space, and their way from the pool and back."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import psutil

from jpaged.engine.compile import CompiledSteps
from jpaged.host.config import EngineConfig
from jpaged.host.page_pool import NULL_PAGE
from jpaged.host.swap_costs import SwapCosts
from jpaged.host.swap_space import SwapSpace

MOST_AT_ONCE = 64 * 2**20  # bytes of the device's memory that a move takes


def swap_sizes(page_bytes: int) -> tuple[int, ...]:
    """Numbers of pages that are moved at once, ascending."""
    most = max(MOST_AT_ONCE // page_bytes, 1)
    return (*(n for n in (4, 16, 64, 256) if n < most), min(most, 512))


def make_swap_space(config: EngineConfig, page_bytes: int) -> SwapSpace | None:
    """The swap space that a config asks for.

    Raises ValueError if it holds no page, or more than there is memory.
    """
    if config.swap_space is None:
        return None
    num_pages = []
    for name, size in (("swap_space", config.swap_space), ("swap_disk_space", config.swap_disk_space)):
        assert not isinstance(size, str), "sizes in text are bytes by now"
        if size is not None and size < page_bytes:
            raise ValueError(f"{name} ({size} bytes) holds not one page, which takes {page_bytes} bytes: give it more")
        num_pages.append((size or 0) // page_bytes)
    in_memory, on_disk = num_pages
    free = psutil.virtual_memory().available
    if in_memory * page_bytes > free:
        raise ValueError(f"swap_space ({config.swap_space} bytes) is more than the {free} bytes of RAM that are free")
    return SwapSpace(in_memory, SwapCosts(config.page_size, always=config.preemption == "swap"), on_disk)


class SwapStore:
    """One array in host memory, and one in a file that ends with the process. `page_shape` is that of one page over all
    layers, keys and values: [num_layers, 2, num_kv_heads, page_size, head_dim].

    Raises ValueError if there is not so much space on the disk.
    """

    def __init__(self, space: SwapSpace, page_shape: Sequence[int], dtype: Any, directory: str | None):
        self._space = space
        self._memory = np.empty((space.num_pages, *page_shape), dtype)  # which takes memory as it is filled
        self._disk = _on_disk((space.num_disk_pages, *page_shape), dtype, directory) if space.num_disk_pages else None
        self._arriving: list[tuple[jax.Array, Sequence[int]]] = []  # contents that may be under way, and their places

    def clear(self) -> None:
        self._arriving = []

    def run(self, steps: CompiledSteps, kv_pages: Any, plan: Any) -> Any:
        """The pool as the rows of a `BatchPlan` need it: after its moves and copies."""
        if not (plan.moves.swap_in or plan.moves.swap_out):
            return steps.copy_pages(kv_pages, plan.page_copies) if plan.page_copies else kv_pages
        self._take_in()
        # All that is read on the host is read before anything is written.
        filled = [
            ([page_id for _, page_id in moves], self._read([place for place, _ in moves]))
            for moves in _in_parts(plan.moves.swap_in, steps.most_swapped)
        ]
        for place, on_disk in plan.moves.spills:
            self._at(on_disk)[...] = self._at(place)
        for moves in _in_parts(plan.moves.swap_out, steps.most_swapped):
            taken = steps.take_pages(kv_pages, [page_id for page_id, _ in moves])
            self._arriving.append((taken, [place for _, place in moves]))
        if plan.page_copies:
            kv_pages = steps.copy_pages(kv_pages, plan.page_copies)
        for page_ids, contents in filled:
            kv_pages = steps.put_pages(kv_pages, page_ids, contents)
        if self._space.costs.seconds_per_page is None:
            kv_pages = self._measure(steps, kv_pages)
        return kv_pages

    def _take_in(self) -> None:
        """Puts what has come from the device to its places."""
        arriving, self._arriving = self._arriving, []
        for taken, places in arriving:
            contents = np.moveaxis(np.asarray(taken), 2, 0)
            for place, page in zip(places, contents, strict=False):
                self._at(place)[...] = page

    def _read(self, places: Sequence[int]) -> np.ndarray:
        return np.stack([self._at(place) for place in places], axis=2)

    def _at(self, place: int) -> np.ndarray:
        if place < len(self._memory):
            return self._memory[place]
        assert self._disk is not None
        return self._disk[place - len(self._memory)]

    def _measure(self, steps: CompiledSteps, kv_pages: Any) -> Any:
        """Finds out what it takes to bring pages back: a few, and as many as go at once. They go to the null page."""
        seconds = []
        sizes = steps.swap_sizes[0], steps.swap_sizes[-1]
        for size in sizes:
            contents = np.zeros((*self._memory.shape[1:3], size, *self._memory.shape[3:]), self._memory.dtype)
            for _ in range(2):  # the first run of a program takes longer
                jax.block_until_ready(kv_pages)
                began = time.perf_counter()
                kv_pages = steps.put_pages(kv_pages, [NULL_PAGE] * size, contents.copy())
                jax.block_until_ready(kv_pages)
                taken = time.perf_counter() - began
            seconds.append(taken)
        costs = self._space.costs
        each = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else seconds[0] / sizes[0]
        costs.seconds_per_page = max(each, 0.0)
        costs.seconds_per_move = max(seconds[0] - sizes[0] * costs.seconds_per_page, 0.0)
        return kv_pages


def _on_disk(shape: Sequence[int], dtype: Any, directory: str | None) -> np.ndarray:
    """An array in a file without a name, so that nothing of it is left behind."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    where = directory or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            if hasattr(os, "posix_fallocate"):  # or a full disk would kill the process as it writes
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
            return np.memmap(file, dtype, "r+", shape=tuple(shape))
    except (OSError, OverflowError, ValueError) as error:  # ValueError: a path with a NUL byte
        reason = getattr(error, "strerror", error)
        chosen = "" if directory is None else ", which is swap_dir: make it, or name another folder"
        raise ValueError(
            f"swap_disk_space: no file of {size} bytes can be made in {where} ({reason}){chosen}"
        ) from error


def _in_parts(moves: Sequence[tuple[int, int]], most: int) -> Iterator[Sequence[tuple[int, int]]]:
    for start in range(0, len(moves), most):
        yield moves[start : start + most]
