"""Owns `jpaged bench` and its modes that measure an engine: a workload's figures as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jpaged.cli.bench_memory import json_option, memory
from jpaged.cli.bench_sampler import sampler
from jpaged.cli.bench_serve import serve
from jpaged.cli.options import OpenedEngine, engine_options, open_engine

if TYPE_CHECKING:
    from jpaged.bench import Round


@click.group(short_help="Measure speed, of a server too, or simulate the use of memory.")
def bench() -> None:
    """Measure the speed of a workload on an engine or on a server, or simulate what paging does for KV memory."""


bench.add_command(memory)
bench.add_command(sampler)
bench.add_command(serve)


def workload_options(command: Callable) -> Callable:
    """Adds what the measuring modes ask for; `measure` takes it."""
    for option in (
        engine_options,
        json_option,
        click.option(
            "--rounds",
            default=1,
            show_default=True,
            type=click.IntRange(min=1),
            help="Passes over the workloads; the table shows the median one.",
        ),
        click.option("--name", "names", multiple=True, help="A workload in the file (repeatable) [default: all]."),
        click.option(
            "--workload", required=True, type=click.Path(exists=True, dir_okay=False), help="JSON file; see above."
        ),
    ):
        command = option(command)
    return command


THE_FILE = """
    The workload is a JSON file of named lists of requests, whose prompts are token ids:
    {"name": [{"prompt": [504, 3575], "max_tokens": 64}, ...], ...}. With the key "ignore_eos": true beside the
    names, every request generates all of its max_tokens.
"""


@bench.command(help=f"Measure the speed of a workload, all requests sent at once.\n{THE_FILE}")
@workload_options
def throughput(**options: Any) -> None:
    measure("throughput", **options)


@bench.command(help=f"Measure the speed of a workload, one request after another.\n{THE_FILE}")
@workload_options
def latency(**options: Any) -> None:
    measure("latency", **options)


def measure(mode: Any, workload: str, names: tuple[str, ...], rounds: int, json_file: str | None, **options: Any):
    from jpaged.bench import median_round, read_workloads, run_round

    workloads = read_workloads(workload, None if not names or "all" in names else list(names))
    if json_file:
        Path(json_file).touch()  # better known now than after the measurement
    model = options["model"]
    opened = open_engine(options, warm_up=True)
    measured: dict[str, list[Round]] = {name: [] for name in workloads}
    for _ in range(rounds):  # in turn, so that a slow minute of the machine does not fall on one workload
        for name, works in workloads.items():
            measured[name].append(run_round(opened.engine, works, mode))
    medians = {name: median_round(found) for name, found in measured.items()}
    print_table(mode, model, opened, medians)
    if json_file:
        Path(json_file).write_text(json.dumps(report(mode, model, opened, measured, medians), indent=2) + "\n")


def report(
    mode: str, model: str, opened: OpenedEngine, measured: dict[str, list[Round]], medians: dict[str, Round]
) -> dict[str, Any]:
    workloads = {
        name: {"median": medians[name].as_dict(), "rounds": [one.as_dict() for one in measured[name]]}
        for name in medians
    }
    return opened.describe(mode, model) | {"workloads": workloads}


def print_table(mode: str, model: str, opened: OpenedEngine, medians: dict[str, Round]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{mode}, {model}, {opened.dtype}",
        caption=f"loaded in {opened.load_seconds:.1f} s, compiled and warmed up in {opened.warm_up_seconds:.1f} s",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in medians:
        table.add_column(name, justify="right", no_wrap=True)
    columns = [lines(one) for one in medians.values()]
    for cells in zip(*columns):
        table.add_row(cells[0][0], *(value for _, value in cells))
    # Wide enough for every figure: a terminal that is narrower wraps the lines, where rich would leave figures out.
    Console(width=60 + 40 * len(medians)).print(table)


def lines(one: Round) -> list[tuple[str, str]]:
    """A round as (label, value) lines; the same labels for every round."""

    def milliseconds(found: dict[str, float] | None) -> str:
        return "-" if found is None else " / ".join(f"{found[p] * 1000:.1f}" for p in ("p50", "p90", "p99"))

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    return [
        ("requests", str(one.num_requests)),
        ("prompt tokens", str(one.num_prompt_tokens)),
        ("output tokens", str(one.num_output_tokens)),
        ("seconds", f"{one.seconds:.2f}"),
        ("output tokens/s", f"{one.output_throughput:.1f}"),
        ("decode tokens/s", "-" if one.decode_throughput is None else f"{one.decode_throughput:.1f}"),
        ("TTFT p50/p90/p99 ms", milliseconds(one.ttft)),
        ("TPOT p50/p90/p99 ms", milliseconds(one.tpot)),
        ("ITL p50/p90/p99 ms", milliseconds(one.itl)),
        ("latency p50/p90/p99 ms", milliseconds(one.e2e_latency)),
        ("steps (decode only)", f"{one.num_steps} ({one.num_decode_steps})"),
        ("padding waste", share(one.padding)),
        ("KV utilisation mean", share(one.kv_utilization_mean)),
        ("KV utilisation minimum", share(one.kv_utilization_min)),
        ("preemptions", str(one.num_preemptions)),
        ("compiles after warm-up", str(one.num_compiles)),
    ]
