"""Owns `snapshot`: what the pool and the unfinished requests look like at one moment, for people to look at."""

from __future__ import annotations

from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np

from .page_pool import PagePool
from .request import Request
from .scheduler import Scheduler

# Bounds, so that a large engine neither stops for long nor gives an answer that nobody can draw.
MAX_CELLS = 4096  # of the map of the pool
MAX_REQUESTS = 256  # that are told of one by one
MAX_WAITING = 32  # of them, where more run
MAX_TABLE_ENTRIES = 16384  # in all block tables together
MAX_ID_LENGTH = 100
# States of a page, one character each. "1" to "9" are pages that so many hold, "9" those that nine or more hold.
FREE, CACHED = ".", "c"
STATES = FREE + CACHED + "123456789"


def snapshot(scheduler: Scheduler, pool: PagePool) -> dict[str, Any]:
    """The pages and the unfinished requests as plain JSON types, without any text or token of theirs.

    map.cells: a character of `STATES` for each of the pages 1, 2, …, or if map.pages_per_cell is more than 1, for so
        many neighbours the state that most of them are in (of equally many, the one that more hold).
    pages: how many are used, shared (by two or more; they are used, too), cached (free, but their contents can be
        found) and free (neither used nor cached); swap: pages outside the pool, None if there is no place for any.
    requests: those that run, in their order, then those that wait, at most `MAX_REQUESTS`; num_running and num_waiting
        count all. block_table: every pages_per_entry-th of its pages from the first on; 0 in the place of a page that
        no token to come can see.

    To be called between two steps, by whoever calls `step`. Its cost is bounded, but for one pass over the pool.
    """
    swap_space = pool.swap_space
    running, waiting = _shown(scheduler)
    now, shown = perf_counter(), [*running, *waiting]
    num_entries = sum(len(request.page_ids) for request in running)
    stride = max(-(-num_entries // MAX_TABLE_ENTRIES), 1)
    return {
        "page_size": pool.page_size,
        "num_pages": pool.num_pages - 1,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_model_len": scheduler.max_model_len,
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "pages": {
            "used": pool.num_used,
            "shared": pool.num_shared,
            "cached": pool.num_cached,
            "free": pool.num_free - pool.num_cached,
        },
        "map": _map(pool),
        "swap": swap_space
        and {
            "memory": swap_space.num_in_memory,
            "memory_pages": swap_space.num_pages,
            "disk": swap_space.num_on_disk,
            "disk_pages": swap_space.num_disk_pages,
        },
        "pages_per_entry": stride,
        "requests": [_describe(request, now, stride) for request in shown],
    }


def _shown(scheduler: Scheduler) -> tuple[list[Request], list[Request]]:
    """The running and the waiting requests that are told of one by one."""
    running = scheduler.running[: MAX_REQUESTS - min(scheduler.num_waiting, MAX_WAITING)]
    num_left = MAX_REQUESTS - len(running)
    waiting = scheduler.waiting[:num_left]
    # Forks of those whose prompt is not computed yet are in no queue.
    forks = (fork for request in [*running, *waiting] for fork in request.forks)
    return running, [*waiting, *islice(forks, num_left - len(waiting))]


def _describe(request: Request, now: float, stride: int) -> dict[str, Any]:
    return {
        "id": request.request_id[:MAX_ID_LENGTH],
        "state": request.status.value,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_output_tokens": len(request.output_token_ids),
        "max_tokens": request.most_outputs,
        "num_cached_tokens": request.num_cached_tokens or 0,
        "num_preemptions": request.num_preemptions,
        "priority": request.priority,
        "age": now - request.arrival,
        "num_pages": len(request.page_ids),
        "block_table": request.page_ids[::stride],
    }


def _map(pool: PagePool) -> dict[str, Any]:
    num_pages = pool.num_pages - 1
    references = np.minimum(np.array(pool.references, np.int32)[1:], 9)
    states = np.where(references, references + (STATES.index("1") - 1), STATES.index(FREE))
    states[np.fromiter(pool.idle_page_ids, np.intp, pool.num_cached) - 1] = STATES.index(CACHED)
    pages_per_cell = -(-num_pages // MAX_CELLS)
    if pages_per_cell > 1:
        cell_of = np.arange(num_pages) // pages_per_cell
        counts = np.bincount(cell_of * len(STATES) + states, minlength=(cell_of[-1] + 1) * len(STATES))
        counts = counts.reshape(-1, len(STATES))[:, ::-1]
        states = len(STATES) - 1 - counts.argmax(axis=1)  # the first of equal counts: that of the more holders
    characters = np.frombuffer(STATES.encode(), np.uint8)
    return {"pages_per_cell": pages_per_cell, "cells": characters[states].tobytes().decode()}
