"""Owns `jpaged bench sampler`: what drawing costs of a decode step, for each thing that can be asked of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from jpaged.cli.bench_memory import json_option
from jpaged.cli.options import OpenedEngine, engine_options, open_engine

PROMPT_LEN = 8
NUM_STEPS = 8  # of each kind in a round: few, as a machine's pace changes from minute to minute


@dataclass(frozen=True)
class SamplerCost:
    """Decode steps whose rows all ask for the same. `share`: of the sampler in the step, the time of greedy draws
    measured alone and what the step takes more than a greedy one of the same round, to the time of the step; the median
    round's."""

    kind: str
    num_rows: int
    vocab_size: int
    seconds: float  # a step, median
    share: float
    rounds: list[float]


@click.command(short_help="Measure the sampler's share of a step.")
@click.option("--rows", default=64, show_default=True, type=click.IntRange(min=1), help="Rows of the steps.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=1), help="Passes over all kinds.")
@json_option
@engine_options
def sampler(rows: int, rounds: int, json_file: str | None, **options: Any) -> None:
    """Measure the sampler's share of a decode step: greedy draws, all filters, penalties, the five likeliest tokens,
    and a grammar (where the model has a tokenizer). The kinds take turns, so that a slow minute falls on none of them.
    """
    if json_file:
        Path(json_file).touch()  # better known now than after the measurement
    model = options["model"]
    longest = PROMPT_LEN + NUM_STEPS + 8
    opened = open_engine(options, warm_up=True, max_num_seqs=rows, max_model_len=longest, prefix_caching=False)
    costs = measure_sampler(opened.engine, rows, rounds)
    print_costs(model, opened, costs)
    if json_file:
        report = opened.describe("sampler", model) | {"costs": [asdict(cost) for cost in costs]}
        Path(json_file).write_text(json.dumps(report, indent=2) + "\n")


def measure_sampler(engine: Any, rows: int, rounds: int) -> list[SamplerCost]:
    """All kinds in turn. The engine is warm, idle, and has room for `rows` requests at once."""
    from jpaged.host.sampling_params import SamplingParams
    from jpaged.host.structured import Structured

    asked: dict[str, dict[str, Any]] = {
        "greedy": {},
        "filters": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "seed": 1},
        "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
        "logprobs 5": {"logprobs": 5},
    }
    if engine.tokenizer is not None:
        asked["grammar"] = {"structured": Structured(regex="[a-z ,.]{4000,}")}
    greedy = {"temperature": 0.0, "max_tokens": NUM_STEPS}
    kinds = {
        kind: SamplingParams(ignore_eos=kind != "grammar", **(greedy | options)) for kind, options in asked.items()
    }
    vocab = engine.model_config.vocab_size
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    alone = []
    draw = greedy_draw(rows, vocab)
    for sampling in kinds.values():  # once for all that the first time takes longer
        decode_seconds(engine, rows, sampling, vocab)
    for _ in range(rounds):
        for kind, sampling in kinds.items():
            found[kind].append(decode_seconds(engine, rows, sampling, vocab))
        alone.append(draw())
    costs = []
    for kind, seconds in found.items():
        shares = [(draws + took - plain) / took for draws, took, plain in zip(alone, seconds, found["greedy"])]
        costs.append(SamplerCost(kind, rows, vocab, median(seconds), median(shares), seconds))
    return costs


def decode_seconds(engine: Any, rows: int, sampling: Any, vocab: int) -> float:
    """The median time of a decode step of so many rows."""
    for row in range(rows):
        engine.add_request([1 + (7 * row + 3 * place) % (vocab - 1) for place in range(PROMPT_LEN)], sampling)
    seconds = []
    while engine.has_unfinished_requests():
        num_decode_steps, began = engine.stats.num_decode_steps, time.perf_counter()
        engine.step()
        if engine.stats.num_decode_steps > num_decode_steps:
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def greedy_draw(rows: int, vocab: int) -> Callable[[], float]:
    """A function that measures a greedy draw alone, in seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jpaged.device.sampler import sample
    from jpaged.host.batch import SamplingBatch
    from jpaged.host.sampling_params import MAX_BANNED_IDS

    zeros = np.zeros(rows, np.float32)
    banned = np.full((rows, MAX_BANNED_IDS), vocab, np.int32)
    ids = np.zeros(rows, np.int32)
    asked = SamplingBatch(zeros, ids, np.ones(rows, np.float32), zeros, np.zeros((rows, 2), np.uint32), banned)
    # The logits are given away, as in a step, and come back as the scores.
    program = jax.jit(lambda logits: sample(logits, asked, jnp.asarray(ids)), donate_argnums=0)
    logits = jax.random.normal(jax.random.key(0), (rows, vocab), jnp.float32)
    state = [jax.block_until_ready(program(logits)).scores.allowed]

    def measure() -> float:
        seconds = []
        for _ in range(NUM_STEPS):
            began = time.perf_counter()
            sampled = jax.block_until_ready(program(state[0]))
            seconds.append(time.perf_counter() - began)
            state[0] = sampled.scores.allowed
        return median(seconds)

    return measure


def print_costs(model: str, opened: OpenedEngine, costs: list[SamplerCost]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = costs[0]
    table = Table(
        title=f"decode steps of {first.num_rows} rows, {model}, {opened.dtype}, vocabulary {first.vocab_size:,}",
        title_justify="left",
    )
    for name in ("asked for", "ms a step", "sampler's share", "output tokens/s"):
        table.add_column(name, justify="left" if name == "asked for" else "right", no_wrap=True)
    for cost in costs:
        rate = cost.num_rows / cost.seconds
        table.add_row(cost.kind, f"{cost.seconds * 1000:.1f}", f"{cost.share:.1%}", f"{rate:.0f}")
    Console(width=100).print(table)
