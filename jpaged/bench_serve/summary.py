"""Owns the figures of a load: percentiles, throughput, goodput, and whether the client itself was too slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jpaged.bench_serve.answer import Answer
from jpaged.bench_serve.load import Run
from jpaged.host.metrics import percentiles

GOODPUT = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e_latency"}  # what may be limited, and its name in an Answer
LATE, LATE_SHARE = 0.01, 0.1  # seconds and share of the median latency from which a client's lag distorts


@dataclass
class Summary:
    """What a load measured. Times are in seconds, rates per second; percentiles over the requests that were answered
    (itl: over all their gaps, see `Answer`), whose tokens alone are counted.

    seconds is from the first request's sending to the end of the last answer. goodput counts requests that met all
    limits. lag is how much later than due requests were sent, client_delay how much too late a clock in the client
    beats: where they are not small beside the latencies, these are the client's in part.
    """

    seconds: float
    num_requests: int
    num_failed: int
    errors: dict[str, int]
    error_details: dict[str, str]
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_per_chunk: float | None
    exact_gaps: bool  # itl counts tokens; else chunks, as this server doesn't tell how many tokens are in one
    request_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: float | None
    goodput_share: float | None
    concurrency_mean: float
    concurrency_max: int
    ttft: dict[str, float] | None
    tpot: dict[str, float] | None
    itl: dict[str, float] | None
    e2e_latency: dict[str, float] | None
    lag: dict[str, float] | None
    client_delay: dict[str, float] | None
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(run: Run, limits: Mapping[str, float] | None = None) -> Summary:
    """The figures of a load; `limits` in seconds, by the names of `GOODPUT`. Raises ValueError if nothing was
    answered."""
    whole = [one for one in run.answers if one.error is None]
    errors = Counter(one.error for one in run.answers if one.error is not None)
    details = {one.error: one.detail for one in reversed(run.answers) if one.error is not None}
    if not whole:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in errors.most_common())
        first = details[errors.most_common(1)[0][0]] if errors else ""
        raise ValueError(f"no request was answered: {kinds}" + (f" ({first})" if first else ""))
    seconds = max(run.seconds, 1e-9)
    num_prompt_tokens = sum(one.num_prompt_tokens for one in whole)
    num_output_tokens = sum(one.num_output_tokens for one in whole)
    num_chunks = sum(len(one.pieces) for one in whole)
    good = sum(meets(one, limits) for one in whole) if limits else None
    summary = Summary(
        seconds=run.seconds,
        num_requests=len(run.answers),
        num_failed=len(run.answers) - len(whole),
        errors=dict(errors.most_common()),
        error_details=details,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        tokens_per_chunk=num_output_tokens / num_chunks if num_chunks else None,
        exact_gaps=all(one.exact for one in whole),
        request_throughput=len(whole) / seconds,
        output_throughput=num_output_tokens / seconds,
        total_throughput=(num_prompt_tokens + num_output_tokens) / seconds,
        goodput=None if good is None else good / seconds,
        goodput_share=None if good is None else good / len(run.answers),
        concurrency_mean=sum(one.e2e_latency or 0.0 for one in run.answers) / seconds,
        concurrency_max=max(count for _, count in running_requests(run.answers)),
        ttft=percentiles([one.ttft for one in whole if one.ttft is not None]),
        tpot=percentiles([one.tpot for one in whole if one.tpot is not None]),
        itl=percentiles([gap for one in whole for gap in one.itl]),
        e2e_latency=percentiles([one.e2e_latency for one in whole if one.e2e_latency is not None]),
        lag=percentiles([one.lag for one in run.answers if one.lag is not None]),
        client_delay=percentiles(run.delays),
        warnings=[],
    )
    summary.warnings = list(warnings_of(summary))
    return summary


def meets(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether an answer kept all limits. One token has no tpot, and keeps every limit of it; no token keeps none of
    ttft."""
    if answer.error is not None or "ttft" in limits and answer.ttft is None:
        return False
    found = {name: getattr(answer, GOODPUT[name]) for name in limits}
    return all(found[name] is None or found[name] <= limit for name, limit in limits.items())


def warnings_of(summary: Summary) -> list[str]:
    """What makes the figures doubtful."""
    found = []
    latency = summary.ttft or summary.e2e_latency or {"p50": 0.0}
    allowed = max(LATE, LATE_SHARE * latency["p50"])
    if summary.lag and summary.lag["p99"] > allowed:
        found.append(
            f"this client was late: 1 % of the requests were sent more than {summary.lag['p99'] * 1000:.0f} ms after "
            "they were due, so the load was not quite what was asked for"
        )
    if summary.client_delay and summary.client_delay["p99"] > allowed:
        found.append(
            f"this client was busy: at times it saw what came {summary.client_delay['p99'] * 1000:.0f} ms late (p99), "
            "so latencies are in part its own; give it more of a CPU, or spread the load over several"
        )
    if summary.itl and not summary.exact_gaps:
        found.append(
            "this server does not tell how many tokens a chunk holds: ITL is the time between chunks, "
            f"of {summary.tokens_per_chunk or 0:.2f} tokens on average"
        )
    if summary.num_failed:
        found.append(f"{summary.num_failed} of {summary.num_requests} requests failed; no figure includes them")
    return found


def running_requests(answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """How many requests are under way from which time on. Of one that ends when another begins, the end counts
    first."""
    changes = [(one.sent, 1) for one in answers]
    changes += [(one.sent if one.ended is None else one.ended, -1) for one in answers]
    steps, running = [], 0
    for moment, change in sorted(changes):
        running += change
        steps.append((moment, running))
    return steps


def token_rates(answers: Sequence[Answer], seconds: float, num_bins: int = 60) -> list[tuple[float, float]]:
    """Output tokens per second over time, as (middle of a bin, rate)."""
    width = max(seconds, 1e-9) / num_bins
    counts = [0.0] * num_bins
    for one in answers:
        for moment, count in one.pieces:
            counts[min(int(moment / width), num_bins - 1)] += count
    return [((index + 0.5) * width, count / width) for index, count in enumerate(counts)]


def parse_goodput(text: str | None) -> dict[str, float] | None:
    """From a text NAME=SECONDS,..., such as ttft=0.5,tpot=0.05. Raises ValueError."""
    if text is None:
        return None
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in GOODPUT or not limits[name] > 0:
            raise ValueError(f"--goodput takes limits in seconds, such as ttft=0.5,tpot=0.05,e2e=10; got {part!r}")
    return limits
