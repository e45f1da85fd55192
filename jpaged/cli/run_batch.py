"""Owns `jpaged run-batch`: a file of requests to a file of answers, by the server's app in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jpaged.cli.options import spinner
from jpaged.cli.serve import config_from, server_options

if TYPE_CHECKING:
    from jpaged.server.config import ServerConfig

GO_ON = "the same command goes on from here"
TELL_SECONDS = 10.0  # between two lines of progress where standard error is no terminal


# Fields of `ServerConfig` that are about clients and their connections, of which there are none here.
OF_CLIENTS = """host port api_keys api_key_file cors_origins root_path ssl_certfile ssl_keyfile pages max_waiting
request_timeout body_timeout shutdown_timeout log_level log_format log_prompts""".split()
NO_TIMEOUT = 10.0**9  # seconds
FILL = 2  # requests under way for each that the engine runs at once: the next ones are there when one has ended


@click.command("run-batch", short_help="Answer a file of requests.")
@click.argument("input_file", metavar="INPUT", type=click.Path(exists=True, dir_okay=False))
@click.argument("output_file", metavar="OUTPUT", type=click.Path(dir_okay=False))
@click.option("--config", "config", type=click.Path(dir_okay=False), help="The YAML file of a server.")
@click.option("--in-flight", type=click.IntRange(min=1), help="Requests under way [default: 2 x max_num_seqs].")
@lambda command: server_options(command, OF_CLIENTS)
def command(input_file: str, output_file: str, config: str | None, in_flight: int | None, **options: Any) -> None:
    """Answer all requests of a batch file, with the model in this process.

    Each line of INPUT is a request as OpenAI's batches have it, {"custom_id": "1", "method": "POST", "url":
    "/v1/chat/completions" or "/v1/completions", "body": {...}}, and has a line in OUTPUT when it is answered,
    {"id": ..., "custom_id": "1", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null},
    in the order in which they end. A line that is no such request has an error in the place of a response.

    Stopped or killed, the same command goes on: what is in OUTPUT is not asked again. An OUTPUT of other requests is
    refused.

    The exit status is 0 if each line has a response, whatever it says; 1 if some are no requests, or if the engine
    crashed.
    """
    found = config_from(config, options)
    serving = ModelServing(found)
    status = run_batch(input_file, output_file, in_flight, serving)
    if serving.is_alive:  # it compiles, and Python would crash while it does
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


class Served(NamedTuple):
    """An app that is ready, what each request to it needs, and how many of them fill it."""

    app: Any
    headers: dict[str, str]
    num_in_flight: int


Serving = Callable[[asyncio.Event], AbstractAsyncContextManager[Served | None]]  # None if the event is set before


def run_batch(input_file: str | Path, output_file: str | Path, in_flight: int | None, serving: Serving) -> int:
    """Answers what OUTPUT has no answer to yet; returns the exit status. `serving` is entered only if there is
    anything to do. Raises ValueError and OSError for files that can't be used.
    """
    from jpaged.run_batch.batch_input import BatchIndex
    from jpaged.run_batch.batch_output import BatchOutput
    from jpaged.run_batch.run import EngineStopped

    if Path(output_file).exists() and Path(output_file).samefile(input_file):
        raise ValueError(f"{output_file} is the file of requests: give another for the answers")
    if not Path(input_file).is_file():
        raise ValueError(f"{input_file} is not a regular file: it is read more than once")
    begun = time.perf_counter()
    with spinner(f"Reading {input_file}"):
        index = BatchIndex(input_file)
    output = BatchOutput(output_file)
    try:
        with spinner(f"Reading {output_file}"):
            tally = output.resume(index)
        before, tokens_before = index.num_done, tally.num_output_tokens
        if before:
            _say(f"{before} of {index.num_lines} lines are done already")
        left = index.num_lines - before
        has_ended, number = True, 0
        if left:
            has_ended, number = asyncio.run(_answer(index, output, tally, in_flight, serving))
    except EngineStopped as error:
        _say(f"{error}; {GO_ON}")
        return 1
    finally:
        output.close()
    _say(summary(tally, index.num_lines, time.perf_counter() - begun, tally.num_output_tokens - tokens_before))
    if not has_ended:
        _say(f"stopped; {GO_ON}")
        return 128 + number
    return 1 if tally.num_bad else 0


async def _answer(index: Any, output: Any, tally: Any, in_flight: int | None, serving: Serving) -> tuple[bool, int]:
    """Whether all was answered, and the signal that ended it if not."""
    from jpaged.run_batch.run import BatchRun

    stop, signals = asyncio.Event(), [0]

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        signals[0] = number
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with serving(stop) as served:
            if served is None:
                return False, signals[0]
            with spinner("Answering") as status:
                run = BatchRun(served.app, index, output, tally, served.headers, _Progress(index.num_lines, status))
                has_ended = await run.run(in_flight or served.num_in_flight, stop)
        return has_ended, signals[0]
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _Progress:
    """Tells how far a run is: on a terminal all the time, else in a line now and then."""

    def __init__(self, num_lines: int, status: Any):
        self._num_lines, self._status = num_lines, status
        self._told = time.perf_counter()

    def __call__(self, tally: Any, running: int) -> None:
        text = f"{tally.num_answered + tally.num_bad} of {self._num_lines} requests, {running} under way"
        if tally.num_failed or tally.num_bad:
            text += f", {tally.num_failed + tally.num_bad} failed"
        if self._status:
            self._status.update(text)
        elif time.perf_counter() - self._told >= TELL_SECONDS:
            self._told = time.perf_counter()
            _say(text)


def summary(tally: Any, num_lines: int, seconds: float, num_new_tokens: int) -> str:
    """The run in a sentence."""
    parts = [f"{tally.num_answered} of {num_lines} requests are answered"]
    if tally.num_failed:
        kinds = ", ".join(
            f"{count} x status {status}" for status, count in sorted(tally.statuses.items()) if not 200 <= status < 300
        )
        parts.append(f"{tally.num_failed} of them with an error ({kinds})")
    if tally.num_bad:
        parts.append(f"{tally.num_bad} lines are no requests (the output has a line for each)")
    parts.append(f"{num_new_tokens} output tokens in this run's {seconds:.1f} s")
    return "; ".join(parts)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class ModelServing:
    """The server's own app, with its model, in this process: called, the context in which it is ready."""

    def __init__(self, config: ServerConfig, build: Any = None):
        level = {"debug": "debug", "error": "error"}.get(config.log_level, "warning")  # no line for each request
        changed = {"request_timeout": NO_TIMEOUT, "shutdown_timeout": 0.0, "log_level": level}
        self._config = config.model_copy(update=changed)
        self._keys = self._config.all_api_keys()
        self._build = build  # as that of `Service`
        self.service: Any = None

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread goes on, after the context has ended."""
        return self.service is not None and self.service.thread.is_alive

    @contextlib.asynccontextmanager
    async def __call__(self, stop: asyncio.Event) -> AsyncIterator[Served | None]:
        from jpaged.run_batch.asgi import lifespan
        from jpaged.server.app import make_app
        from jpaged.server.engine_thread import EngineGone
        from jpaged.server.logs import set_up
        from jpaged.server.service import Service

        set_up(self._config.log_level, self._config.log_format)
        service = self.service = Service(self._config, self._build)
        app = make_app(service)
        async with lifespan(app):
            assert service.starting is not None
            stopping = asyncio.ensure_future(stop.wait())
            with spinner(f"Loading and compiling {self._config.model}") as status:
                if not status:
                    _say(f"loading and compiling {self._config.model}")
                await asyncio.wait([service.starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not service.starting.done():
                yield None
                return
            try:
                await service.starting
            except EngineGone:
                raise service.thread.error or RuntimeError("the engine could not be made") from None
            headers = {"authorization": f"Bearer {self._keys[0]}"} if self._keys else {}
            yield Served(app, headers, FILL * service.thread.engine.limits.max_num_seqs)
