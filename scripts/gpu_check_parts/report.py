"""Owns the results: JSON with every row, and a Markdown page for people."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
COPY, MATMUL = "copy", "bfloat16 product"
BAD = ("failed",)
OWN = ("mosaic_gpu", "triton", "best", "xla")


def ceilings(rows: Iterable[Row]) -> dict[str, float]:
    """Bytes a second of the best copy, FLOPs a second of the bfloat16 product, as far as they were measured."""
    found: dict[str, float] = {}
    for row in rows:
        if row["part"] == "ceilings" and row.get("seconds") and row["name"] in (COPY, MATMUL):
            rate = (row.get("bytes") or row["flops"]) / row["seconds"]
            found[row["name"]] = max(rate, found.get(row["name"], 0))
    return found


def share(row: Row, tops: dict[str, float]) -> float | None:
    """Of the copy's bandwidth or of the product's FLOPs, whichever the row has; None where nothing was measured."""
    if not row.get("seconds"):
        return None
    if "flops" in row:
        return row["flops"] / row["seconds"] / tops[MATMUL] if MATMUL in tops else None
    if "bytes" in row:
        return row["bytes"] / row["seconds"] / tops[COPY] if COPY in tops else None
    return None


class Target(NamedTuple):
    """`names`: the rows it is about, of which the best of our implementations counts."""

    what: str
    names: tuple[str, ...]
    least: float | None = None  # share of the ceiling
    most_of: tuple[str, float] | None = None  # or at most such a share of another row's time


TARGETS = [
    *(
        Target(f"decode attention, {n} × {c}: at least 85 % of the copy's bandwidth", (f"decode {n} × {c}",), 0.85)
        for n, c in ((64, 4096), (64, 32768), (256, 4096), (256, 32768))
    ),
    Target("prefill of 8,192 tokens: at least 55 % of the bfloat16 product", ("prefill 8192",), 0.55),
    Target("8B, 64 running: a decode step at least 75 % of its roofline", ("8B: decode, 64 running",), 0.75),
    *(
        Target(
            f"sampling 256 × 151936, {how}: at most 3 % of a decode step (8B, 256 running)",
            (f"sample 256 × 151936, {how}",),
            most_of=("8B: decode, 256 running", 0.03),
        )
        for how in ("greedy", "all filters")
    ),
]


def reached(target: Target, rows: list[Row]) -> tuple[float | None, bool | None]:
    """The best value and whether it is good enough; None where it was not measured."""
    tops = ceilings(rows)
    mine = [row for row in rows if row["name"] in target.names and row["implementation"] in OWN and row.get("seconds")]
    if target.most_of is None:
        shares = [value for row in mine if (value := share(row, tops)) is not None]
        best = max(shares, default=None)
        return best, None if best is None else best >= target.least
    name, most = target.most_of
    whole = [row["seconds"] for row in rows if row["name"] == name and row.get("seconds")]
    if not mine or not whole:
        return None, None
    best = min(row["seconds"] for row in mine) / whole[0]
    return best, best <= most


def write(folder: Path, head: dict[str, Any], rows: list[Row]) -> None:
    """Both files anew: a reader never sees half of one."""
    tops = ceilings(rows)
    content = {
        "head": head,
        "ceilings": tops,
        "targets": [dict(zip(("target", "value", "reached"), (t.what, *reached(t, rows)))) for t in TARGETS],
        "rows": [row | {"share": share(row, tops)} for row in rows],
    }
    for name, text in (("gpu_check.json", json.dumps(content, indent=1)), ("gpu_check.md", markdown(head, rows))):
        path = folder / name
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").replace(path)


def markdown(head: dict[str, Any], rows: list[Row]) -> str:
    lines = ["# GPU check", ""]
    if head.get("rehearsal"):
        lines += ["**A rehearsal: tiny shapes, no figures.**", ""]
    lines += ["| | |", "|---|---|"]
    for name, value in head.items():
        if isinstance(value, dict):
            value = "; ".join(f"{key}: {what}" for key, what in value.items())
        lines.append(f"| {name} | {_cell(value)} |")
    lines += ["", "## Targets", "", "| target | measured | reached |", "|---|---|---|"]
    for target in TARGETS:
        best, good = reached(target, rows)
        verdict = {None: "not measured", True: "yes", False: "**no**"}[good]
        lines.append(f"| {target.what} | {'' if best is None else f'{best:.1%}'} | {verdict} |")
    bad = [row for row in rows if row["status"] in BAD]
    lines += ["", f"## Failures: {len(bad)}", ""]
    lines += [f"- {row['name']}, {row['implementation']}: {row.get('note', row['status'])}" for row in bad]
    tops = ceilings(rows)
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        lines += ["", f"## {part}", ""]
        lines += _errors(mine) if part == "correctness" else _times(mine, tops)
        for row in mine:
            if row.get("kernels"):
                lines += _kernels(row)
    return "\n".join(lines) + "\n"


def _errors(rows: list[Row]) -> list[str]:
    lines = ["| case | implementation | | error | allowed | note |", "|---|---|---|---|---|---|"]
    for row in rows:
        error, bound = (f"{row[name]:.2g}" if name in row else "" for name in ("error", "bound"))
        status = row["status"] if row["status"] not in BAD else f"**{row['status']}**"
        lines.append(
            f"| {row['name']} | {row['implementation']} | {status} | {error} | {bound} | {_cell(row.get('note', ''))} |"
        )
    return lines


def _times(rows: list[Row], tops: dict[str, float]) -> list[str]:
    lines = ["| what | implementation | | time | rate | share | note |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        status = row["status"] if row["status"] not in BAD else f"**{row['status']}**"
        part = share(row, tops)
        lines.append(
            f"| {row['name']} | {row['implementation']} | {status} | {duration(row.get('seconds'))} | {rate(row)} "
            f"| {'' if part is None else f'{part:.1%}'} | {_cell(row.get('note', ''))} |"
        )
    return lines


def _kernels(row: Row) -> list[str]:
    lines = ["", f"{row['name']}:", "", "| kernel | calls | time | share |", "|---|---|---|---|"]
    for one in row["kernels"]:
        lines.append(f"| `{one['kernel']}` | {one['count']:.4g} | {duration(one['seconds'])} | {one['share']:.1%} |")
    return lines


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def rate(row: Row) -> str:
    seconds = row.get("seconds")
    if not seconds:
        return ""
    rates = []
    if "tokens" in row:
        rates.append(f"{row['tokens'] / seconds:,.0f} tokens/s")
    if "flops" in row:
        rates.append(f"{row['flops'] / seconds / 1e12:.0f} TFLOP/s")
    elif "bytes" in row:
        rates.append(f"{row['bytes'] / seconds / 1e12:.3g} TB/s")
    return ", ".join(rates)


def line(row: Row, tops: dict[str, float]) -> str:
    """One row for the terminal."""
    part = share(row, tops)
    facts = [duration(row.get("seconds")), rate(row), "" if part is None else f"{part:.1%}"]
    if "error" in row:
        facts.append(f"error {row['error']:.2g} of {row['bound']:.2g}")
    facts.append(row.get("note", ""))
    return f"{row['status']:9} {row['name']} [{row['implementation']}] {'  '.join(fact for fact in facts if fact)}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
