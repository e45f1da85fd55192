"""Owns `Watch`: what the dashboard shows of an engine, sampled while somebody looks at it."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from jpaged.host.metrics import Latencies, percentiles

if TYPE_CHECKING:  # it needs JAX
    from jpaged.engine.engine import Engine
    from jpaged.engine.outputs import RequestOutput

T = TypeVar("T")

MIN_INTERVAL = 0.25  # seconds between two samples, however many look
LOOK_AWAY = 3.0  # seconds without a question after which nobody looks: what was counted meanwhile is no rate of now
NUM_SAMPLES = 480  # that are kept, two minutes or more
LATENCY_WINDOW = 60.0  # seconds
MAX_ENDED = 1024  # requests whose latencies are kept
MAX_GAPS = 256  # of each of them
# What a sample says about the time since the one before, and the field of `EngineStats` that counts it.
COUNTED = {
    "steps": "num_steps",
    "decode_steps": "num_decode_steps",
    "scheduled_tokens": "num_scheduled_tokens",
    "padded_tokens": "num_padded_tokens",
    "output_tokens": "num_output_tokens",
    "cached_tokens": "num_cached_tokens",
    "preemptions": "num_preemptions",
    "page_copies": "num_page_copies",
    "swapped_out": "num_pages_swapped_out",
    "swapped_in": "num_pages_swapped_in",
    "compiles": "num_compiles",
}


class Runner(Protocol):
    """Runs functions on the engine's thread, between two steps."""

    async def run(self, function: Callable[[Engine], T]) -> T: ...


class _Ended(NamedTuple):
    """A request that has ended."""

    when: float
    latencies: Latencies


class Watch:
    """Nothing is asked of the engine but in answer to `state`, and at most four times a second. `record` is to be
    called with each output that is finished; it keeps nothing while nobody looks."""

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.monotonic):
        self._runner = runner
        self._clock = clock
        self._began = clock()
        self._lock = asyncio.Lock()
        self._samples: deque[dict[str, float]] = deque(maxlen=NUM_SAMPLES)
        self._ended: deque[_Ended] = deque(maxlen=MAX_ENDED)
        self._totals: dict[str, Any] = {}
        self._sampled: float | None = None  # when the last sample was taken
        self._answered = float("-inf")
        self._watched_since = float("-inf")
        self._common = ""  # of all answers until the next sample: JSON without its last brace

    def record(self, output: RequestOutput) -> None:
        """Takes in the latencies of a request that has ended."""
        now = self._clock()
        if now - self._answered > LOOK_AWAY:
            return
        for latencies in output.latencies:
            stride = -(-len(latencies.itl) // MAX_GAPS) or 1
            self._ended.append(_Ended(now, latencies._replace(itl=latencies.itl[::stride])))

    async def state(self, since: float = float("-inf")) -> str:
        """What is known now, as JSON: the engine's snapshot, its totals, latencies over the last minute, and the
        samples after the time `since`, in seconds as the answers' own `time`."""
        async with self._lock:  # of several who ask at once, one takes the sample
            asked = self._clock()
            if asked - self._answered > LOOK_AWAY:
                self._sampled = None
                self._ended.clear()
                self._watched_since = asked
            if self._sampled is None or asked - self._sampled >= MIN_INTERVAL:
                await self._sample()
            self._answered = self._clock()  # a long step is no time that nobody looked
            samples = [sample for sample in self._samples if sample["time"] > since]
            return f'{self._common},"history":{_dumps(samples)}}}'

    async def _sample(self) -> None:
        snapshot, totals = await self._runner.run(lambda engine: (engine.snapshot(), engine.stats.as_dict()))
        now = self._clock()
        if self._sampled is not None:
            counted = {name: totals[field] - self._totals[field] for name, field in COUNTED.items()}
            levels = {"running": snapshot["num_running"], "waiting": snapshot["num_waiting"]} | snapshot["pages"]
            self._samples.append({"time": now - self._began, "seconds": now - self._sampled, **counted, **levels})
        self._sampled, self._totals = now, totals
        common = {
            "time": now - self._began,
            "snapshot": snapshot,
            "totals": totals,
            "latencies": self._latencies(now),
        }
        self._common = _dumps(common)[:-1]

    def _latencies(self, now: float) -> dict[str, Any]:
        ended = [one.latencies for one in list(self._ended) if now - one.when <= LATENCY_WINDOW]
        return {
            "seconds": min(now - self._watched_since, LATENCY_WINDOW),
            "num_requests": len(ended),
            "ttft": percentiles([one.ttft for one in ended if one.ttft is not None]),
            "tpot": percentiles([one.tpot for one in ended if one.tpot is not None]),
            "itl": percentiles([gap for one in ended for gap in one.itl]),
            "e2e_latency": percentiles([one.e2e_latency for one in ended if one.e2e_latency is not None]),
        }


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
