"""Owns `Metrics`: what Prometheus reads of a server."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jpaged import __version__
from jpaged.engine.engine import Engine
from jpaged.engine.outputs import RequestOutput

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Fields of `EngineStats`: name of the metric, what it says.
COUNTERS = {
    "num_steps": ("jpaged_steps", "Steps of the engine"),
    "num_decode_steps": ("jpaged_decode_steps", "Steps without tokens of prompts"),
    "num_scheduled_tokens": ("jpaged_computed_tokens", "Tokens that steps computed"),
    "num_padded_tokens": ("jpaged_padded_tokens", "Tokens that steps computed only to fill up a shape"),
    "num_output_tokens": ("jpaged_generated_tokens", "Tokens that steps drew, also those of requests that go on"),
    "num_preemptions": ("jpaged_preemptions", "Sequences that gave way to others"),
    "num_cached_tokens": ("jpaged_prefix_hit_tokens", "Tokens whose KV was found in pages of others"),
    "num_page_copies": ("jpaged_page_copies", "Pages copied as two sequences went on differently in them"),
    "num_pages_swapped_out": ("jpaged_pages_swapped_out", "Pages moved to swap space"),
    "num_pages_swapped_in": ("jpaged_pages_swapped_in", "Pages brought back from swap space"),
    "num_compiles": ("jpaged_compiles_after_warm_up", "Programs compiled after warm-up"),
}
# And what else `reading` finds.
GAUGES = {
    "num_running": ("jpaged_sequences_running", "Sequences that hold pages"),
    "num_waiting": ("jpaged_sequences_waiting", "Sequences that wait for pages or a row"),
    "max_num_seqs": ("jpaged_sequences_limit", "The most sequences that run at a time"),
    "num_pages": ("jpaged_pages", "Pages that requests can hold"),
    "num_used_pages": ("jpaged_pages_used", "Pages that requests hold"),
    "num_shared_pages": ("jpaged_pages_shared", "Pages that more than one request holds"),
    "num_cached_pages": ("jpaged_pages_cached", "Free pages whose contents can be found again"),
    "num_swapped_pages": ("jpaged_pages_in_swap_space", "Pages in swap space"),
    "warm_up_seconds": ("jpaged_warm_up_seconds", "How long all programs took to compile, or to be read from disk"),
}


class Metrics:
    """Each server has its own registry. Histograms are fed as requests end; the rest is read when it is asked for."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._labels = {"model": model}

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Any:
            return Histogram(name, text, ["model"], registry=self.registry, buckets=tuple(buckets)).labels(
                **self._labels
            )

        def counter(name: str, text: str) -> Any:
            return Counter(name, text, ["model"], registry=self.registry).labels(**self._labels)

        self.ttft = histogram("jpaged_time_to_first_token_seconds", "Arrival to first token", SECONDS)
        self.tpot = histogram("jpaged_time_per_output_token_seconds", "Mean gap of a sequence's tokens", GAPS)
        self.itl = histogram("jpaged_inter_token_latency_seconds", "Each gap between two tokens", GAPS)
        self.e2e = histogram("jpaged_e2e_latency_seconds", "Arrival to end", SECONDS)
        self.queue = histogram("jpaged_queue_time_seconds", "Arrival to the first step", SECONDS)
        self.prompt_sizes = histogram("jpaged_request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.output_sizes = histogram("jpaged_request_output_tokens", "Tokens of an output", TOKENS)
        self.prompt_tokens = counter("jpaged_prompt_tokens", "Tokens of the prompts of finished requests")
        self.output_tokens = counter("jpaged_output_tokens", "Tokens of the outputs of finished requests")
        self.refused = counter("jpaged_requests_refused", "Requests that found the queue full")
        self.timeouts = counter("jpaged_requests_timed_out", "Requests that took too long")
        self.ready = Gauge("jpaged_ready", "Whether requests are served", ["model"], registry=self.registry).labels(
            **self._labels
        )
        self.in_flight = Gauge(
            "jpaged_http_requests_in_flight", "Requests that are being answered", ["model"], registry=self.registry
        ).labels(**self._labels)
        self._finished = Counter(
            "jpaged_sequences_finished", "Sequences that ended", ["model", "reason"], registry=self.registry
        )
        self._answers = Counter("jpaged_http_responses", "Answers", ["model", "path", "status"], registry=self.registry)
        self.batch_sizes = Histogram(
            "jpaged_batch_sequences",
            "Sequences in a step",
            ["model"],
            registry=self.registry,
            buckets=ROWS,
        ).labels(**self._labels)
        versions = {"version": __version__, "jax": importlib.metadata.version("jax")}
        build = Info("jpaged_build", "What runs here", ["model"], registry=self.registry).labels(**self._labels)
        build.info(versions | {"python": platform.python_version()})
        ProcessCollector(registry=self.registry)

    def record(self, output: RequestOutput) -> None:
        """A request has ended."""
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.prompt_sizes.observe(len(output.prompt_token_ids))
        for sample, times in zip(output.outputs, output.latencies, strict=True):
            num_tokens = len(sample.token_ids)
            self.output_tokens.inc(num_tokens)
            self.output_sizes.observe(num_tokens)
            self._finished.labels(reason=sample.finish_reason or "abort", **self._labels).inc()
            for histogram, value in (
                (self.ttft, times.ttft),
                (self.tpot, times.tpot),
                (self.e2e, times.e2e_latency),
                (self.queue, times.queue_time),
            ):
                if value is not None:
                    histogram.observe(value)
            for gap in times.itl:
                self.itl.observe(gap)

    def record_abort(self, num_samples: int) -> None:
        """A request was given up: its client has left, or it took too long."""
        self._finished.labels(reason="abort", **self._labels).inc(num_samples)

    def record_answer(self, path: str, status: int) -> None:
        self._answers.labels(path=path, status=str(status), **self._labels).inc()

    def text(self, engine: dict[str, float]) -> bytes:
        """All of them, with what `reading` has found of the engine."""
        families = [*self.registry.collect(), *_Readings(engine, self._labels).collect()]
        for family in families:  # when each series began is of no use, and would be as many series again
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        shown = CollectorRegistry()
        shown.register(_Families(families))
        return generate_latest(shown)


class _Families(Collector):
    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Readings:
    """The engine's numbers as metrics."""

    def __init__(self, values: dict[str, float], labels: dict[str, str]):
        self._values, self._labels = values, labels

    def collect(self) -> Iterable[Metric]:
        kinds: list[tuple[dict[str, tuple[str, str]], Callable[..., Any]]] = [
            (COUNTERS, CounterMetricFamily),
            (GAUGES, GaugeMetricFamily),
        ]
        for names, kind in kinds:
            for name, (metric, text) in names.items():
                if name in self._values:
                    family = kind(metric, text, labels=list(self._labels))
                    family.add_metric(list(self._labels.values()), self._values[name])
                    yield family


def reading(engine: Engine) -> dict[str, float]:
    """What the engine says of itself. It may be in a step meanwhile: each number is right, not their sum."""
    values = {name: value for name, value in asdict(engine.stats).items() if isinstance(value, int | float)}
    return values | {
        "num_pages": engine.num_pages,
        "max_num_seqs": engine.limits.max_num_seqs,
        "warm_up_seconds": engine.warm_up_seconds,
    }
