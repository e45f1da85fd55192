"""Owns `jpaged bench serve`: a load on an OpenAI server, and what came back, as tables, JSON and pictures."""

from __future__ import annotations

import asyncio
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jpaged import __version__
from jpaged.cli.bench_memory import json_option, refuse
from jpaged.cli.options import spinner
from jpaged.cli.whole_file import WholeFile

if TYPE_CHECKING:
    from jpaged.bench_serve.calls import Arrivals
    from jpaged.bench_serve.measure import Plan
    from jpaged.bench_serve.summary import Summary

DRAWN: dict[str, Any] = {
    "num_requests": 100,
    "input_len": 128,
    "output_len": 128,
    "spread": 0.0,
}


def _json_object(_context: click.Context, _parameter: click.Parameter, value: str | None) -> dict[str, Any]:
    try:
        found = json.loads(value or "{}")
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f'{value!r} is no JSON object, such as {{"top_p": 0.9}}')
    return found


@click.command(short_help="Put a load on an OpenAI server, and measure it.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Of the server, without /v1.")
@click.option("--model", metavar="ID", help="[default: the server's first]")
@click.option(
    "--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True, help="Of /v1."
)
@click.option("--stream/--no-stream", default=True, show_default=True, help="Without it: no TTFT, TPOT and ITL.")
@click.option("--rate", type=float, help="Requests per second; inf: all at once [default: inf].")
@click.option(
    "--arrivals", type=click.Choice(["poisson", "fixed"]), default="poisson", show_default=True, help="With --rate."
)
@click.option("--concurrency", type=click.IntRange(min=1), help="So many requests under way, instead of --rate.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of arrivals and prompts.")
@click.option(
    "--workload", type=click.Path(exists=True, dir_okay=False), help="JSON file of `jpaged bench throughput`."
)
@click.option("--name", help="Of the workload in that file.")
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False), help="File of prompts; see above.")
@click.option("--num-requests", type=click.IntRange(min=1), help="To draw [default: 100]; of a file, the first ones.")
@click.option("--input-len", type=click.IntRange(min=1), help="Tokens (or words) of a drawn prompt [default: 128].")
@click.option("--output-len", type=click.IntRange(min=1), help="Tokens to ask for [default: 128]; not with --workload.")
@click.option("--length-spread", type=click.FloatRange(0, 1), help="Of drawn lengths: 0.5 is from half to 1.5 times.")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=None,
    help="Generate all tokens [default: as the workload says; yes for drawn prompts, no for --prompts].",
)
@click.option("--extra-body", metavar="JSON", callback=_json_object, help="More fields for each request.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="Seconds, a request."
)
@click.option(
    "--warm-up-requests", type=click.IntRange(min=0), default=0, show_default=True, help="Sent ahead at once."
)
@click.option("--goodput", "limits", metavar="LIMITS", help="Seconds to keep, such as ttft=0.5,tpot=0.05,e2e=10.")
@json_option
@click.option(
    "--plots", "folder", type=click.Path(file_okay=False, writable=True), help="Draw the figures into this folder."
)
def serve(
    url: str,
    api_key: str | None,
    timeout: float,
    limits: str | None,
    json_file: str | None,
    folder: str | None,
    **given: Any,
) -> None:
    """Put a load on any OpenAI server, and measure what comes back: latencies, throughput, goodput.

    With --rate, requests are sent at their times whatever has come back (open loop): how many are under way follows
    from how fast the server is. With --concurrency a request is sent when another has ended (closed loop), and a slow
    server is asked less.

    The prompts are drawn by lot, as token ids if the server has GET /tokenizer_info, else as short words; or they come
    from a workload file of `jpaged bench throughput`; or from a file of --prompts that has, on each line, a JSON string
    or a list of chat messages. temperature is 0 if --extra-body does not say otherwise.

    TTFT and latency begin when a request is sent, a new connection included. ITL is the time from each token to the
    next: tokens that come in one chunk have gaps of zero between them. Tokens are counted as the server's `usage` tells
    them; if that is not told with every chunk (`continuous_usage_stats`), ITL is from chunk to chunk.

    The client's own lateness is measured too, and told where it distorts the figures.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ValueError('bench serve needs aiohttp, which is missing here: pip install "jpaged[bench]"') from error
    from jpaged.bench_serve.client import Target
    from jpaged.bench_serve.measure import measure
    from jpaged.bench_serve.summary import parse_goodput, summarize

    target = Target.of(url, api_key, timeout)
    goodput = parse_goodput(limits)
    if goodput and not given["stream"] and goodput.keys() != {"e2e"}:
        raise ValueError("without --stream there is no ttft and no tpot: --goodput can limit e2e alone")
    plan = plan_of(**given)
    if folder:
        from jpaged.cli.memory_plots import check_matplotlib

        check_matplotlib()
        Path(folder).mkdir(parents=True, exist_ok=True)
    with WholeFile(json_file) as out:
        begun = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with spinner("Asking the server") as status:

            def tell(running: int, ended: int, of: int) -> None:
                if status:
                    status.update(f"{ended} of {of} requests have ended, {running} are under way")

            measured = asyncio.run(measure(target, plan, tell))
        summary = summarize(measured.run, goodput)
        print_tables(f"{target.url}, {measured.model}, {load_of(given)}", summary, limits)
        for warning in summary.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        settings = given | {"url": target.url, "model": measured.model, "timeout": timeout, "goodput_limits": goodput}
        head: dict[str, Any] = {"mode": "serve", "jpaged": __version__, "platform": platform.platform(), "begun": begun}
        head["settings"] = {key: "inf" if value == math.inf else value for key, value in settings.items()}
        requests = [request_of(one) for one in measured.run.answers] if json_file else []
        out.write(json.dumps(head | summary.as_dict() | {"requests": requests}, indent=2) + "\n")
    if folder:
        from jpaged.cli.serve_plots import draw

        names = draw(measured.run, Path(folder))
        print(f"{folder}: {', '.join(names)}, each as PNG and SVG", file=sys.stderr)


def plan_of(
    rate: float | None,
    arrivals: Arrivals,
    workload: str | None,
    name: str | None,
    prompts: str | None,
    num_requests: int | None,
    input_len: int | None,
    output_len: int | None,
    length_spread: float | None,
    ignore_eos: bool | None,
    **given: Any,
) -> Plan:
    """What the options ask for; the files are read here. Raises ValueError for those that exclude each other."""
    from jpaged.bench_serve.calls import arrival_times, as_bodies, drawn_calls, prompt_calls, workload_calls
    from jpaged.bench_serve.measure import Plan

    seed = given["seed"]
    if given["concurrency"] is None:
        rate = math.inf if rate is None else rate
        if not rate > 0:
            raise ValueError(f"--rate must be greater than 0, got {rate:g}")
        given["times"] = lambda count: arrival_times(count, rate, arrivals, seed)
    elif rate is not None:
        raise ValueError("--rate sends requests at their times, --concurrency when others have ended: leave one out")
    if name and not workload:
        raise ValueError("--name is of --workload, which is not given")
    lengths = {"--input-len": input_len, "--length-spread": length_spread}
    if workload or prompts:
        refuse("the requests come from a file", lengths)
    if workload:
        refuse("the requests come from --workload", {"--prompts": prompts, "--output-len": output_len})
        if name is None:
            raise ValueError("--workload needs --name: which workload of the file")
        read, says = workload_calls(workload, name)
    elif prompts:
        read, says = prompt_calls(prompts, output_len or DRAWN["output_len"]), False
    else:
        drawn = {
            "num_requests": num_requests,
            "input_len": input_len,
            "output_len": output_len,
            "spread": length_spread,
        }
        chosen = DRAWN | {key: value for key, value in drawn.items() if value is not None}
        return Plan(
            lambda vocab_size: drawn_calls(**chosen, seed=seed, vocab_size=vocab_size),
            needs_vocab_size=given["endpoint"] == "completions",
            ignore_eos=ignore_eos is not False,
            **given,
        )
    if num_requests is not None and num_requests > len(read):
        raise ValueError(f"--num-requests {num_requests}: the file has {len(read)} requests")
    read = read[:num_requests]
    as_bodies(read, given["endpoint"], {})  # what cannot be sent there is told before the server is asked
    return Plan(lambda _: read, ignore_eos=says if ignore_eos is None else ignore_eos, **given)


def load_of(given: dict[str, Any]) -> str:
    """The load in words."""
    if given["concurrency"]:
        return f"{given['concurrency']} requests at a time"
    if given["rate"] is None or math.isinf(given["rate"]):
        return "all requests at once"
    return f"{given['rate']:g} requests/s, {given['arrivals']}"


def request_of(answer: Any) -> dict[str, Any]:
    """One request as JSON."""
    names = ("due", "sent", "ttft", "tpot", "e2e_latency", "num_prompt_tokens", "num_output_tokens", "error")
    return {name: getattr(answer, name) for name in names}


def print_tables(title: str, found: Summary, limits: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for row in lines(found, limits):
        table.add_row(*row)
    times = Table()
    for head in ("ms", "mean", "p50", "p90", "p99", "max"):
        times.add_column(head, justify="left" if head == "ms" else "right", no_wrap=True)
    for label, name in {
        "TTFT": "ttft",
        "TPOT": "tpot",
        "ITL": "itl",
        "latency": "e2e_latency",
        "sent late by": "lag",
        "client late by": "client_delay",
    }.items():
        ranks = getattr(found, name)
        if ranks is not None:
            times.add_row(label, *(f"{ranks[rank] * 1000:.1f}" for rank in ("mean", "p50", "p90", "p99", "max")))
    console = Console(width=120)
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(times)


def lines(found: Summary, limits: str | None) -> list[tuple[str, str]]:
    rows = [
        ("requests", str(found.num_requests)),
        *((f"failed: {kind}", f"{count}  {found.error_details[kind][:60]}") for kind, count in found.errors.items()),
        ("prompt tokens", str(found.num_prompt_tokens)),
        ("output tokens", str(found.num_output_tokens)),
        ("seconds", f"{found.seconds:.2f}"),
        ("requests/s", f"{found.request_throughput:.2f}"),
        ("output tokens/s", f"{found.output_throughput:.1f}"),
        ("all tokens/s", f"{found.total_throughput:.1f}"),
    ]
    if found.goodput is not None:
        rows.append((f"goodput ({limits}) requests/s", f"{found.goodput:.2f} ({found.goodput_share:.0%})"))
    if found.tokens_per_chunk is not None:
        rows.append(("tokens a chunk", f"{found.tokens_per_chunk:.2f}"))
    return [*rows, ("requests at once, mean (most)", f"{found.concurrency_mean:.1f} ({found.concurrency_max})")]
