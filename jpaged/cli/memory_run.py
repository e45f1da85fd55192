"""Owns the measurements of `jpaged bench memory --run`: what the simulation claims, on an engine that runs a model."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from jpaged.bench import Work, run_round
from jpaged.cli.options import OpenedEngine
from jpaged.host.sampling_params import SamplingParams
from jpaged.simulation.beams import MEASURED, serve_beams
from jpaged.simulation.paged import PAGE_SIZE, serve
from jpaged.simulation.sharing import AMPLE, share_saved
from jpaged.simulation.trace import MAX_LEN, SHAREGPT, Lengths, draw_trace, mixed_trace

# Lengths are divided by these, so that all takes minutes on a CPU.
SCALE = 4  # those of ShareGPT, of short and long ones, and the longest that there may be
ENGINE: dict[str, Any] = {
    "page_size": PAGE_SIZE,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "max_model_len": MAX_LEN // SCALE,
    "prefix_caching": True,
}
NUM_REQUESTS = 48
NUM_SHARING = 12  # requests whose samples or beams share
NUM_MIXED = 96
NUM_TEXTS, TEXT_LEN = 16, 128  # that the model draws, to cut prompts from
N = 4  # samples, and beams


@dataclass(frozen=True)
class Use:
    """How a trace of requests filled the pages that they held."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    num_pages: int  # that can be held
    num_preemptions: int
    kv_utilization_mean: float  # tokens held to slots allocated, by `EngineStats`
    kv_utilization_min: float
    pages_mean: float  # held in a step
    pages_max: int
    reserved_mean: float  # pages that the requests which ran would have kept, at the greatest length for each


@dataclass(frozen=True)
class Shared:
    """The mean share of pages that sharing saved: measured, and simulated with the same lengths."""

    method: str
    n: int
    num_requests: int
    saved: float
    simulated: float
    pages_mean: float


@dataclass(frozen=True)
class Candidates:
    """Of the beams' candidates, what `Likelihoods` models: by how many nats the likeliest was ahead of the second, and
    how often another beam's likeliest was that of the best beam. Means over the steps."""

    lead: float
    same: float


@dataclass(frozen=True)
class Batched:
    """One way of batching the same requests. Rates are in tokens per second, of the tokens that were asked for."""

    how: str
    num_output_tokens: int
    num_steps: int
    throughput: float  # the median round's
    rounds: list[float]


@dataclass(frozen=True)
class Measured:
    memory: Use
    sharing: list[Shared]
    candidates: Candidates
    batching: list[Batched]  # continuous last
    ratios: dict[str, float]  # of the throughput of continuous batching to that of each static way

    num_rows: int
    seed: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Held(NamedTuple):
    """Pages in a step: that are held, that would be if nothing was shared; and the sequences that hold them."""

    used: int
    unshared: int
    num_running: int


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[list[Held]]:
    """Notes what is held in each step, when it has its pages and its tokens are not known yet, as the simulation
    does. No public counter tells what would be held without sharing."""
    held: list[Held] = []
    launch, scheduler = engine._launch, engine._scheduler

    def noting(plan: Any, *token_ids: Any) -> Any:
        if plan is not None:
            unshared = sum(len(request.page_ids) for request in scheduler.running)
            held.append(Held(scheduler.pool.num_used, unshared, scheduler.num_running))
        return launch(plan, *token_ids)

    engine._launch = noting
    try:
        yield held
    finally:
        del engine._launch


@contextlib.contextmanager
def watched_beams(engine: Any) -> Iterator[list[tuple[float, float]]]:
    """Notes `Candidates` of each step of a beam search."""
    seen: list[tuple[float, float]] = []
    scheduler = engine._scheduler
    branch = scheduler.branch

    def noting(beams: list[Any], branches: Any) -> Any:
        candidates = [beam.candidates for beam in beams if beam.candidates is not None]  # not of beams that begin now
        if len(candidates) > 1 and branches:
            ids, logprobs = (np.stack(of_beams) for of_beams in zip(*candidates))
            lead, same = np.mean(logprobs[:, 0] - logprobs[:, 1]), np.mean(ids[1:, 0] == ids[0, 0])
            seen.append((float(lead), float(same)))
        return branch(beams, branches)

    scheduler.branch = noting
    try:
        yield seen
    finally:
        del scheduler.branch


