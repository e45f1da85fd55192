"""One engine in a process of its own: loads it, then runs parts of the workload when told to.

Started by `compare_engines.py` as `worker.py ADAPTER MODEL OPTIONS-JSON WORKLOAD`. Reads one part name a line from
standard input, answers one JSON object a line on what was standard output (libraries print on it, so it is moved).
"""

import importlib.util
import json
import os
import pathlib
import sys
import time


def load_adapter(name: str):
    # By file, for `import vllm` must find the engine and not its adapter of the same name.
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"adapter_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(engine, part: str, requests: list[dict]) -> dict:
    """W1 is one streamed request; the other parts are batches given at once."""
    start = time.perf_counter()
    if part == "w1":
        ids, times = engine.stream(requests[0])
        seconds = time.perf_counter() - start
        answer = {"ids": [ids], "ttft": times[0] - start, "decode": (len(ids) - 1) / (times[-1] - times[0])}
    else:
        answer = {"ids": engine.generate(requests)}
        seconds = time.perf_counter() - start
    got, asked = [len(ids) for ids in answer["ids"]], [r["max_tokens"] for r in requests[: len(answer["ids"])]]
    if got != asked:
        raise RuntimeError(f"{part}: {sum(got)} tokens came back, {sum(asked)} were asked for")
    return {**answer, "seconds": seconds, "tokens": sum(got)}


def main() -> None:
    name, model, options, workload = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Our own folder holds modules named after the engines: it must not come before theirs.
    sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != pathlib.Path(__file__).resolve().parent]
    parts = json.loads(pathlib.Path(workload).read_text())

    def reply(answer: dict) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    start = time.perf_counter()
    engine = load_adapter(name).load(model, json.loads(options))
    reply({"version": engine.version, "seconds": time.perf_counter() - start})
    for line in sys.stdin:
        part = line.strip()
        reply(run(engine, part, parts[part]))


if __name__ == "__main__":
    main()
