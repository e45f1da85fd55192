"""Owns the measure of sharing in the memory study: what the samples of a prompt, and the beams of a search, save."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jpaged.host.scheduler import Scheduler

from .beams import MEASURED, Likelihoods, serve_beams
from .paged import PAGE_SIZE, serve
from .trace import MAX_LEN, Lengths, TraceSpec, draw_trace
from .usage import Tally

NUM_SHARING = 48  # sequences that run while sharing is measured with ample memory
PART = 4  # of the tokens of a trace, those that beam searches serve are one part
# The beam searches whose candidates are varied: how many beams they have.
VARIED: dict[Likelihoods, tuple[int, ...]] = {
    MEASURED: (2, 4, 6),
    MEASURED._replace(exponent=2.0): (4,),
    MEASURED._replace(exponent=5.0): (4,),
    MEASURED._replace(alike=0.0): (2, 4, 6),
    MEASURED._replace(alike=0.8): (2, 4, 6),
    MEASURED._replace(alike=1.0): (2, 4, 6),
}
AMPLE = (NUM_SHARING + 1) * MAX_LEN  # slots for all of them


@dataclass(frozen=True)
class Sharing:
    """How much memory sharing saved: 1 - pages in use / pages that the same requests would hold if each had its own,
    the mean over the steps of the saturated phase."""

    method: Literal["parallel sampling", "beam search"]
    n: int  # sequences of a request
    saved: float  # with memory for all that run
    saved_full: float  # where memory is short, and preempted samples begin again
    num_preemptions: int  # of the latter


@dataclass(frozen=True)
class Sensitivity:
    """What beam searches save, with memory for all, if candidates are as `Likelihoods` says."""

    exponent: float
    alike: float
    n: int
    saved: float


def simulate_parallel_sampling(n: int, spec: TraceSpec, num_tokens: int, seed: int, num_slots: int) -> Sharing:
    """Serves traces with `n` samples of each request, which share their prompt's pages. Twice: with memory for all that
    run, where the saving depends on nothing else, and with all memory full, over a trace shorter by the factor n.

    Prefix caching is on, as it is in the engine: a sample that was preempted may find its prompt's pages again. No two
    requests of the trace begin alike.
    """

    def saving(trace: list[Lengths], num_slots: int, max_num_seqs: int | None = None) -> tuple[float, int]:
        steps = serve(
            trace, num_slots=num_slots, page_size=PAGE_SIZE, n=n, prefix_caching=True, max_num_seqs=max_num_seqs
        )
        return _mean_saving(((scheduler, scheduler.num_waiting) for scheduler, _ in steps), len(trace) * n)

    saved, _ = saving(draw_trace(spec, num_tokens, seed), AMPLE, NUM_SHARING)
    saved_full, num_preemptions = saving(draw_trace(spec, num_tokens // n, seed), num_slots)
    return Sharing("parallel sampling", n, saved, saved_full, num_preemptions)


def simulate_beam_search(width: int, spec: TraceSpec, num_tokens: int, seed: int, num_slots: int) -> Sharing:
    """As `simulate_parallel_sampling`, each request a beam search, and both times over a part of the trace. With
    memory for all, as many searches run at once as have NUM_SHARING beams together."""
    trace = draw_trace(spec, num_tokens // PART, seed)
    full = serve_beams(trace, width=width, likelihoods=MEASURED, num_slots=num_slots)
    saved_full, num_preemptions = _mean_saving(full, len(trace) * width)
    saved = saved_by_beams(width, trace, MEASURED)
    return Sharing("beam search", width, saved, saved_full, num_preemptions)


def saved_by_beams(width: int, trace: list[Lengths], likelihoods: Likelihoods, num_sharing: int | None = None) -> float:
    """What beam searches save with memory for all that run, as many at once as have `num_sharing` beams together."""
    at_once = (num_sharing or NUM_SHARING) // width
    steps = serve_beams(trace, width=width, likelihoods=likelihoods, num_slots=AMPLE, max_searches=at_once)
    return _mean_saving(steps, len(trace) * width)[0]


def simulate_sensitivity(spec: TraceSpec, num_tokens: int, seed: int) -> list[Sensitivity]:
    """What beams would save if their candidates were otherwise likely than measured. Half of what runs elsewhere."""
    trace = draw_trace(spec, num_tokens // PART // 2, seed)
    return [
        Sensitivity(*likelihoods, width, saved_by_beams(width, trace, likelihoods, NUM_SHARING // 2))
        for likelihoods, widths in VARIED.items()
        for width in widths
    ]


def share_saved(scheduler: Scheduler) -> float:
    """The share of the pages that the running requests would hold without sharing which sharing saves."""
    return 1 - scheduler.pool.num_used / sum(len(request.page_ids) for request in scheduler.running)


def _mean_saving(steps: Iterable[tuple[Scheduler, int]], num_sequences: int) -> tuple[float, int]:
    """Of steps and how many sequences wait in each: the mean share of pages saved, and the number of preemptions."""
    tally, saved, num_preemptions = Tally(0, num_sequences), 0.0, 0
    for scheduler, num_waiting in steps:
        num_preemptions = scheduler.num_preemptions
        if tally.is_saturated(scheduler.num_running, num_waiting):
            saved += share_saved(scheduler)
            tally.num_steps += 1
    tally.check()
    return saved / tally.num_steps, num_preemptions
