"""Compare engines on one workload, alternating in one run: jpaged beside transformers and vLLM.

    python scripts/compare_engines.py --workload smollm2.json --rounds 5 --json result.json \\
        --engine transformers=envs/hf/bin/python:models/smollm2-f32 \\
        --engine vllm=envs/vllm/bin/python:models/smollm2-f32 \\
        --engine jpaged=envs/jpaged/bin/python:models/smollm2-f32

An engine is `NAME=PYTHON:MODEL[:KEY=VALUE,...]`. The adapter in `scripts/engines` is the NAME up to its first `-`
(so `vllm-bf16` and `vllm` can run side by side); options go to it, e.g.
`vllm-bf16=...:models/smollm2-bf16:dtype=bfloat16`.
Every engine lives in its own environment and process; this file needs the standard library alone.

Engines load and warm up (one whole pass over the parts) one after another, then take turns: part by part and round by
round, A B C A B C, so that a slow phase of the machine meets them all. While one runs, the others are stopped
(SIGSTOP), for thread pools spin when idle. The cores used by *other* processes meanwhile are measured; samples above
`--max-other` are left out of the medians where clean ones exist.

A workload is JSON with `w1`, `w2`, `w3`: lists of `{"prompt": [ids], "max_tokens": n}`, decoded greedily with
end-of-text ignored. W1 is one streamed request: time to first token (ms), decode tokens/s after it, output tokens/s in
all. The others are given at once: output tokens/s.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

METRICS = {"ttft": "TTFT ms", "decode": "decode tok/s", "output": "output tok/s"}
WORKER = pathlib.Path(__file__).parent / "engines" / "worker.py"


class EngineFailed(Exception):
    """A worker ended before it answered."""


@dataclasses.dataclass
class Sample:
    """One run of one part: its metrics, and the cores that this engine and all other processes used meanwhile."""

    metrics: dict[str, float]
    own_cores: float
    other_cores: float


class Worker:
    """An engine's process. It is stopped between calls, and with it every process of its session."""

    def __init__(self, spec: str, workload: pathlib.Path, threads: int, logs: pathlib.Path):
        self.name, python, model, options = parse_engine(spec)
        self.log = logs / f"{self.name}.log"
        self.samples: dict[str, list[Sample]] = {}
        self.tokens: dict[str, list[list[int]]] = {}
        self.changed: set[str] = set()  # parts whose tokens differed between rounds
        self.error = ""
        adapter = self.name.split("-")[0]
        if not WORKER.with_name(f"{adapter}.py").exists():
            raise SystemExit(f"no adapter for engine {self.name!r}: {WORKER.parent} has none called {adapter}.py")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, str(WORKER), adapter, model, json.dumps(options), str(workload)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
            )

    def load(self) -> None:
        loaded = self.read()
        self.version, self.load_seconds = loaded["version"], loaded["seconds"]

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.error = f"ended with status {self.process.wait()}, see {self.log}"
            raise EngineFailed(self.error)
        return json.loads(line)

    def run(self, part: str) -> Sample:
        self.signal(signal.SIGCONT)
        own, busy, start = session_seconds(self.process.pid), machine_seconds(), time.perf_counter()
        self.process.stdin.write(part + "\n")
        self.process.stdin.flush()
        answer = self.read()
        wall = time.perf_counter() - start
        own, busy = session_seconds(self.process.pid) - own, machine_seconds() - busy
        self.signal(signal.SIGSTOP)
        if self.tokens.setdefault(part, answer["ids"]) != answer["ids"]:
            self.changed.add(part)
        metrics = {"output": answer["tokens"] / answer["seconds"]}
        if "ttft" in answer:
            metrics |= {"ttft": answer["ttft"] * 1000, "decode": answer["decode"]}
        return Sample(metrics, own / wall, max(0.0, busy - own) / wall)

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # it has ended: the next read says so

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        self.signal(signal.SIGKILL)
        self.process.wait()

    def peak_memory_mib(self) -> int | None:
        try:
            status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return None
        return next((int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM")), None)


def parse_engine(spec: str) -> tuple[str, str, str, dict]:
    """`NAME=PYTHON:MODEL[:KEY=VALUE,...]`; values are JSON where they can be, else strings."""
    name, _, rest = spec.partition("=")
    python, _, rest = rest.partition(":")
    model, _, rest = rest.partition(":")
    if not (name and python and model):
        raise SystemExit(f"--engine {spec!r}: write NAME=PYTHON:MODEL or NAME=PYTHON:MODEL:KEY=VALUE,...")
    options = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise SystemExit(f"--engine {spec!r}: option {item!r} has no value")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return name, python, model, options


def session_seconds(session: int) -> float:
    """CPU seconds used so far by the processes of a session, those they waited for included."""
    ticks = 0
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """CPU seconds that the whole machine has been busy."""
    user, nice, system, _, _, *interrupts = map(int, pathlib.Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def guarded(workers: list[Worker], worker: Worker, part: str) -> Sample | None:
    """Run a part; an engine that dies leaves the comparison with its reason noted, and the others go on."""
    try:
        return worker.run(part)
    except (EngineFailed, BrokenPipeError):
        worker.error = worker.error or f"ended, see {worker.log}"
        print(f"{worker.name}: {worker.error}", file=sys.stderr)
        workers.remove(worker)
        return None


def measure(workers: list[Worker], parts: list[str], rounds: int) -> None:
    alive = list(workers)
    for number in range(rounds):
        for part in parts:
            for worker in list(alive):
                if sample := guarded(alive, worker, part):
                    worker.samples.setdefault(part, []).append(sample)
                    numbers = ", ".join(f"{METRICS[k]} {v:.1f}" for k, v in sample.metrics.items())
                    cores = f"own {sample.own_cores:.2f}, other {sample.other_cores:.2f} cores"
                    print(f"round {number + 1} {part} {worker.name}: {numbers} ({cores})", file=sys.stderr, flush=True)


def summarize(worker: Worker, reference: Worker, parts: list[str], max_other: float) -> dict:
    """Medians per part, over the samples that ran undisturbed if there are any."""
    result = {}
    for part in parts:
        samples = worker.samples.get(part)
        if not samples:
            continue
        clean = [s for s in samples if s.other_cores <= max_other]
        used = clean or samples
        same = None
        if reference.tokens.get(part):
            pairs = list(zip(worker.tokens[part], reference.tokens[part], strict=True))
            same = [sum(a == b for a, b in pairs), len(pairs)]
        result[part] = {
            **{key: statistics.median(s.metrics[key] for s in used) for key in used[0].metrics},
            "own_cores": statistics.median(s.own_cores for s in used),
            "other_cores": statistics.median(s.other_cores for s in used),
            "clean": [len(clean), len(samples)],
            "same_tokens": same,
            "repeatable": part not in worker.changed,
            "samples": [dataclasses.asdict(s) for s in samples],
        }
    return result


def markdown(results: dict[str, dict], parts: list[str]) -> str:
    """One row an engine; "same" counts the requests whose tokens equal the first engine's, "clean" undisturbed runs."""
    columns = [(part, metric) for part in parts for metric in (METRICS if part == "w1" else ["output"])]
    head = (
        ["engine"] + [f"{part.upper()} {METRICS[metric]}" for part, metric in columns] + ["same", "clean", "peak MiB"]
    )
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, result in results.items():
        row = [name]
        for part, metric in columns:
            value = result["parts"].get(part, {}).get(metric)
            row.append("failed" if value is None else f"{value:.1f}")
        for key in ("same_tokens", "clean"):
            counts = [entry[key] for entry in result["parts"].values() if entry[key]]
            row.append(f"{sum(a for a, _ in counts)}/{sum(b for _, b in counts)}" if counts else "")
        rows.append([*row, str(result["peak_memory_mib"] or "")])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=pathlib.Path, required=True)
    parser.add_argument("--engine", action="append", required=True, metavar="NAME=PYTHON:MODEL[:KEY=VALUE,...]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="w1,w2,w3")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-other", type=float, default=0.25, help="cores used by others in a clean sample")
    parser.add_argument("--logs", type=pathlib.Path, help="where engines' messages go (default: a new folder)")
    parser.add_argument("--json", type=pathlib.Path, help="write everything measured, each sample included")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(json.loads(args.workload.read_text())):
        raise SystemExit(f"--parts: {args.workload} has no {', '.join(sorted(unknown))}")
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="compare-engines-"))
    logs.mkdir(parents=True, exist_ok=True)

    # An ended comparison must not leave stopped engines behind: make a termination run the `finally` below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workers: list[Worker] = []
    try:
        for spec in args.engine:
            workers.append(worker := Worker(spec, args.workload.resolve(), args.threads, logs))
            worker.load()
            print(
                f"{worker.name}: {worker.version}, loaded in {worker.load_seconds:.1f} s", file=sys.stderr, flush=True
            )
            start = time.perf_counter()
            for part in parts:
                worker.run(part)
            print(f"{worker.name}: warm after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        measure(workers, parts, args.rounds)
        results = {
            worker.name: {
                "version": worker.version,
                "load_seconds": worker.load_seconds,
                "peak_memory_mib": worker.peak_memory_mib(),
                "error": worker.error,
                "parts": summarize(worker, workers[0], parts, args.max_other),
            }
            for worker in workers
        }
    except EngineFailed as error:
        raise SystemExit(f"an engine {error}") from None
    finally:
        for worker in workers:
            worker.close()
    print(markdown(results, parts))
    for name, result in results.items():
        print(f"\n{name}: {result['version']}" + (f"; {result['error']}" if result["error"] else ""), end="")
        changed = [part for part, entry in result["parts"].items() if not entry["repeatable"]]
        print(f"; tokens changed between rounds in {', '.join(changed)}" if changed else "", end="")
    print()
    if args.json:
        report = {"workload": args.workload.name, "rounds": args.rounds, "threads": args.threads, "engines": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