def measure_run(
    opened: OpenedEngine,
    beam_engine: Callable[[], Any],
    rounds: int,
    seed: int,
    tell: Callable[[str], None] = lambda what: None,
) -> Measured:
    """Measures everything. The first engine is warm; the one of `beam_engine` has the same weights and limits, and
    searches with N beams: its steps find candidates, which would slow down the others. `tell` hears what is done."""
    engine = opened.engine
    tell("drawing the texts of the prompts")
    texts = Texts(engine, seed)
    tell("the use of pages")
    memory = measure_use(engine, texts, seed)
    tell("sharing")
    trace = chats(NUM_SHARING, seed + 1)
    samples = [work(texts, lengths, temperature=1.0, n=N, seed=seed) for lengths in trace]
    limits = {name: ENGINE[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    simulated = serve(trace, num_slots=AMPLE, page_size=PAGE_SIZE, n=N, prefix_caching=True, **limits)
    with watched(engine) as held:
        drive(engine, samples)
    sharing = [shared("parallel sampling", held, (share_saved(scheduler) for scheduler, _ in simulated))]
    searches = [work(texts, lengths, temperature=0.0, num_beams=N) for lengths in trace]
    at_once, budget = ENGINE["max_num_seqs"] // N, ENGINE["max_num_batched_tokens"]
    beams = serve_beams(
        trace,
        width=N,
        likelihoods=MEASURED,
        num_slots=AMPLE,
        max_searches=at_once,
        max_num_batched_tokens=budget,
    )
    searching = beam_engine()
    with watched(searching) as held, watched_beams(searching) as seen:
        drive(searching, searches, at_once)
    sharing.append(shared("beam search", held, (share_saved(scheduler) for scheduler, _ in beams)))
    candidates = Candidates(*map(fmean, zip(*seen)))
    batching = measure_batching(engine, texts, rounds, seed, tell)
    continuous = batching[-1].throughput
    ratios = {one.how: continuous / one.throughput for one in batching[:-1]}
    return Measured(memory, sharing, candidates, batching, ratios, ENGINE["max_num_seqs"], seed)


class Texts:
    """Prompts in the model's own language: pieces of texts that it draws, of which no two begin at the same token."""

    def __init__(self, engine: Any, seed: int):
        rng = np.random.default_rng(seed)
        first = rng.integers(0, engine.model_config.vocab_size, NUM_TEXTS).tolist()
        draw = SamplingParams(temperature=1.0, max_tokens=TEXT_LEN, ignore_eos=True, seed=seed)
        self._tokens = [token_id for text in drive(engine, [Work([one], draw) for one in first]) for token_id in text]
        self._starts = deque(rng.permutation(len(self._tokens)).tolist())

    def prompt(self, length: int) -> list[int]:
        start = self._starts[0]
        self._starts.rotate(-1)
        return [self._tokens[at % len(self._tokens)] for at in range(start, start + length)]


def measure_use(engine: Any, texts: Texts, seed: int) -> Use:
    works = [work(texts, lengths, temperature=0.0) for lengths in chats(NUM_REQUESTS, seed)]
    with watched(engine) as held:
        found = run_round(engine, works, "throughput")
    pages = [one.used for one in held]
    assert found.kv_utilization_mean is not None and found.kv_utilization_min is not None
    return Use(
        found.num_requests,
        found.num_prompt_tokens,
        found.num_output_tokens,
        found.seconds,
        engine.num_pages,
        found.num_preemptions,
        found.kv_utilization_mean,
        found.kv_utilization_min,
        pages_mean=fmean(pages),
        pages_max=max(pages),
        reserved_mean=fmean(one.num_running for one in held) * -(-engine.max_model_len // PAGE_SIZE),
    )


def measure_batching(engine: Any, texts: Texts, rounds: int, seed: int, tell: Callable[[str], None]) -> list[Batched]:
    """Requests with short and with long outputs, three ways in turn: in static batches of one tensor, whose prompts are
    all padded to the longest and whose rows all go on until the longest output has ended; in static batches without
    padding, whose rows end one by one; and continuously."""
    rows = ENGINE["max_num_seqs"]
    works = [work(texts, lengths, temperature=0.0) for lengths in scaled(mixed_trace(NUM_MIXED, seed), SCALE)]
    wanted = sum(one.sampling.max_tokens or 0 for one in works)
    padded = []
    for start in range(0, len(works), rows):
        batch = works[start : start + rows]
        longest = max(len(one.prompt) for one in batch)
        most = max(batch, key=lambda one: one.sampling.max_tokens or 0).sampling
        padded += [Work(texts.prompt(longest), most) for _ in batch]
    ways = {"static, one tensor": (padded, rows), "static": (works, rows), "continuous": (works, None)}
    found: dict[str, list[tuple[float, int]]] = {how: [] for how in ways}
    for number in range(rounds):  # in turn, so that a slow minute of the machine does not fall on one of them
        for how, (requests, batch_size) in ways.items():
            tell(f"batching, round {number + 1} of {rounds}: {how}")
            one = run_round(engine, requests, "throughput", batch_size)
            found[how].append((wanted / one.seconds, one.num_steps))
    return [
        Batched(how, wanted, passes[0][1], median(rate for rate, _ in passes), [rate for rate, _ in passes])
        for how, passes in found.items()
    ]


def work(texts: Texts, lengths: Lengths, **sampling: Any) -> Work:
    """A request of these lengths, whatever the model would end it at."""
    return Work(texts.prompt(lengths.prompt), SamplingParams(max_tokens=lengths.output, ignore_eos=True, **sampling))


def chats(num_requests: int, seed: int) -> list[Lengths]:
    num_tokens = round(num_requests * (SHAREGPT.prompt_mean + SHAREGPT.output_mean))
    return scaled(draw_trace(SHAREGPT, num_tokens, seed), SCALE)


def scaled(trace: Iterable[Lengths], scale: int) -> list[Lengths]:
    return [Lengths(max(lengths.prompt // scale, 1), max(lengths.output // scale, 1)) for lengths in trace]


def drive(engine: Any, works: list[Work], at_once: int | None = None) -> list[list[int]]:
    """Serves requests, at most `at_once` at a time; returns the tokens of each one's first sequence."""
    engine.reset_prefix_cache()
    coming = deque(works)
    found: dict[str, list[int]] = {}
    while coming or engine.has_unfinished_requests():
        while coming and (at_once is None or sum(not tokens for tokens in found.values()) < at_once):
            found[engine.add_request(*coming.popleft())] = []
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output.outputs[0].token_ids
    return list(found.values())


def shared(method: str, held: list[Held], simulated: Iterable[float]) -> Shared:
    saved = fmean(1 - one.used / one.unshared for one in held)
    return Shared(method, N, NUM_SHARING, saved, fmean(simulated), fmean(one.used for one in held))
