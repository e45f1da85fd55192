"""Owns the numbers by which an engine is judged: `EngineStats` over its steps, and the latencies of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .request import Request

if TYPE_CHECKING:
    from .scheduler import BatchPlan, Scheduler

PERCENTILES = (50, 90, 99)


@dataclass
class EngineStats:
    """Running totals since the engine was built, but where it says otherwise. Each is a plain number, so that two
    readings can be subtracted."""

    num_steps: int = 0
    num_decode_steps: int = 0  # of them, those without a prompt's tokens
    num_scheduled_tokens: int = 0
    num_padded_tokens: int = 0  # tokens computed only to fill up a batch's shape
    num_output_tokens: int = 0
    num_rows: int = 0  # sequences in the last step
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # tokens that were not computed, as their KV was found in pages of others
    num_page_copies: int = 0  # pages copied as two sequences went on differently in them
    num_pages_swapped_out: int = 0  # moved to swap space, as the pool needed their place
    num_pages_swapped_in: int = 0  # and back
    num_used_pages: int = 0  # that requests hold, after the last step or abort
    num_shared_pages: int = 0  # of them, those that more than one holds
    num_cached_pages: int = 0  # that nobody holds, and whose contents can be found again
    num_swapped_pages: int = 0  # in swap space
    num_running: int = 0  # sequences that hold pages
    num_waiting: int = 0  # and those that wait for some
    num_compiles: int = 0  # after warm-up
    kv_utilization_sum: float = 0.0
    kv_utilization_samples: int = 0
    kv_utilization_min: float | None = None

    def record_step(
        self, *, num_tokens: int, batch_tokens: int, is_decode: bool, num_output_tokens: int, num_rows: int = 0
    ) -> None:
        """Counts a step of `num_tokens` tokens that were padded to `batch_tokens`."""
        self.num_steps += 1
        self.num_decode_steps += is_decode
        self.num_scheduled_tokens += num_tokens
        self.num_padded_tokens += batch_tokens - num_tokens
        self.num_output_tokens += num_output_tokens
        self.num_rows = num_rows

    def record_kv(self, *, num_tokens: int, num_slots: int) -> None:
        """Samples how full the pages are that requests hold: tokens held to slots allocated. To be called after each
        step; while nothing is allocated there is nothing to sample."""
        if num_slots:
            utilization = num_tokens / num_slots
            self.kv_utilization_sum += utilization
            self.kv_utilization_samples += 1
            least = self.kv_utilization_min
            self.kv_utilization_min = utilization if least is None else min(utilization, least)

    def record_moves(self, plan: BatchPlan) -> None:
        """Counts the pages that a step has moved."""
        self.num_page_copies += len(plan.page_copies)
        self.num_pages_swapped_out += len(plan.moves.swap_out)
        self.num_pages_swapped_in += len(plan.moves.swap_in)

    def record_state(self, scheduler: Scheduler) -> None:
        """Takes over what a scheduler and its pool say now."""
        pool = scheduler.pool
        self.num_preemptions, self.num_cached_tokens = scheduler.num_preemptions, scheduler.num_cached_tokens
        self.num_running, self.num_waiting = scheduler.num_running, scheduler.num_waiting
        self.num_used_pages, self.num_shared_pages = pool.num_used, pool.num_shared
        self.num_cached_pages = pool.num_cached
        self.num_swapped_pages = 0 if pool.swap_space is None else pool.swap_space.num_held

    @property
    def kv_utilization_mean(self) -> float | None:
        return self.kv_utilization_sum / self.kv_utilization_samples if self.kv_utilization_samples else None

    @property
    def padding(self) -> float:
        """The share of computed tokens that were padding."""
        computed = self.num_scheduled_tokens + self.num_padded_tokens
        return self.num_padded_tokens / computed if computed else 0.0

    def as_dict(self) -> dict[str, float | int | None]:
        return asdict(self) | {"kv_utilization_mean": self.kv_utilization_mean, "padding": self.padding}


class Latencies(NamedTuple):
    """One request's times in seconds; None where it has too few tokens for one."""

    ttft: float | None  # arrival to first token, queueing included
    tpot: float | None  # mean time per output token after the first
    itl: list[float]  # each gap between two tokens
    e2e_latency: float | None  # arrival to end
    queue_time: float | None = None  # arrival to the first step with tokens of it

    @classmethod
    def of(cls, request: Request, num_tokens: int | None = None) -> Latencies:
        """As they are; with `num_tokens`, as they were when it had so many output tokens."""
        times = request.token_times[:num_tokens]
        ended = request.finish_time if len(times) == len(request.token_times) else None
        return cls(
            ttft=times[0] - request.arrival if times else None,
            tpot=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            itl=[later - earlier for earlier, later in zip(times, times[1:], strict=False)],
            e2e_latency=ended - request.arrival if ended is not None else None,
            queue_time=request.start_time - request.arrival if request.start_time is not None else None,
        )


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (interpolated linearly) and maximum; None of no values."""
    if not values:
        return None
    ranks = np.percentile(values, PERCENTILES)
    named = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, ranks, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}


def latency_summary(requests: Iterable[Request]) -> dict[str, dict[str, float] | None]:
    """ttft, tpot, itl and e2e_latency over requests, in seconds; gaps of all requests are one population."""
    latencies = [Latencies.of(request) for request in requests]
    return {
        "ttft": percentiles([one.ttft for one in latencies if one.ttft is not None]),
        "tpot": percentiles([one.tpot for one in latencies if one.tpot is not None]),
        "itl": percentiles([gap for one in latencies for gap in one.itl]),
        "e2e_latency": percentiles([one.e2e_latency for one in latencies if one.e2e_latency is not None]),
    }
