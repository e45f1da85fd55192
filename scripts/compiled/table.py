"""Owns the tables that the checks of compiled programs leave in the documentation."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put the tables of these rows between the two markers in a Markdown file."""
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{tables(rows)}\n{END}{after}")


def tables(rows: list[dict[str, Any]]) -> str:
    versions = " and ".join(sorted({row["jax"] for row in rows}))
    kernels = [row for row in rows if "registers" in row]
    steps = [row for row in rows if "temporary" in row]
    return "\n".join(
        [
            f"{len(kernels)} kernels and {len(steps)} whole steps were compiled with JAX {versions}. A line holds the",
            "worst of the page sizes, group sizes, options and versions of JAX.",
            "",
            *kernel_table(kernels),
            "",
            *step_table(steps),
        ]
    )


def kernel_table(rows: list[dict[str, Any]]) -> list[str]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["implementation"], row["card"], row["head_dim"], row["kv_dtype"]].append(row)
    lines = [
        "| kernel | for | head_dim | pool | programs | registers | spilled | shared memory | blocks an SM "
        "| in flight an SM |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (kernel, implementation, card, head_dim, dtype), group in groups.items():
        flights = [row["in_flight"] for row in group if row["in_flight"] is not None]
        cells = [
            f"`{kernel}` {implementation}",
            card.upper(),
            head_dim,
            dtype,
            len(group),
            max(row["registers"] for row in group),
            max(row["spilled_bytes"] for row in group),
            f"{max(row['shared_memory'] for row in group) / 1024:.1f} KiB",
            min(row["blocks_per_core"] for row in group),
            f"{min(flights) / 1024:.0f} KiB" if flights else "",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def step_table(rows: list[dict[str, Any]]) -> list[str]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["name"]].append(row)
    lines = [
        "| step on H200 | weights read | pool read | temporary memory | copies of the pool "
        "| kernels of ours | collectives |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        collectives = {key: number for key, number in group[0]["collectives"].items() if number}
        cells = [
            name,
            f"{max(row['weights_read'] / row['weights'] for row in group):.2f} times",
            f"{max(row['pages_read'] / row['pool'] for row in group):.2f} times",
            f"{max(row['temporary'] for row in group) / 2**20:.0f} MiB",
            max(len(row["pool_copies"]) for row in group),
            min(row["gpu_kernels"] for row in group),
            ", ".join(f"{number} {key}" for key, number in collectives.items()) or "none",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
