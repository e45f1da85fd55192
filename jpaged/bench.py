"""Owns the measurement of a workload on an engine: what is run, what is timed, what the figures mean."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jpaged.host.metrics import EngineStats, percentiles
from jpaged.host.sampling_params import SamplingParams

Mode = Literal["throughput", "latency"]


class Work(NamedTuple):
    """One request of a workload."""

    prompt: list[int]
    sampling: SamplingParams


@dataclass
class Round:
    """What one pass over a workload measured. Times are in seconds, rates in tokens per second.

    decode_throughput leaves out each request's first token and the time before the first of them. In a round of one
    request at a time it is summed over the requests; with all at once, prompts that come later count as its time.
    kv_utilization is tokens held to slots allocated, sampled after each step.
    """

    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    output_throughput: float
    decode_throughput: float | None
    ttft: dict[str, float] | None
    tpot: dict[str, float] | None
    itl: dict[str, float] | None
    e2e_latency: dict[str, float] | None
    num_steps: int
    num_decode_steps: int
    padding: float
    kv_utilization_mean: float | None
    kv_utilization_min: float | None
    num_preemptions: int
    num_compiles: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_workloads(path: str | Path, names: list[str] | None = None) -> dict[str, list[Work]]:
    """The named workloads (None: all) of a JSON file `{name: [{"prompt": [ids], "max_tokens": n}, ...], ...}`.

    Of the file's other keys, `greedy` (true) and `ignore_eos` (false unless said) hold for all requests.
    """
    try:
        content = json.loads(Path(path).read_text())
    except ValueError as error:  # UnicodeDecodeError too
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object of workloads, got a {type(content).__name__}")
    if content.get("greedy", True) is not True:
        raise ValueError(f"{path}: greedy must be true, got {content['greedy']!r}: a measurement is to be repeatable")
    ignore_eos = content.get("ignore_eos", False)
    found = {name: value for name, value in content.items() if isinstance(value, list)}
    missing = [name for name in names or [] if name not in found]
    if missing or not found:
        raise ValueError(f"{path} has no workload {', '.join(missing)}; it holds: {', '.join(found) or 'none'}")
    empty = [name for name in names or found if not found[name]]
    if empty:
        raise ValueError(f"{path}: workload {empty[0]} has no requests: put some in, or leave it out")
    return {
        name: [_work(f"{path}: {name}[{index}]", item, ignore_eos) for index, item in enumerate(found[name])]
        for name in (names or found)
    }


def _work(where: str, item: Any, ignore_eos: bool) -> Work:
    if not isinstance(item, Mapping) or item.keys() != {"prompt", "max_tokens"} or not isinstance(item["prompt"], list):
        raise ValueError(f'{where} must be {{"prompt": [token ids], "max_tokens": n}}')
    try:
        return Work(
            item["prompt"], SamplingParams(temperature=0.0, max_tokens=item["max_tokens"], ignore_eos=ignore_eos)
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


@dataclass
class _Times:
    """When a request came, and when the host saw its tokens."""

    arrival: float
    tokens: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0


def run_round(engine: Any, works: list[Work], mode: Mode, batch_size: int | None = None) -> Round:
    """Runs a workload on an idle engine: all requests at once for throughput, one after another for latency. With
    `batch_size` in static batches, each of them sent when all requests of the one before have ended."""
    if engine.has_unfinished_requests():
        raise ValueError("the engine is busy: measure on one without requests")
    engine.reset_prefix_cache()  # no round finds what the one before computed
    before = EngineStats(**asdict(engine.stats))
    kv_min: float | None = None
    size = batch_size or (len(works) if mode == "throughput" else 1)
    groups = [works[start : start + size] for start in range(0, len(works), size)]
    times: dict[str, _Times] = {}
    started = time.perf_counter()
    for group in groups:
        for work in group:
            arrival = time.perf_counter()
            times[engine.add_request(work.prompt, work.sampling)] = _Times(arrival)
        while engine.has_unfinished_requests():
            held, samples = engine.stats.kv_utilization_sum, engine.stats.kv_utilization_samples
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                seen = times[output.request_id]
                seen.num_prompt_tokens = len(output.prompt_token_ids)
                seen.tokens += [now] * (len(output.outputs[0].token_ids) - len(seen.tokens))
            if engine.stats.kv_utilization_samples > samples:
                sample = (engine.stats.kv_utilization_sum - held) / (engine.stats.kv_utilization_samples - samples)
                kv_min = sample if kv_min is None else min(kv_min, sample)
    return _summary(list(times.values()), time.perf_counter() - started, mode, before, engine.stats, kv_min)


def _summary(
    times: list[_Times], seconds: float, mode: Mode, before: EngineStats, after: EngineStats, kv_min: float | None
) -> Round:
    def grown(name: str) -> Any:
        return getattr(after, name) - getattr(before, name)

    spans = [one.tokens for one in times if one.tokens]
    num_output_tokens = sum(map(len, spans))
    if mode == "latency":
        decode_seconds = sum(span[-1] - span[0] for span in spans)
    else:
        decode_seconds = max(span[-1] for span in spans) - min(span[0] for span in spans)
    computed = grown("num_scheduled_tokens") + grown("num_padded_tokens")
    samples = grown("kv_utilization_samples")
    return Round(
        seconds=seconds,
        num_requests=len(times),
        num_prompt_tokens=sum(one.num_prompt_tokens for one in times),
        num_output_tokens=num_output_tokens,
        output_throughput=num_output_tokens / seconds,
        decode_throughput=(num_output_tokens - len(spans)) / decode_seconds if decode_seconds else None,
        ttft=percentiles([one.tokens[0] - one.arrival for one in times if one.tokens]),
        tpot=percentiles([(span[-1] - span[0]) / (len(span) - 1) for span in spans if len(span) > 1]),
        itl=percentiles([b - a for span in spans for a, b in zip(span, span[1:])]),
        e2e_latency=percentiles([one.tokens[-1] - one.arrival for one in times if one.tokens]),
        num_steps=grown("num_steps"),
        num_decode_steps=grown("num_decode_steps"),
        padding=grown("num_padded_tokens") / computed if computed else 0.0,
        kv_utilization_mean=grown("kv_utilization_sum") / samples if samples else None,
        kv_utilization_min=kv_min,
        num_preemptions=grown("num_preemptions"),
        num_compiles=grown("num_compiles"),
    )


def median_round(rounds: list[Round]) -> Round:
    """The round in the middle by output tokens per second (of an even number, the slower of the two)."""
    return sorted(rounds, key=lambda one: one.output_throughput)[(len(rounds) - 1) // 2]
