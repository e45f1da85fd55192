"""Owns `Service`: the model that a server serves, and what all endpoints ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.engine.engine import Engine
from jpaged.engine.outputs import RequestOutput
from jpaged.host.request import RequestFailed
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured
from jpaged.server.config import ServerConfig
from jpaged.server.engine_thread import EngineGone, EngineThread, Stream
from jpaged.server.errors import ApiError, from_value_error, overloaded, unavailable
from jpaged.server.logs import log, request_id
from jpaged.server.metrics import Metrics
from jpaged.server.prompts import EncodedPrompt, Prompts
from jpaged.server.token_logprobs import TokenTexts
from jpaged.server.tracing import Tracing, note_streams
from jpaged.server.watch import Watch

RETRY_AFTER = 5  # seconds, while the server starts or ends


class Service:
    """One engine, in its thread, and the requests that it has from clients.

    build: makes the engine, on the thread; a test gives one of its own.
    """

    def __init__(self, config: ServerConfig, build: Any = None):
        self.config = config
        self.metrics = Metrics(config.names[0])
        self.tracing = Tracing(config) if config.otlp_endpoint else None
        self.metrics.ready.set_function(lambda: self.is_ready)
        observe = self.metrics.batch_sizes.observe
        self.thread = EngineThread(
            build or (lambda: build_engine(config)),
            on_step=lambda engine: observe(engine.stats.num_rows),
            on_end=self._on_end,
            on_crash=lambda error: log(f"the engine has crashed: {error}", logging.ERROR, error),
        )
        self.watch = Watch(self.thread)
        self.created = int(time.time())
        self.is_ending = False
        self.starting: asyncio.Task[None] | None = None
        self._is_set_up = False  # the rest of this is
        self.prompts: Prompts
        self.defaults: Mapping[str, Any] = {}
        self.tool_format: str | None = None

    def _on_end(self, output: RequestOutput) -> None:
        self.metrics.record(output)
        self.watch.record(output)

    def start(self) -> None:
        """On the event loop that serves; `starting` is done when requests are, or raises EngineGone."""
        self.thread.start()
        self.starting = asyncio.ensure_future(self._until_ready())
        self.starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if nobody waits

    async def _until_ready(self) -> None:
        while self.thread.state == "starting":
            await self.thread.changed.wait()
        if self.thread.state != "ready":
            raise EngineGone(f"the engine has {self.thread.state}: {self.thread.error}") from self.thread.error
        engine = self.thread.engine
        limits = engine.model_config
        self.prompts = Prompts(
            _with_template(engine.tokenizer, self.config),
            limits.vocab_size,
            engine.max_model_len,
            self.config.max_prompts,
        )
        self.defaults = dict(limits.sampling_defaults) if self.config.model_defaults else {}
        self.tool_format = self._tool_format()
        self._is_set_up = True

    def _tool_format(self) -> str | None:
        from jpaged.server.tool_calls import format_of

        if self.config.tool_format != "auto":
            return None if self.config.tool_format == "none" else self.config.tool_format
        templates = {} if self.prompts.tokenizer is None else self.prompts.tokenizer.chat_templates
        return format_of(templates.get("tool_use") or templates.get("default") or "")

    @property
    def is_ready(self) -> bool:
        return self.thread.state == "ready" and self._is_set_up and not self.is_ending

    def check_ready(self) -> None:
        """Raise ApiError while nothing is served."""
        if self.is_ending:
            raise unavailable("the server is about to end: send this to another one", "ending", RETRY_AFTER)
        if self.thread.state == "starting":
            raise unavailable("the model is being loaded and compiled: try again soon", "starting", RETRY_AFTER)
        if not self.is_ready:
            raise unavailable(f"the engine has {self.thread.state}: the server must be started again", "engine_gone")

    def check_model(self, name: str | None) -> str:
        """The name of the model for the answer. Raises ApiError for one that is not served here."""
        names = self.config.names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here: this server has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def texts(self, as_ids: bool = False) -> TokenTexts:
        return TokenTexts(self.prompts.tokenizer, as_ids)

    @contextlib.asynccontextmanager
    async def streams(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        as_it_comes: bool = False,
        names: Mapping[str, str] | None = None,
        shape_key: str | None = None,
    ) -> AsyncIterator[list[Stream]]:
        """A stream for each prompt, all of them queued. Left, whatever the reason, none of them goes on.

        names: fields of `SamplingParams` to keys of the body, where they differ. shape_key: the key of what says which
        shape the text is to have. Raises ApiError and EngineGone.
        """
        self.check_ready()
        if not -(2**31) <= priority < 2**31:
            raise ApiError(400, f"priority must fit in 32 bits, got {priority}", param="priority")
        known = {name: name for name in SamplingParams.__dataclass_fields__} | dict(names or {})
        if sampling.structured is not None:
            known |= dict.fromkeys(("structured", *Structured.__dataclass_fields__), shape_key or "structured")
            try:  # in another thread: it may take a while, in which others are served
                await asyncio.to_thread(self.thread.engine.prepare, sampling)
            except ValueError as error:
                raise from_value_error(error, known) from error
        self._check_room(len(prompts) * max(sampling.best_of or sampling.n, sampling.num_beams))
        streams: list[Stream] = []
        news = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(self.config.request_timeout, self._give_up, streams)
        try:
            for prompt in prompts:
                stream = self.thread.submit(
                    prompt.token_ids,
                    sampling,
                    news,
                    priority=priority,
                    as_it_comes=as_it_comes,
                    name=request_id.get() or "",
                )
                streams.append(stream)
            for stream in streams:
                try:
                    await stream.accepted
                except ValueError as error:
                    raise from_value_error(error, known) from error
            try:
                yield streams
            except RequestFailed as error:
                raise from_value_error(error, known) from error
        finally:
            timer.cancel()
            note_streams(prompts, sampling, streams)
            for stream in streams:
                if stream.last is None and stream.was_accepted:
                    self.metrics.record_abort(stream.num_samples)
                stream.close()

    def _check_room(self, num_sequences: int) -> None:
        limits = self.thread.engine.limits
        most = limits.max_num_seqs + self.config.max_waiting
        if num_sequences > most:  # to try again later would be in vain
            raise ApiError(
                400,
                f"the request has {num_sequences} sequences and this server takes at most {most} at a time",
                param="n",
            )
        if self.thread.num_sequences + num_sequences > most:
            self.metrics.refused.inc()
            raise overloaded(
                f"{self.thread.num_sequences} sequences are running or waiting, and with {num_sequences} more there "
                f"would be more than {most}: try again later"
            )

    def _give_up(self, streams: Sequence[Stream]) -> None:
        """Fail those of them that go on, as they took too long."""
        going = [stream for stream in streams if stream.last is None]
        self.metrics.timeouts.inc(bool(going))
        message = f"the request took more than {self.config.request_timeout:g} seconds"
        for stream in going:
            stream.fail(ApiError(504, message, kind="timeout_error", code="request_timeout"))

    async def end(self) -> None:
        """Takes no more requests; gives those that run their time, and the others up; ends the engine."""
        if self.is_ending:
            return
        self.is_ending = True
        until = time.monotonic() + self.config.shutdown_timeout
        while self.thread.num_requests and self.thread.state == "ready" and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self.thread.fail_all("the server has ended before the request had")
        await asyncio.sleep(0)
        await self.thread.stop()
        if self.tracing:
            await asyncio.to_thread(self.tracing.end)


def build_engine(config: ServerConfig) -> Engine:
    """The engine of a config; loads the model. Slow."""
    from jpaged.checkpoint import load
    from jpaged.small_model import NAME, small_model_path

    path: Any = small_model_path() if config.model == NAME else config.model
    params = load(path, dtype=config.dtype, revision=config.revision)
    log("loaded; compiling what is not in the cache, which takes minutes the first time")
    return Engine(params, config.engine_config)


def _with_template(tokenizer: Any, config: ServerConfig) -> Any:
    if tokenizer is None or config.chat_template is None:
        return tokenizer
    return tokenizer.with_chat_template(Path(config.chat_template).read_text(encoding="utf-8"))


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
