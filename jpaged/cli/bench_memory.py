"""Owns `jpaged bench memory`: a simulation on the host or a measured run, as tables, JSON and pictures."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jpaged import __version__
from jpaged.cli.options import ENGINE as ENGINE_OPTIONS
from jpaged.cli.options import SMALL_MODEL, open_engine, spinner

if TYPE_CHECKING:
    from jpaged.cli.memory_run import Measured
    from jpaged.cli.options import OpenedEngine
    from jpaged.simulation.batching import Batching
    from jpaged.simulation.sharing import Sensitivity, Sharing
    from jpaged.simulation.study import Study
    from jpaged.simulation.usage import MemoryUse

json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, writable=True), help="Write all figures to this file."
)


@click.command(short_help="Simulate the use of KV memory; needs no device.")
@click.option("--tokens", "num_tokens", type=int, help="Of each trace, prompts and outputs [default: 200000].")
@click.option("--slots", "num_slots", type=int, help="Of the KV memory, a token each [default: 15728].")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the traces.")
@json_option
@click.option(
    "--plots", "folder", type=click.Path(file_okay=False, writable=True), help="Draw the figures into this folder."
)
@click.option("--run", is_flag=True, help="Measure with a model instead of simulating: see above.")
@click.option("--model", metavar="PATH|ID", help=f"For --run [default: {SMALL_MODEL}, fetched on first use].")
@click.option("--rounds", type=click.IntRange(min=1), help="Of each way of batching, for --run [default: 3].")
def memory(
    num_tokens: int | None,
    num_slots: int | None,
    seed: int,
    json_file: str | None,
    folder: str | None,
    run: bool,
    model: str | None,
    rounds: int | None,
) -> None:
    """Simulate what paging does for the memory of the KV cache, on traces as long as ShareGPT's and Alpaca's.

    How much of the memory holds tokens, and how many requests run at once, with pages of several sizes and with memory
    in one piece; how much the samples of one prompt and the beams of a search share; and how many steps continuous
    batching saves. The scheduler and the page pool are the engine's, only the tokens are drawn by lot. It takes a
    minute or two.

    With --run a model serves requests of a quarter of ShareGPT's lengths: how full their pages are, what samples and
    beams share, and how fast continuous batching is beside static batches. It takes some eight minutes on
    2 busy CPU cores, fewer with --rounds 1, and more the first time, when everything is compiled.
    """
    if run:
        refuse(
            "--run measures, it simulates nothing", {"--tokens": num_tokens, "--slots": num_slots, "--plots": folder}
        )
        measure(model or SMALL_MODEL, seed, 3 if rounds is None else rounds, json_file)
    else:
        refuse("the simulation runs no model without --run", {"--model": model, "--rounds": rounds})
        simulate(num_tokens, num_slots, seed, json_file, folder)


def refuse(why: str, options: dict[str, Any]) -> None:
    """Raises ValueError if one of these options was given."""
    for flag, value in options.items():
        if value is not None:
            raise ValueError(f"{why}: leave {flag} out")


def simulate(
    num_tokens: int | None, num_slots: int | None, seed: int, json_file: str | None, folder: str | None
) -> None:
    from jpaged.simulation.study import DEFAULT_SLOTS, DEFAULT_TOKENS, run_study

    # All this is better known now than after the simulation.
    if folder:
        from jpaged.cli.memory_plots import check_matplotlib

        check_matplotlib()
        Path(folder).mkdir(parents=True, exist_ok=True)
    if json_file:
        Path(json_file).touch()

    with spinner("Simulating") as status:
        study = run_study(
            DEFAULT_TOKENS if num_tokens is None else num_tokens,
            DEFAULT_SLOTS if num_slots is None else num_slots,
            seed,
            tell=lambda what: status.update(what) if status else None,
        )
    print_tables(study)
    if json_file:
        head = {"mode": "memory", "jpaged": __version__, "platform": platform.platform()}
        Path(json_file).write_text(json.dumps(head | study.as_dict(), indent=2) + "\n")
    if folder:
        from jpaged.cli.memory_plots import draw

        names = draw(study, Path(folder))
        print(f"{folder}: {', '.join(names)}, each as PNG and SVG", file=sys.stderr)


def measure(model: str, seed: int, rounds: int, json_file: str | None) -> None:
    from jpaged.cli.memory_run import ENGINE, N, measure_run

    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if json_file:
        Path(json_file).touch()
    unset = dict.fromkeys(f"engine_{name}" for name in ENGINE_OPTIONS)
    opened = open_engine({"model": model, "dtype": None, **unset}, warm_up=True, **ENGINE)

    def beam_engine() -> Any:
        from jpaged import Engine, EngineConfig, Params

        params = Params(opened.engine.weights, opened.engine.model_config, opened.tokenizer)
        return Engine(params, EngineConfig(**ENGINE, max_num_beams=N, warm_up=False))

    with spinner("Measuring") as status:
        found = measure_run(
            opened, beam_engine, rounds, seed, tell=lambda what: status.update(what) if status else None
        )
    print_run(model, opened, found)
    if json_file:
        head = opened.describe("memory run", model)
        Path(json_file).write_text(json.dumps(head | found.as_dict(), indent=2) + "\n")


def show(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]], caption: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for head in heads:
        words = head in ("memory", "trace", "method", "workload", "batching")
        table.add_column(head, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def print_tables(study: Study) -> None:
    heads: tuple[str, ...]
    heads = "memory", "tokens", "reserved", "internal", "external", "filled", "running", "preempted", "recomputed"
    for name, uses in study.memory.items():
        show(f"{name}: where the slots went, and requests running at once", heads, map(use_row, uses))
    heads = "trace", "method", "n", "saved", "saved, memory full"
    found = [sharing_row(name, one) for name, sharing in study.sharing.items() for one in sharing]
    show(f"memory saved by sharing, pages of {study.page_size}", heads, found)
    heads = "trace", "beams", "exponent", "alike", "saved"
    found = [sensitivity_row(name, one) for name, sensitivity in study.sensitivity.items() for one in sensitivity]
    show("what beams save if their candidates are otherwise likely, memory for all", heads, found)
    heads = "workload", "rows", "requests", "static steps (busy)", "continuous steps (busy)", "ratio"
    caption = f"{study.num_slots} slots, traces of {study.num_tokens} tokens, {study.seconds:.1f} s"
    show("static against continuous batching", heads, map(batching_row, study.batching), caption)


def use_row(use: MemoryUse) -> list[str]:
    shares = use.utilization, use.reserved, use.internal, use.external, use.filled
    policy = use.policy if use.page_size is None else f"pages of {use.page_size}"
    preempted = [str(use.num_preemptions), f"{use.recomputed:.0%}"] if use.page_size else ["-", "-"]
    return [policy, *(f"{share:.1%}" for share in shares), f"{use.concurrent:.1f}", *preempted]


def sharing_row(trace: str, one: Sharing) -> list[str]:
    return [trace, one.method, str(one.n), f"{one.saved:.1%}", f"{one.saved_full:.1%}"]


def sensitivity_row(trace: str, one: Sensitivity) -> list[str]:
    return [trace, str(one.n), f"{one.exponent}", f"{one.alike}", f"{one.saved:.1%}"]


def batching_row(one: Batching) -> list[str]:
    static = f"{one.static_steps} ({one.static_busy:.0%})"
    continuous = f"{one.continuous_steps} ({one.continuous_busy:.0%})"
    return [one.workload, str(one.num_rows), str(one.num_requests), static, continuous, f"{one.ratio:.2f}"]


def print_run(model: str, opened: OpenedEngine, found: Measured) -> None:
    use = found.memory
    heads: tuple[str, ...]
    heads = (
        "requests",
        "prompt / output tokens",
        "KV utilisation mean",
        "minimum",
        "pages held mean",
        "most",
        "reserved",
    )
    tokens = f"{use.num_prompt_tokens} / {use.num_output_tokens}"
    shares = f"{use.kv_utilization_mean:.1%}", f"{use.kv_utilization_min:.1%}"
    pages = f"{use.pages_mean:.1f}", f"{use.pages_max} of {use.num_pages}", f"{use.reserved_mean:.1f}"
    caption = "reserved: pages that the running requests would have kept, at the greatest length for each"
    title = f"{model}, {opened.dtype}, {found.num_rows} rows: the pages of a trace as ShareGPT's, scaled down"
    show(title, heads, [[str(use.num_requests), tokens, *shares, *pages]], caption)
    heads = "method", "n", "requests", "saved", "simulated"
    rows = [
        [one.method, str(one.n), str(one.num_requests), f"{one.saved:.1%}", f"{one.simulated:.1%}"]
        for one in found.sharing
    ]
    beams = found.candidates
    caption = f"a beam's likeliest token is {beams.lead:.2f} nats ahead, and in {beams.same:.0%} that of the best beam"
    show("memory saved by sharing", heads, rows, caption)
    heads = "batching", "steps", "output tokens/s", "of the rounds", "continuous is faster"
    rows = [
        [
            one.how,
            str(one.num_steps),
            f"{one.throughput:.1f}",
            " ".join(f"{rate:.1f}" for rate in one.rounds),
            f"{found.ratios[one.how]:.2f}x" if one.how in found.ratios else "",
        ]
        for one in found.batching
    ]
    caption = f"loaded in {opened.load_seconds:.1f} s, compiled and warmed up in {opened.warm_up_seconds:.1f} s"
    show("short and long requests, scaled down; medians of rounds that take turns", heads, rows, caption)
