"""Owns the size of the KV pool: how many pages fit into the memory that is given to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil

from jpaged.host.config import EngineConfig

CPU_SHARE = 0.25  # of the RAM that is free when the engine is built
# Leading bits that are kept of a measured budget. The number of pages is part of every program's shape: a pool that
# were a little different at each start would find none of its programs in the compilation cache.
CPU_BITS, GPU_BITS = 1, 5


def choose_num_pages(
    config: EngineConfig, *, device: Any, page_bytes: int, useful_pages: int, step_bytes: Callable[[], int]
) -> int:
    """Pages of the pool, the null page included.

    `num_pages` or `kv_cache_memory` of the config are taken at their word. Otherwise it is what a GPU has left under
    `gpu_memory_utilization`, by its own statistics, after `step_bytes()`, the temporary memory of the largest step; on
    a CPU a quarter of the free RAM; rounded down, so that the next start comes to the same. Either way no more than
    `useful_pages`, which all rows together can fill.
    Raises ValueError if not a single page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_cache_memory is not None:
        assert isinstance(config.kv_cache_memory, int)
        budget, origin = config.kv_cache_memory, "kv_cache_memory"
    elif device.platform == "cpu":
        budget = _rounded_down(int(psutil.virtual_memory().available * CPU_SHARE), CPU_BITS)
        origin = f"{CPU_SHARE:.0%} of the free RAM"
    else:
        statistics = device.memory_stats()
        if not statistics or "bytes_limit" not in statistics:
            raise ValueError(
                f"{device} reports no memory statistics to size the KV cache by: give kv_cache_memory or num_pages"
            )
        limit = int(statistics["bytes_limit"] * config.gpu_memory_utilization)
        budget = _rounded_down(limit - statistics["bytes_in_use"] - step_bytes(), GPU_BITS)
        origin = f"gpu_memory_utilization={config.gpu_memory_utilization} of {device}, less weights and activations,"
    num_pages = min(budget // page_bytes, useful_pages)
    if num_pages < 2:
        raise ValueError(
            f"the KV cache needs at least two pages of {page_bytes} bytes, but {origin} leaves {max(budget, 0)} bytes: "
            "give it more memory"
        )
    return int(num_pages)


def _rounded_down(size: int, bits: int) -> int:
    """`size` with all but its leading bits cleared."""
    unit = 1 << max(size.bit_length() - bits, 0)
    return size // unit * unit
