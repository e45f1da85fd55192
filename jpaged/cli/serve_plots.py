"""Owns the pictures of `jpaged bench serve`, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpaged.bench_serve.load import Run
from jpaged.bench_serve.summary import running_requests, token_rates
from jpaged.cli.memory_plots import COLOURS

TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e_latency": "Latency"}


def draw(run: Run, folder: Path) -> list[str]:
    """Writes each picture as PNG and as SVG, the same bytes for the same figures; returns the pictures' names."""
    import matplotlib

    pictures = {"latencies": draw_latencies, "timeline": draw_timeline}
    with matplotlib.rc_context({"svg.hashsalt": "jpaged", "axes.spines.top": False, "axes.spines.right": False}):
        for name, picture in pictures.items():
            figure = picture(run)
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return list(pictures)


def draw_latencies(run: Run) -> Any:
    """What share of the requests (ITL: of the gaps) took at most how long."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(TIMES), 3.6), layout="constrained")
    panels = figure.subplots(1, len(TIMES), squeeze=False, sharey=True)[0]
    panels[0].set_ylabel("Share (%)")
    for axes, (name, label) in zip(panels, TIMES.items()):
        values = _values(run, name)
        axes.set_title(f"{label}, {len(values)} values")
        axes.set_xlabel("ms")
        if values:
            axes.ecdf([1000 * value for value in values], color=COLOURS[0])
            axes.set_xlim(left=0)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1], labels=["0", "25", "50", "75", "90", "100"])
        axes.grid(alpha=0.3)
    return figure


def draw_timeline(run: Run) -> Any:
    """How many requests were under way, and how many tokens came, from second to second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [(0.0, 0), *running_requests(run.answers)]
    above.step([moment for moment, _ in steps], [count for _, count in steps], where="post", color=COLOURS[0])
    above.set_ylabel("Requests under way")
    rates = token_rates(run.answers, run.seconds)
    below.step([moment for moment, _ in rates], [rate for _, rate in rates], where="mid", color=COLOURS[2])
    below.set_ylabel("Output tokens/s")
    below.set_xlabel("Seconds")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    return figure


def _values(run: Run, name: str) -> Sequence[float]:
    whole = [one for one in run.answers if one.error is None]
    found = [getattr(one, name) for one in whole]
    return [gap for gaps in found for gap in gaps] if name == "itl" else [one for one in found if one is not None]
