"""Owns the runs of the memory study through the real `Scheduler` and `PagePool`, with drawn numbers for tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import BatchPlan, Scheduler

from .trace import MAX_LEN, Lengths
from .usage import MemoryUse, Tally

VOCAB_SIZE = 32_000
PAGE_SIZE = 16  # the engine's own choice, where nothing else is said
ANY_LENGTH = SamplingParams(max_tokens=None, ignore_eos=True)


def make_scheduler(
    num_slots: int, page_size: int, max_num_seqs: int, prefix_caching: bool, max_num_batched_tokens: int | None = None
) -> Scheduler:
    """The engine's own, over as many pages as fit into `num_slots` slots. None: a step has room for all tokens."""
    return Scheduler(
        PagePool(num_slots // page_size, page_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or num_slots,
        max_model_len=MAX_LEN,
        prefix_caching=prefix_caching,
    )


def serve(
    trace: Sequence[Lengths],
    *,
    num_slots: int,
    page_size: int,
    n: int = 1,
    prefix_caching: bool = False,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> Iterator[tuple[Scheduler, BatchPlan]]:
    """Serves a trace whose requests all wait at the start, each as `n` samples of one prompt that end together.

    Yields each step while it runs: it is planned and has its pages, and the tokens that it draws are not known yet.
    Unless it is said otherwise, a step has room for any number of tokens, so whoever runs gains a token in each. A
    memory of `num_slots` slots is that of the whole pool, the null page included.
    """
    max_num_seqs = max_num_seqs or len(trace) * n
    scheduler = make_scheduler(num_slots, page_size, max_num_seqs, prefix_caching, max_num_batched_tokens)
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
