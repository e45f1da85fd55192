"""Owns how bodies come in and answers go out: JSON, server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pydantic_core
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jpaged.server.engine_thread import EngineGone
from jpaged.server.errors import ApiError, unavailable
from jpaged.server.tracing import note_error

LEAST_LOGPROB = -9999.0  # JSON has no infinity
_LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}  # JSON escapes the others
TOO_SLOW = 408
LEFT = 499  # the client did, before it was answered; seen in logs alone


class Json(Response):
    """A JSON answer. Lone surrogates and the like are escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def error_response(error: ApiError) -> Response:
    note_error(error)
    return Response(error.json(), error.status, error.headers, "application/json")


async def read_json(request: Request, max_body: int, timeout: float) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError for anything else, and before more than `max_body` bytes are held."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be JSON, with Content-Type: application/json, got {kind[:80] or 'none'}")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "the body must not be compressed: leave Content-Encoding out")
    too_large = ApiError(413, f"the body must have at most {max_body} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                size += len(part)
                if size > max_body:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {timeout:g} seconds", code="body_timeout") from None
    raw = b"".join(parts)
    try:
        body = pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(body).__name__}", code="invalid_json")
    if b"\\u0000" in raw and _has_nul(body):
        raise ApiError(400, "the body has a NUL character (\\u0000) in a text: drop it", code="invalid_json")
    return body


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _has_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_nul(item) for item in value)


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there[T](request: Request, answer: Awaitable[T]) -> T:
    """What `answer` comes to; it is cancelled, and ClientDisconnect raised, if the client leaves first."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait([work])


class Events(Response):
    """Server-sent events, each a JSON text, and `[DONE]`. An ApiError among them is sent as one, and is the last.

    When the client leaves, `events` is closed. Nothing is taken from it while earlier events wait to be sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], ends_with: bytes | None = b"[DONE]"):
        super().__init__(b"", 200, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._ends_with = ends_with
        self.on_outcome: Callable[[int], None] = lambda status: None  # for the log, where it is not 200
        self.time_limit: float | None = None  # seconds, for a client that stays and reads too slowly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
                if self._ends_with is not None:
                    end = b"data: " + self._ends_with + b"\n\n"
                    await send({"type": "http.response.body", "body": end, "more_body": True})
            except (ApiError, EngineGone) as failed:  # too late for a status
                error = failed if isinstance(failed, ApiError) else unavailable(str(failed), "engine_gone")
                self.on_outcome(error.status)
                note_error(error)
                body = b"data: " + error.json() + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        work = asyncio.ensure_future(write())
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([work, gone], timeout=self.time_limit, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self.on_outcome(LEFT if gone.done() else TOO_SLOW)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
            await self._events.aclose()  # type: ignore[attr-defined]


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8, on one line also for clients that take all of Unicode's line breaks for one."""
    raw = pydantic_core.to_json(value)
    if not raw.isascii():
        for char, escaped in _LINE_BREAKS.items():
            raw = raw.replace(char, escaped)
    return raw
