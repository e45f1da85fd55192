"""Compiles every GPU kernel, and whole steps, for GPUs that are not there, and fails on a broken bound.

    python scripts/check_kernels.py [--quick] [--cards h200 a100] [--kernels ...] [--json OUT] [--no-steps]
    python scripts/check_kernels.py --table OUT.md RESULTS.json ...

`scripts/check_kernels.sh` makes the environments that it needs and runs it with both ends of the JAX range.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few shapes, in which each value of each axis occurs")
    parser.add_argument("--cards", nargs="+", default=["h200", "a100"])
    parser.add_argument("--kernels", nargs="+", help="(all)")
    parser.add_argument("--no-steps", action="store_true", help="kernels alone")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--table", type=Path, help="write a table of such rows, and compile nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("rows", nargs="*", type=Path, help="with --table")
    options = parser.parse_args()
    if options.table:
        from compiled.table import write_table

        write_table(options.table, [row for path in options.rows for row in json.loads(path.read_text())])
        return 0
    if options.worker:
        return work(options)

    began = time.perf_counter()
    rows = []
    for row in run_workers(options):
        print(line(row), flush=True)
        rows.append(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))
    bad = sum(bool(row["broken"]) for row in rows)
    print(f"{len(rows)} programs in {time.perf_counter() - began:.0f} s, {bad} of them broken")
    return int(bad > 0 or not rows)


def jobs(options: argparse.Namespace) -> list[Any]:
    from compiled.kernels import all_cases
    from compiled.steps import STEPS

    from pallas_kernels.implementation import AVAILABLE

    kernels = all_cases(options.cards, options.kernels or list(AVAILABLE), options.quick)
    return [*kernels, *([] if options.no_steps or "h200" not in options.cards else STEPS)]


def work(options: argparse.Namespace) -> int:
    """Compile the jobs whose numbers come on standard input; a row of JSON each."""
    from compiled.kernels import KernelCase, check
    from compiled.steps import check_step

    everything = jobs(options)
    print(json.dumps(len(everything)), flush=True)
    for number in sys.stdin:
        job = everything[int(number)]
        row = check(job) if isinstance(job, KernelCase) else check_step(job)
        print(json.dumps(row | {"name": str(job)}), flush=True)
    return 0


def run_workers(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all jobs, from a process for each core."""
    first = Worker()  # only asked how many there are
    total = first.total
    first.process.kill()
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(total):
        todo.put(number)
    rows: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def work_off() -> None:
        worker = Worker()
        while not todo.empty():
            with contextlib.suppress(queue.Empty):
                rows.put(worker.compile(todo.get_nowait()))

    for _ in range(min(os.cpu_count() or 1, total)):
        threading.Thread(target=work_off, daemon=True).start()
    for _ in range(total):
        yield rows.get()


class Worker:
    """A process that compiles. A compiler may abort its process: then the job is broken, and a new one goes on."""

    def __init__(self):
        from compiled.card import environment

        self.folder = tempfile.TemporaryDirectory(prefix="compiled-")
        self.errors = tempfile.TemporaryFile("w+")
        command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | environment(Path(self.folder.name)),
        )
        first = self.process.stdout.readline()
        if not first:
            raise RuntimeError(f"nothing can be compiled here:\n{self.last_words()}")
        self.total = json.loads(first)

    def compile(self, number: int) -> dict[str, Any]:
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if answer:
            return json.loads(answer)
        words = self.last_words()
        self.__init__()
        return {"name": f"job {number}", "broken": [f"the compiler died: {words[-500:]}"]}

    def last_words(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        return self.errors.read()[-2000:]


def line(row: dict[str, Any]) -> str:
    if row["broken"]:
        return f"BROKEN   {row['name']}: {'; '.join(row['broken'])}"
    if "refused" in row:
        return f"refused  {row['name']}"
    if "registers" not in row:
        facts = {name: value for name, value in row.items() if name not in ("name", "broken", "jax")}
        return f"ok       {row['name']}: {facts}"
    flight = "" if row["in_flight"] is None else f", {row['in_flight'] / 1024:.0f} KiB in flight an SM"
    return (
        f"ok       {row['name']}: {row['registers']} registers, {row['shared_memory'] / 1024:.1f} KiB shared, "
        f"{row['blocks_per_core']} blocks an SM{flight}"
    )


if __name__ == "__main__":
    sys.exit(main())
