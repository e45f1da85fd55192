"""Owns the pictures of `jpaged bench memory`, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.simulation.study import Study
    from jpaged.simulation.usage import MemoryUse

SHARES = {"utilization": "tokens", "reserved": "reserved", "internal": "internal", "external": "external"}
COLOURS = "#2a7f62", "#e0b04a", "#c8553d", "#b8bcc2"  # of the shares; the first ones of all else


def check_matplotlib() -> None:
    """Raises ValueError if there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("--plots needs matplotlib, which is missing here: pip install matplotlib") from error


def draw(study: Study, folder: Path) -> list[str]:
    """Writes each picture as PNG and as SVG, the same bytes for the same figures; returns the pictures' names."""
    import matplotlib

    pictures = {
        "memory_use": draw_memory_use,
        "running_requests": draw_running,
        "page_size": draw_page_sizes,
        "sharing": draw_sharing,
        "batching": draw_batching,
    }
    with matplotlib.rc_context({"svg.hashsalt": "jpaged", "axes.spines.top": False, "axes.spines.right": False}):
        for name, picture in pictures.items():
            figure = picture(study)
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return list(pictures)


def draw_memory_use(study: Study) -> Any:
    """Kwon et al. 2023, figure 2: where the slots went."""
    figure, panels = _panels(len(study.memory), "Share of the KV memory (%)")
    for axes, (trace, uses) in zip(panels, study.memory.items()):
        shown = _compared(uses, study.page_size)
        below = [0.0] * len(shown)
        for (field, label), colour in zip(SHARES.items(), COLOURS):
            heights = [100 * getattr(use, field) for use in shown]
            bars = axes.bar(_names(shown), heights, bottom=below, color=colour, label=label)
            texts = [f"{height:.1f}" if height >= 4 else "" for height in heights]
            axes.bar_label(bars, texts, label_type="center", fontsize=8)
            below = [sum(pair) for pair in zip(below, heights)]
        axes.set_title(trace)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_running(study: Study) -> Any:
    """Figure 13: how many requests run at once in the same memory."""
    figure, panels = _panels(len(study.memory), "Requests running at once")
    for axes, (trace, uses) in zip(panels, study.memory.items()):
        shown = _compared(uses, study.page_size)
        bars = axes.bar(_names(shown), [use.concurrent for use in shown], color=COLOURS[0])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
        axes.set_title(trace)
    return figure


def draw_page_sizes(study: Study) -> Any:
    """How the size of a page changes what of the memory holds tokens, and how many requests run."""
    figure, panels = _panels(2, "Share of the KV memory that holds tokens (%)")
    panels[1].set_ylabel("Requests running at once")
    for (trace, uses), colour in zip(study.memory.items(), COLOURS[::2]):
        paged = [use for use in uses if use.page_size is not None]
        sizes = [use.page_size for use in paged]
        panels[0].plot(sizes, [100 * use.utilization for use in paged], "o-", color=colour, label=trace)
        panels[1].plot(sizes, [use.concurrent for use in paged], "o-", color=colour)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, labels=map(str, sizes))
        axes.set_xlabel("Page size (tokens)")
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    return figure


def draw_sharing(study: Study) -> Any:
    """Figure 15: memory saved by sharing, among the samples of a prompt and among the beams of a search."""
    figure, panels = _panels(len(study.sharing), "Memory saved by sharing (%)")
    for axes, (trace, found) in zip(panels, study.sharing.items()):
        for method, colour in zip(dict.fromkeys(one.method for one in found), COLOURS):
            places = [place for place, one in enumerate(found) if one.method == method]
            heights = [100 * found[place].saved for place in places]
            bars = axes.bar(places, heights, color=colour, label=method)
            axes.bar_label(bars, fmt="%.1f", fontsize=8)
        axes.set_xticks(range(len(found)), labels=[f"n = {one.n}" for one in found])
        axes.set_title(trace)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_batching(study: Study) -> Any:
    """How many steps static and continuous batches take, side by side."""
    figure, (axes,) = _panels(1, "Steps")
    places = range(len(study.batching))
    for shift, label, colour in ((-0.2, "static", COLOURS[2]), (0.2, "continuous", COLOURS[0])):
        heights = [getattr(one, f"{label}_steps") for one in study.batching]
        bars = axes.bar([place + shift for place in places], heights, 0.4, color=colour, label=label)
        axes.bar_label(bars, fontsize=8)
    axes.set_xticks(places, labels=[f"{one.workload}\n{one.ratio:.1f}x" for one in study.batching])
    axes.legend(frameon=False)
    return figure


def _panels(count: int, label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.5 * count, 3.8), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    panels[0].set_ylabel(label)
    return figure, panels


def _compared(uses: list[MemoryUse], page_size: int) -> list[MemoryUse]:
    """The policies side by side, one page size for all."""
    return [use for use in uses if use.page_size in (None, page_size)]


def _names(uses: list[MemoryUse]) -> list[str]:
    return [use.policy if use.page_size is None else f"pages of {use.page_size}" for use in uses]
