"""Owns the course of a measurement: ask the server what it has, warm it up, put the load on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jpaged.bench_serve.answer import Answer
from jpaged.bench_serve.calls import Call, as_bodies, shuffled
from jpaged.bench_serve.client import (
    Endpoint,
    Target,
    allow_connections,
    encode,
    find_model,
    find_stream_options,
    find_vocab_size,
    send,
)
from jpaged.bench_serve.load import Run, run_load

OURS = ("model", "stream", "stream_options", "n", "best_of")  # fields of a body that the measurement sets or excludes


@dataclass
class Plan:
    """What to measure: calls as a function of the vocabulary's size (None: not known), and when to send them: at
    `times`, or as many at once as `concurrency`."""

    calls: Callable[[int | None], list[Call]]
    needs_vocab_size: bool = False
    endpoint: Endpoint = "completions"
    stream: bool = True
    model: str | None = None
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    times: Callable[[int], Sequence[float]] | None = None
    concurrency: int | None = None
    warm_up_requests: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        refused = [name for name in OURS if name in self.extra_body]
        if refused:
            raise ValueError(
                f"--extra-body must not hold {refused[0]!r}: one request is one sequence, whose times count"
            )

    def common(self, model: str) -> dict[str, Any]:
        """The fields that all bodies have."""
        ignore = {"ignore_eos": True} if self.ignore_eos else {}
        return {"model": model, "temperature": 0.0} | ignore | self.extra_body


class Measured(NamedTuple):
    model: str
    run: Run


async def measure(
    target: Target, plan: Plan, tell: Callable[[int, int, int], None] = lambda running, ended, of: None
) -> Measured:
    """Runs a plan. Raises ValueError if the server, the model or the way to ask for it is not there.

    One request of a single token, with the words of the first prompt shuffled, is sent ahead of all: it finds out which
    options of streams the server takes.
    """
    async with target.open() as session:
        model = await find_model(session, target, plan.model)
        vocab_size = await find_vocab_size(session, target) if plan.needs_vocab_size else None
        calls = plan.calls(vocab_size)
        allow_connections(len(calls) if plan.concurrency is None else plan.concurrency)
        common = plan.common(model)
        bodies = as_bodies(calls, plan.endpoint, common)
        probe = as_bodies([shuffled(calls[0], plan.seed)], plan.endpoint, common)[0] | {"max_tokens": 1}
        probe.pop("min_tokens", None)
        fields = await find_stream_options(session, target, plan.endpoint, probe, plan.stream)

        def send_body(body: bytes, clock: Callable[[], float], due: float | None = None) -> Any:
            return send(session, target, plan.endpoint, body, plan.stream, clock, due)

        spare = [shuffled(calls[index % len(calls)], plan.seed + index) for index in range(plan.warm_up_requests)]
        warm_up = [encode(body | fields) for body in as_bodies(spare, plan.endpoint, common)]
        await asyncio.gather(*(send_body(body, time.perf_counter) for body in warm_up))

        encoded = [encode(body | fields) for body in bodies]

        async def send_index(index: int, due: float | None, clock: Callable[[], float]) -> Answer:
            answer = await send_body(encoded[index], clock, due)
            if not answer.num_prompt_tokens and isinstance(calls[index].prompt, list):
                ids = [one for one in calls[index].prompt if isinstance(one, int)]
                answer.num_prompt_tokens = len(ids)
            return answer

        run = await run_load(
            len(calls),
            send_index,
            None if plan.times is None else plan.times(len(calls)),
            plan.concurrency,
            lambda running, ended: tell(running, ended, len(calls)),
        )
    return Measured(model, run)
