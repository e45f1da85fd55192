"""Checks every GPU kernel against float64 on the card of this machine, and measures the kernels and the engine.

    python scripts/gpu_check.py [--out DIR] [--parts correctness,attention,...] [--budget SECONDS] [--rehearse]

Parts: `correctness` (random inputs, poisoned memory), `attention`, `memory` (writing and copying pages), `sampling`,
`engine` (an 8B and a 0.6B model of random weights). Two ceilings, the bandwidth of a copy and the FLOPs of a bfloat16
product, are measured first; every share is of these. `gpu_check_parts/arithmetic.py` has the formulas for bytes and
FLOPs, `gpu_check_parts/timing.py` says how time is taken.

Results: `gpu_check.json` and `gpu_check.md` in DIR (by default $OUT, else a new temporary folder), written anew after
every row, beside a log. The exit code is 1 if anything failed, 2 without a GPU; a missed target changes nothing.

`--rehearse` runs all of it on a CPU with tiny shapes, GPU kernels interpreted or replaced by XLA, and keeps no figures.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

from gpu_check_parts import report  # noqa: E402
from gpu_check_parts.supervisor import Job, supervise  # noqa: E402

# Seconds that each part may take of the default budget; what one leaves goes to those after it.
SHARES = {"ceilings": 15, "correctness": 70, "attention": 105, "memory": 20, "sampling": 15, "engine": 105}
BUDGET = sum(SHARES.values())
PATIENCE = {False: 1.0, True: 10.0}  # a rehearsal may run on a slow processor that does other things too


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the results go (default: $OUT, else a new temporary folder)")
    parser.add_argument("--parts", default=",".join(SHARES), help=f"of {', '.join(SHARES)} (all)")
    parser.add_argument("--budget", type=float, help=f"seconds for all of it ({BUDGET})")
    parser.add_argument("--seed", type=int, help="of the random inputs (a fresh one)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny, without figures")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        from gpu_check_parts.worker import be_worker

        return be_worker(options.worker)
    asked = ["ceilings", *options.parts.split(",")]
    unknown = [part for part in asked if part not in SHARES]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}, only {', '.join(SHARES)}")

    folder = options.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu_check-"))
    folder.mkdir(parents=True, exist_ok=True)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    budget = options.budget or BUDGET * PATIENCE[options.rehearse]
    check = Check(folder, [part for part in SHARES if part in asked], budget, seed, options.rehearse)
    print(f"seed {seed}, results in {folder}", flush=True)
    if not check.run():
        print(
            "There is no GPU here that JAX can use: run this where there is one, or with --rehearse.", file=sys.stderr
        )
        return 2
    print(check.summary())
    return int(any(row["status"] in report.BAD for row in check.rows))


class Check:
    """A run, as the process sees it that never touches the device."""

    def __init__(self, folder: Path, parts: list[str], budget: float, seed: int, rehearse: bool):
        self.folder, self.parts, self.seed, self.rehearse = folder, parts, seed, rehearse
        self.began = time.time()
        whole, end = sum(SHARES[part] for part in parts), self.began
        self.deadlines = {part: (end := end + budget * SHARES[part] / whole) for part in parts}
        self.head: dict[str, Any] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "rehearsal": "yes" if rehearse else "no",
            "card": said_by("nvidia-smi", "--query-gpu=name,memory.total,power.limit", "--format=csv,noheader"),
            "driver": said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "commit": said_by("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
            "python": sys.version.split()[0],
            "seed": seed,
        }
        self.rows: list[report.Row] = []
        # Programs are kept for a worker that takes over from one that died.
        self.cache = tempfile.TemporaryDirectory(prefix="gpu_check-cache-")

    def run(self) -> bool:
        """Fill `rows`; False if there is no GPU."""
        from gpu_check_parts.worker import all_tasks

        tasks = all_tasks(self.parts)
        jobs = [Job(task.part, task.group, task.names, task.implementation, task.seconds) for task in tasks]
        until = max(self.deadlines.values())
        return supervise(jobs, self.spawn, self.hear, until=until, patience=PATIENCE[self.rehearse])

    def spawn(self, numbers: list[int], one_by_one: str | None) -> tuple[subprocess.Popen, int]:
        read, write = os.pipe()
        orders = {
            "numbers": numbers,
            "one_by_one": one_by_one,
            "parts": self.parts,
            "deadlines": self.deadlines,
            "seed": self.seed,
            "rehearse": self.rehearse,
        }
        environment = {
            "JAX_COMPILATION_CACHE_DIR": self.cache.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        } | os.environ
        if self.rehearse:
            environment["JAX_PLATFORMS"] = "cpu"
        with open(self.folder / "log.txt", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, "--worker", str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write,),
                env=environment,
            )
        os.close(write)
        process.stdin.write(json.dumps(orders).encode())
        process.stdin.close()
        return process, read

    def hear(self, message: dict[str, Any]) -> None:
        if "head" in message:
            self.head |= message["head"]
        if "row" in message:
            self.rows.append(message["row"])
            print(report.line(message["row"], report.ceilings(self.rows)), flush=True)
        if "head" in message or "row" in message:
            self.head["seconds"] = round(time.time() - self.began)
            report.write(self.folder, self.head, self.rows)

    def summary(self) -> str:
        verdicts = {None: "unknown", True: "reached", False: "MISSED"}
        lines = [""]
        for target in report.TARGETS:
            best, good = report.reached(target, self.rows)
            lines.append(f"{verdicts[good]:9} {target.what}{'' if best is None else f': {best:.1%}'}")
        lines += [report.line(row, {}) for row in self.rows if row["status"] in report.BAD]
        counts = {
            status: sum(row["status"] == status for row in self.rows) for status in ("failed", "refused", "skipped")
        }
        numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
        lines.append(f"{len(self.rows)} rows in {time.time() - self.began:.0f} s: {numbers}")
        return "\n".join([*lines, str(self.folder / "gpu_check.md")])


def said_by(*command: str) -> str:
    """What a command prints; "unknown" if it cannot be run."""
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return out.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
