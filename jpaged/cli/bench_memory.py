"""Owns `jpaged bench memory`: a simulation on the host, as tables, JSON and pictures."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jpaged import __version__
from jpaged.cli.options import spinner

if TYPE_CHECKING:
    from jpaged.simulation.batching import Batching
    from jpaged.simulation.paged import Sharing
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
def memory(num_tokens: int | None, num_slots: int | None, seed: int, json_file: str | None, folder: str | None) -> None:
    """Simulate what paging does for the memory of the KV cache, on traces as long as ShareGPT's and Alpaca's.

    How much of the memory holds tokens, and how many requests run at once, with pages of several sizes and with memory
    in one piece; how much the samples of one prompt share; and how many steps continuous batching saves. The scheduler
    and the page pool are the engine's, only the tokens are drawn by lot. It takes about half a minute.
    """
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


def print_tables(study: Study) -> None:
    from rich.console import Console
    from rich.table import Table

    def show(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]], caption: str | None = None) -> None:
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        for head in heads:
            words = head in ("memory", "trace", "method", "workload")
            table.add_column(head, justify="left" if words else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(width=120).print(table)

    heads: tuple[str, ...]
    heads = "memory", "tokens", "reserved", "internal", "external", "filled", "running", "preempted", "recomputed"
    for name, uses in study.memory.items():
        show(f"{name}: where the slots went, and requests running at once", heads, map(use_row, uses))
    heads = "trace", "method", "n", "saved", "saved, memory full"
    found = [sharing_row(name, one) for name, sharing in study.sharing.items() for one in sharing]
    show(f"memory saved by sharing, pages of {study.page_size}", heads, found)
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


def batching_row(one: Batching) -> list[str]:
    static = f"{one.static_steps} ({one.static_busy:.0%})"
    continuous = f"{one.continuous_steps} ({one.continuous_busy:.0%})"
    return [one.workload, str(one.num_rows), str(one.num_requests), static, continuous, f"{one.ratio:.2f}"]
