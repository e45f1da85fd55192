"""Owns `serve`: a server as a process, from the socket that it binds to the signal that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jpaged.server.app import make_app
from jpaged.server.config import ServerConfig
from jpaged.server.engine_thread import EngineGone
from jpaged.server.logs import log, set_up
from jpaged.server.service import Service

MAX_HEADERS = 64 * 1024  # bytes
MAX_PIPELINED = 100  # requests of a connection that wait for the answer of one before
_TOO_LONG = f"The head of a request must have at most {MAX_HEADERS} bytes."


def serve(config: ServerConfig) -> int:
    """Serves until it gets SIGTERM or SIGINT; returns the exit status.

    Raises OSError if the address is not to be had, ValueError for keys that can't be read.
    """
    set_up(config.log_level, config.log_format)
    with listening(config) as listener:
        return asyncio.run(_serve(config, listener))


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error
    # asyncio sets it for sockets whose `proto` is TCP, which those of `create_server` don't say: a chunk of a stream
    # would wait until the client has acknowledged the one before, 40 ms where it delays that.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # of its connections: peers may be gone
        yield listener


class _UntilClosed(RequestResponseCycle):
    """Answers HTTP/1.0, which knows no chunks: an answer whose length is not told ends with its connection."""

    _has_length = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = None if self._has_length else False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Protocol(HttpToolsProtocol):
    """Closes connections on which the head of a request does not come in time, or the rest of a body whose request is
    answered already, and refuses what is too long of all that is no body, which the parser would hold. (Of bodies,
    `read_json` sees.) Upgrades to nothing: such a request is answered as if it had not asked for it.
    """

    head_timeout: float
    _timer: asyncio.TimerHandle | None = None
    _in_head = True  # the next that comes belongs to one
    _num_held = 0  # bytes that have come since a body went on, or a request was whole
    _upgrades = False  # the request whose head has just come asks for another protocol
    _parsed = _rest = b""  # bytes that the parser got, and that it is to get then
    _cycles: Sequence[RequestResponseCycle] = ()  # of all requests that may not be answered yet; `cycle` is the last

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        self._num_held += len(data)
        self._rest = data
        while self._rest and not self.transport.is_closing():
            self._parsed, self._rest = self._rest, b""
            super().data_received(self._parsed)
        if self._num_held > MAX_HEADERS and not self.transport.is_closing():
            self.send_400_response(_TOO_LONG)
        self._watch_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # behind a body they say nothing that is asked for
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADERS:
            raise httptools.HttpParserError(_TOO_LONG)  # answered with a 400
        if len(self.pipeline) >= MAX_PIPELINED:
            raise httptools.HttpParserError("too many requests wait for the answer of one before")
        self._upgrades = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._upgrades:
            return
        self._in_head = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UntilClosed  # it has not begun
        self._cycles = [*self._answering, self.cycle]
        self.flow.resume_reading()  # else nobody sees that a client has left which has sent another request

    def on_body(self, body: bytes) -> None:
        self._num_held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._in_head, self._num_held = True, 0
        self._stop_watching()  # the next has its own time
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Has the head parsed again without that wish, and what follows it: the parser ends such a request there."""
        if not self._upgrades:
            return
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._rest = b"\r\n".join([*lines, b"", self._parsed[error.args[0] :]])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as `HttpToolsProtocol` does

    def send_400_response(self, msg: str) -> None:
        if any(cycle.response_started for cycle in self._answering):
            self.transport.close()  # it would be read as a part of that answer
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        for cycle in self._answering:  # `HttpToolsProtocol` tells the last alone
            cycle.disconnected = True
            cycle.message_event.set()

    @property
    def _answering(self) -> list[RequestResponseCycle]:
        """The requests that are not answered yet."""
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout, self.transport.close)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpServer(uvicorn.Server):
    """Leaves signals alone: what they lead to is decided in `serve`."""

    def __init__(self, service: Service):
        config = service.config
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=type("Protocol", (_Protocol,), {"head_timeout": config.body_timeout}),
                loop="asyncio",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                root_path=config.root_path,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: ServerConfig, listener: socket.socket) -> int:
    service = Service(config)
    server = HttpServer(service)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if told.is_set():
            log("told to end twice: ending now", logging.WARNING)
            os._exit(128 + number)
        log(
            f"told to end: taking no more requests; those that run get {config.shutdown_timeout:g} seconds (a second "
            "signal ends them now)",
            signal=signal.Signals(number).name,
            requests=service.thread.num_requests,
        )
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    scheme = "https" if config.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.all_api_keys():
        log(f"whoever reaches {config.host} may ask: no API key is needed", logging.WARNING)
    log("starting", model=config.model, url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    ending = asyncio.ensure_future(told.wait())
    starting = asyncio.ensure_future(_start(service))
    crashing = asyncio.ensure_future(_until_crashed(service))
    status = 0
    await asyncio.wait([starting, ending, serving], return_when=asyncio.FIRST_COMPLETED)
    if starting.done() and not starting.result():
        status = 1
    else:
        await asyncio.wait([ending, serving, crashing], return_when=asyncio.FIRST_COMPLETED)
        if crashing.done():
            status = 1
            if not config.exit_on_crash:  # then /health says so until somebody ends the process
                await asyncio.wait([ending, serving], return_when=asyncio.FIRST_COMPLETED)
    await service.end()
    server.should_exit = True
    await serving
    for task in (starting, ending, crashing):
        task.cancel()
    log("ended", status=status)
    if service.thread.is_alive:  # it compiles, and Python would crash while it does
        sys.stderr.flush()
        os._exit(status)
    return status


async def _until_crashed(service: Service) -> None:
    while service.thread.state != "crashed":
        await service.thread.changed.wait()


async def _start(service: Service) -> bool:
    """Returns when requests are served, or False if that failed."""
    while service.starting is None:  # the app's lifespan has not begun
        await asyncio.sleep(0.01)
    try:
        await service.starting
    except EngineGone:
        log(
            f"the engine could not be made: {service.thread.error}",
            logging.ERROR,
            # A sentence of ours says what to do; anything else is a fault, of which the place is told.
            None if isinstance(service.thread.error, ValueError | OSError) else service.thread.error,
        )
        return False
    engine = service.thread.engine
    log(
        "ready",
        seconds=round(engine.warm_up_seconds, 1),
        max_num_seqs=engine.limits.max_num_seqs,
        max_model_len=engine.max_model_len,
        num_pages=engine.num_pages,
        sampling_defaults=service.defaults,
        tool_format=service.tool_format,
        pages="/dashboard and /chat" if service.config.pages else None,
    )
    return True
