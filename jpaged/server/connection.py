"""Owns `Connection`: uvicorn's HTTP on one connection, with bounds on what a client can make it hold and wait for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADERS = 64 * 1024  # bytes
MAX_PIPELINED = 100  # requests of a connection that wait for the answer of one before
_TOO_LONG = f"The head of a request must have at most {MAX_HEADERS} bytes."


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


class Connection(HttpToolsProtocol):
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
