"""Owns the check and the timing of the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu_check_parts import arithmetic
from gpu_check_parts.tasks import Built, Setup, Task, kernel_options, like, noise, public_kernel
from gpu_check_parts.timing import figures, num_sets
from jpaged.device.sampler import sample
from jpaged.host.batch import SamplingBatch
from jpaged.host.sampling_params import MAX_BANNED_IDS

VOCAB, NUM_SEQS = 151_936, 256
FEW = 1000  # a vocabulary small enough to count how often each id is drawn
DRAWS = 1 << 15


class Filters(NamedTuple):
    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Filters("greedy", 0.0)
ALL = Filters("all filters", 0.8, 50, 0.9, 0.02)
CHECKED = [GREEDY, Filters("no filter", 1.3), Filters("top_k", 1.0, top_k=40), Filters("top_p", 0.7, top_p=0.8)]
CHECKED += [Filters("min_p", 1.5, min_p=0.1), ALL]
# Plain text has some hundred likely ids, a hot or a random model may have all: top_p alone has to look at each.
FILTERED = CHECKED[2:]
HOW = ("triton", "xla")
TIMED = [GREEDY, Filters("no filter", 1.0), ALL, Filters("top_p", 1.0, top_p=0.95)]


def tasks() -> list[Task]:
    return [
        *(
            _keep_task("correctness", f"keep_top: {one.name}", one, 24, how, check_keep)
            for how in HOW
            for one in FILTERED
        ),
        *(_task("correctness", f"sample: {one.name}", one, (24, VOCAB), run_check) for one in CHECKED),
        *(
            _task("correctness", f"sample: {one.name}, drawn often", one, (DRAWS, FEW), run_draws)
            for one in CHECKED[1:]
        ),
        *(_task("sampling", time_name("sample", one), one, (NUM_SEQS, VOCAB), run_timing) for one in TIMED),
        *(
            _keep_task("sampling", time_name("keep_top", one), one, NUM_SEQS, how, time_keep)
            for how in HOW
            for one in TIMED[2:]
        ),
    ]


def time_name(what: str, filters: Filters) -> str:
    return f"{what} {NUM_SEQS} × {VOCAB}, {filters.name}"


def _task(part: str, name: str, filters: Filters, shape: tuple[int, int], run: Any) -> Task:
    return Task(part, "sampling", (name,), "best", partial(run, name, filters, shape), partial(_build, shape))


def _keep_task(part: str, name: str, filters: Filters, num_seqs: int, how: str, run: Any) -> Task:
    run = partial(run, name, filters, (num_seqs, VOCAB))
    return Task(part, "sampling", (name,), how, run, partial(_build_keep, (num_seqs, VOCAB), how))


def _build(shape: tuple[int, int], setup: Setup) -> Built:
    num_seqs, vocab = _shape(shape, setup)
    batch = jax.tree.map(lambda x: like(x.shape, x.dtype), _batch(GREEDY, num_seqs, vocab, setup))
    shapes = (like((num_seqs, vocab), np.float32), batch, like((num_seqs,), np.int32))
    return Built(("sample", num_seqs, vocab), jax.jit(sample), shapes)


def _build_keep(shape: tuple[int, int], how: str, setup: Setup) -> Built:
    num_seqs, vocab = _shape(shape, setup)
    options = kernel_options(setup, "keep_top", how)
    arrays = _filters_of(GREEDY, num_seqs)
    shapes = (like((num_seqs, vocab), np.float32), *(like(x.shape, x.dtype) for x in arrays))
    function = jax.jit(partial(public_kernel("keep_top"), **options))
    return Built(("keep_top", *options.items(), num_seqs, vocab), function, shapes)


def _filters_of(filters: Filters, num_seqs: int) -> list[np.ndarray]:
    """Temperature, top_k, top_p and min_p of each row."""
    types = (np.float32, np.int32, np.float32, np.float32)
    return [np.full(num_seqs, value, kind) for value, kind in zip(filters[1:], types)]


def _shape(shape: tuple[int, int], setup: Setup) -> tuple[int, int]:
    return (min(shape[0], 2048), 300) if setup.rehearse else shape


def _batch(filters: Filters, num_seqs: int, vocab: int, setup: Setup) -> SamplingBatch:
    return SamplingBatch(
        *_filters_of(filters, num_seqs),
        seed=setup.rng("seeds").integers(0, 1 << 32, (num_seqs, 2), np.uint32),
        banned_ids=np.full((num_seqs, MAX_BANNED_IDS), vocab, np.int32),
    )


def distribution(logits: np.ndarray, filters: Filters) -> tuple[np.ndarray, np.ndarray]:
    """The probability of every id, and which ids are so near a border of the filters that rounding decides."""
    logits = logits.astype(np.float64)
    if filters.temperature == 0:
        return (logits == logits.max()) / (logits == logits.max()).sum(), np.zeros(len(logits), bool)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits.max()) / filters.temperature)
    kept = np.arange(len(logits)) < (filters.top_k or len(logits))
    before = np.cumsum(weights * kept) - weights * kept
    reached = before / (weights * kept).sum()
    kept &= (reached < filters.top_p) | (filters.top_p >= 1)
    near = (np.abs(reached - filters.top_p) < 1e-5) & (filters.top_p < 1)
    kept &= weights >= filters.min_p
    near |= np.abs(weights - filters.min_p) < 1e-5 * filters.min_p
    probability, border = np.zeros(len(logits)), np.zeros(len(logits), bool)
    probability[order] = weights * kept / (weights * kept).sum()
    border[order] = near
    return probability, border


def check_keep(name: str, filters: Filters, shape: Any, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    """The ids that pass are those of the definition: with many equal logits, and with ids that are banned."""
    num_seqs, vocab = _shape(shape, setup)
    rng = setup.rng(name)
    logits = (rng.standard_normal((num_seqs, vocab)) * rng.uniform(1, 6, (num_seqs, 1))).astype(np.float32)
    logits[::2] = logits[::2].round(1)
    logits[::3, :7] = -np.inf
    kept = np.asarray(program(logits, *_filters_of(filters, num_seqs)))
    for row in range(num_seqs):
        probability, border = distribution(logits[row], filters)
        wrong = np.flatnonzero((kept[row] != (probability > 0)) & ~border)
        assert not len(wrong), f"row {row}: {len(wrong)} ids are wrongly kept or dropped, the first is {wrong[0]}"
    yield {"name": name, "error": 0.0, "bound": 0.0}


def run_check(name: str, filters: Filters, shape: Any, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    """At the full vocabulary: every drawn id may be drawn, and its log-probability is right."""
    num_seqs, vocab = _shape(shape, setup)
    rng = setup.rng(name)
    logits = (rng.standard_normal((num_seqs, vocab)) * rng.uniform(1, 6, (num_seqs, 1))).astype(np.float32)
    batch = _batch(filters, num_seqs, vocab, setup)
    # The likeliest ids of every third row are banned.
    batch.banned_ids[::3, :5] = np.argsort(-logits[::3], axis=1)[:, :5]
    sampled = program(logits, batch, np.arange(num_seqs, dtype=np.int32))
    token_ids, logprobs = np.asarray(sampled.token_ids), np.asarray(sampled.logprobs)
    worst = 0.0
    for row in range(num_seqs):
        wide = logits[row].astype(np.float64)
        allowed = wide.copy()
        allowed[batch.banned_ids[row][batch.banned_ids[row] < vocab]] = -np.inf
        probability, border = distribution(allowed, filters)
        token_id = token_ids[row]
        assert probability[token_id] > 0 or border[token_id], f"row {row} drew {token_id}, which the filters drop"
        right = wide[token_id] - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        worst = max(worst, abs(float(logprobs[row]) - right))
    bound = 2e-4
    assert worst <= bound, f"a log-probability is off by {worst:.2g}, allowed is {bound:.2g}"
    yield {"name": name, "error": worst, "bound": bound}


def run_draws(name: str, filters: Filters, shape: Any, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    """One distribution, many seeds: how often each id is drawn is no more than chance away from its probability."""
    num_seqs, vocab = _shape(shape, setup)
    logits = (setup.rng(name).standard_normal(vocab) * 1.5).astype(np.float32)
    batch = _batch(filters, num_seqs, vocab, setup)
    sampled = program(np.tile(logits, (num_seqs, 1)), batch, np.arange(num_seqs, dtype=np.int32))
    token_ids = np.asarray(sampled.token_ids)
    counts = np.bincount(token_ids, minlength=vocab)
    probability, border = distribution(logits, filters)
    assert not counts[(probability == 0) & ~border].any(), "an id was drawn that the filters drop"
    expected = num_seqs * probability
    often = (expected >= 8) & ~border
    counts, expected = (
        np.append(counts[often], counts[~often].sum()),
        np.append(expected[often], expected[~often].sum()),
    )
    counts, expected = counts[expected >= 8], expected[expected >= 8]
    freedom = max(len(counts) - 1, 1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Wilson and Hilferty's normal approximation of chi-squared, at 5 deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic <= limit, f"chi-squared is {statistic:.0f} over {freedom} degrees of freedom: not by chance"
    yield {"name": name, "error": statistic / freedom, "bound": limit / freedom}


def run_timing(name: str, filters: Filters, shape: Any, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    num_seqs, vocab = _shape(shape, setup)
    batch = jax.device_put(_batch(filters, num_seqs, vocab, setup))

    # A call a program: where positions mean nothing, two in one would not depend on each other, and could overlap.
    def call(token_ids: jax.Array, logits: jax.Array) -> jax.Array:
        return program(logits, batch, token_ids).token_ids

    positions = jnp.arange(num_seqs, dtype=jnp.int32)
    row, _ = figures(setup, call, positions, _logit_sets(num_seqs, vocab, setup))
    yield {"name": name, "bytes": arithmetic.sample_bytes(NUM_SEQS, VOCAB), **row}


def time_keep(name: str, filters: Filters, shape: Any, setup: Setup, program: Any) -> Iterator[dict[str, Any]]:
    num_seqs, vocab = _shape(shape, setup)
    arrays = jax.device_put(_filters_of(filters, num_seqs))
    # One result is enough to wait for: calls of one program follow each other.
    row, _ = figures(setup, lambda _, logits: program(logits, *arrays), None, _logit_sets(num_seqs, vocab, setup))
    yield {"name": name, "bytes": arithmetic.sample_bytes(NUM_SEQS, VOCAB), **row}


def _logit_sets(num_seqs: int, vocab: int, setup: Setup) -> list[tuple[jax.Array]]:
    """Logits for calls that take turns, spread over several units as a model's are."""
    sets = 1 if setup.rehearse else num_sets(arithmetic.sample_bytes(num_seqs, vocab))
    return setup.keep(
        "logits", lambda: [(3 * noise(setup, f"logits{i}", (num_seqs, vocab), "f32"),) for i in range(sets)]
    )
