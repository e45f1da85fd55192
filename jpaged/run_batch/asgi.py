"""Owns the way into an ASGI app without a socket: its start and end, and requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from jpaged.run_batch.batch_output import Reply

App = Callable[..., Awaitable[None]]  # scope, receive, send


@contextlib.asynccontextmanager
async def lifespan(app: App) -> AsyncIterator[None]:
    """The time between an app's start and its end. Raises RuntimeError if it can't start."""
    came: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
    life = asyncio.ensure_future(app(scope, came.get, told.put))

    async def pass_on(event: str) -> None:
        await came.put({"type": f"lifespan.{event}"})
        answer = asyncio.ensure_future(told.get())
        await asyncio.wait([answer, life], return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and answer.result()["type"] == f"lifespan.{event}.failed":
            raise RuntimeError(answer.result().get("message") or f"the app failed in its {event}")
        answer.cancel()

    try:
        await pass_on("startup")
        yield
        if not life.done():
            await pass_on("shutdown")
    finally:
        life.cancel()
        await asyncio.wait([life])
        if not life.cancelled():
            life.exception()  # an app without a lifespan raises, as the specification has it


async def post(app: App, path: str, body: bytes, headers: dict[str, str] | None = None) -> Reply:
    """What the app answers to a request. An error that it raises is an answer with status 500; cancelled, the app sees
    its client leave."""
    given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))} | (
        headers or {}
    )
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }
    has_ended = asyncio.Event()
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    status, request_id = 500, None
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await has_ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message.get("headers", ())).get(b"x-request-id", b"").decode("latin-1") or None
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                has_ended.set()

    try:
        await app(scope, receive, send)
    except Exception as error:
        if not has_ended.is_set():
            text = f"{type(error).__name__}: {error}"
            status, parts = 500, [_error(text)]
    return Reply(status, request_id, b"".join(parts))


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None}}).encode()
