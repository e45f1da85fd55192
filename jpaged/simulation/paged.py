"""Owns the runs of the memory study through the real `Scheduler` and `PagePool`, with drawn numbers for tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import BatchPlan, Scheduler

from .trace import MAX_LEN, Lengths, TraceSpec, draw_trace
from .usage import MemoryUse, Tally

VOCAB_SIZE = 32_000
PAGE_SIZE = 16  # the engine's own choice, where nothing else is said
NUM_SHARING = 48  # sequences that run while sharing is measured with ample memory
ANY_LENGTH = SamplingParams(max_tokens=None, ignore_eos=True)


@dataclass(frozen=True)
class Sharing:
    """How much memory sharing saved: 1 - pages in use / pages that the same requests would hold if each had its own,
    the mean over the steps of the saturated phase."""

    method: Literal["parallel sampling"]
    n: int  # sequences of a request
    saved: float  # with memory for all that run
    saved_full: float  # where memory is short, and preempted samples begin again
    num_preemptions: int  # of the latter


def serve(
    trace: Sequence[Lengths],
    *,
    num_slots: int,
    page_size: int,
    n: int = 1,
    prefix_caching: bool = False,
    max_num_seqs: int | None = None,
) -> Iterator[tuple[Scheduler, BatchPlan]]:
    """Serves a trace whose requests all wait at the start, each as `n` samples of one prompt that end together.

    Yields each step while it runs: it is planned and has its pages, and the tokens that it draws are not known yet.
    A step has room for any number of tokens, so whoever runs gains a token in each. A memory of `num_slots` slots is
    that of the whole pool, the null page included.
    """
    scheduler = Scheduler(
        PagePool(num_slots // page_size, page_size),
        max_num_seqs=max_num_seqs or len(trace) * n,
        max_num_batched_tokens=num_slots,
        max_model_len=MAX_LEN,
        prefix_caching=prefix_caching,
    )
    rng = np.random.default_rng(0)
    for index, lengths in enumerate(trace):
        prompt = rng.integers(0, VOCAB_SIZE, lengths.prompt).tolist()
        parent: Request | None = None
        for sample in range(n):
            asked = prompt, ANY_LENGTH, sample, frozenset[int](), lengths.output
            request = Request(f"{index}/{sample}", *asked, parent=parent)
            scheduler.add(request)
            parent = parent or request
    while plan := scheduler.schedule():
        yield scheduler, plan
        drawn = rng.integers(0, VOCAB_SIZE, len(plan.rows))
        scheduler.update(plan, drawn, np.zeros(len(plan.rows)))  # type: ignore[arg-type]  # arrays, as the engine's


def simulate_paged(page_size: int, trace: Sequence[Lengths], num_slots: int) -> MemoryUse:
    """Serves a trace from pages of this size, nothing shared."""
    tally, num_preemptions, num_computed = Tally(num_slots, len(trace)), 0, 0
    for scheduler, plan in serve(trace, num_slots=num_slots, page_size=page_size):
        num_running = scheduler.num_running
        num_preemptions = scheduler.num_preemptions
        num_computed += plan.num_tokens
        if not tally.is_saturated(num_running, scheduler.num_waiting):
            continue
        held = reserved = 0
        for request, start, num_tokens in plan.rows:
            num_held = start + num_tokens
            num_filled = request.num_prompt_tokens + request.max_tokens - 1  # when it ends
            held += num_held
            reserved += min(num_filled, len(request.page_ids) * page_size) - num_held
        tally.add(held, reserved, scheduler.pool.num_used * page_size, num_running)
    recomputed = num_computed / sum(lengths.num_slots for lengths in trace) - 1
    return tally.result("paged", page_size, num_preemptions, recomputed)


def simulate_parallel_sampling(n: int, spec: TraceSpec, num_tokens: int, seed: int, num_slots: int) -> Sharing:
    """Serves traces with `n` samples of each request, which share their prompt's pages. Twice: with memory for all that
    run, where the saving depends on nothing else, and with all memory full, over a trace shorter by the factor n.

    Prefix caching is on, as it is in the engine: a sample that was preempted may find its prompt's pages again. No two
    requests of the trace begin alike.
    """
    trace, short = draw_trace(spec, num_tokens, seed), draw_trace(spec, num_tokens // n, seed)
    saved, _ = _saving(n, trace, num_slots=(NUM_SHARING + 1) * MAX_LEN, max_num_seqs=NUM_SHARING)
    saved_full, num_preemptions = _saving(n, short, num_slots=num_slots)
    return Sharing("parallel sampling", n, saved, saved_full, num_preemptions)


def _saving(n: int, trace: Sequence[Lengths], num_slots: int, max_num_seqs: int | None = None) -> tuple[float, int]:
    """The mean share of pages that sharing saves, and the number of preemptions."""
    tally, saved, num_preemptions = Tally(num_slots, len(trace) * n), 0.0, 0
    steps = serve(trace, num_slots=num_slots, page_size=PAGE_SIZE, n=n, prefix_caching=True, max_num_seqs=max_num_seqs)
    for scheduler, _ in steps:
        num_preemptions = scheduler.num_preemptions
        if tally.is_saturated(scheduler.num_running, scheduler.num_waiting):
            num_unshared = sum(len(request.page_ids) for request in scheduler.running)
            saved += 1 - scheduler.pool.num_used / num_unshared
            tally.num_steps += 1
    tally.check()
    return saved / tally.num_steps, num_preemptions
