"""Owns the connection to a server: what it is asked before the measurement, and one request and its times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import aiohttp

from jpaged.bench_serve.answer import Answer, EventLines, Meter, message_of, read_whole

# What to ask for with a stream, the best first: tokens counted in every chunk, in all, not at all.
STREAM_OPTIONS: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Endpoint = Literal["completions", "chat"]


class Target(NamedTuple):
    """Where requests go, and how."""

    url: str  # without /v1
    api_key: str | None = None
    timeout: float = 600.0  # seconds for one request

    @classmethod
    def of(cls, url: str, api_key: str | None, timeout: float) -> Target:
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url must begin with http:// or https://, got {url!r}")
        return cls(url, api_key or None, timeout)

    def open(self) -> aiohttp.ClientSession:
        """A session that opens as many connections as there are requests at once."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        # Servers close an idle connection after some seconds: a request must not meet that moment.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        return aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=self.timeout)
        )


def allow_connections(count: int) -> None:
    """Raises this process's limit of open files for so many connections, as far as the system lets it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 200
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def find_model(session: aiohttp.ClientSession, target: Target, model: str | None) -> str:
    """The model to ask for: the one named, which must be there, or the server's first. Raises ValueError."""
    status, data = await _get(session, target, "/v1/models")
    if status in (401, 403):
        raise ValueError(f"{target.url} refuses the key (status {status}): give --api-key, or set OPENAI_API_KEY")
    found = data.get("data") if status == 200 and isinstance(data, dict) else None
    names = [one["id"] for one in found or [] if isinstance(one, dict) and isinstance(one.get("id"), str)]
    if model is None:
        if not names:
            raise ValueError(f"{target.url} does not tell its models (status {status}): name one with --model")
        return names[0]
    if names and model not in names:
        raise ValueError(f"{target.url} has no model {model}; it has: {', '.join(names)}")
    return model


async def find_vocab_size(session: aiohttp.ClientSession, target: Target) -> int | None:
    """How many token ids the model has; None of a server that doesn't tell."""
    status, data = await _get(session, target, "/tokenizer_info")
    found = data.get("vocab_size") if status == 200 and isinstance(data, dict) else None
    return found if isinstance(found, int) and found > 0 else None


async def _get(session: aiohttp.ClientSession, target: Target, path: str) -> tuple[int, Any]:
    try:
        async with session.get(target.url + path) as response:
            body = await response.read()
    except TimeoutError as error:
        raise ValueError(f"{target.url}{path} does not answer within {target.timeout:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ValueError(f"no server answers at {target.url}: {error}") from error
    try:
        return response.status, json.loads(body)
    except ValueError:
        return response.status, None


async def find_stream_options(
    session: aiohttp.ClientSession, target: Target, endpoint: Endpoint, body: dict[str, Any], stream: bool
) -> dict[str, Any]:
    """Sends a request and returns the fields that ask for its stream, as this server takes them. Raises ValueError
    if it takes none."""
    answer = Answer(0.0)
    for options in STREAM_OPTIONS if stream else (None,):
        fields: dict[str, Any] = {"stream": stream} | ({"stream_options": options} if options else {})
        answer = await send(session, target, endpoint, encode(body | fields), stream, time.perf_counter)
        if answer.error is None:
            return fields
        if answer.error not in ("status 400", "status 422"):
            break
    raise ValueError(
        f"{target.url}{PATHS[endpoint]} does not answer a first request: {answer.error}"
        + (f" ({answer.detail})" if answer.detail else "")
    )


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    endpoint: Endpoint,
    body: bytes,
    stream: bool,
    clock: Callable[[], float],
    due: float | None = None,
) -> Answer:
    """Sends one request and reads its answer to the end; errors are told in the `Answer`."""
    answer = Answer(clock(), due)
    has_begun = False
    try:
        async with session.post(target.url + PATHS[endpoint], data=body) as response:
            has_begun = response.status == 200
            if not has_begun:
                answer.fail(f"status {response.status}", _told(await response.read()))
            elif stream:
                await _read_stream(response, answer, clock)
            else:
                content = await response.read()
                read_whole(answer, clock(), content)
    except TimeoutError:
        answer.fail("timeout", f"no end within {target.timeout:g} s")
    except (aiohttp.ClientError, OSError) as error:
        answer.fail("broken stream" if has_begun else "connection", str(error) or type(error).__name__)
    if answer.ended is None:
        answer.ended = clock()
    return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer, clock: Callable[[], float]) -> None:
    meter, lines = Meter(answer), EventLines()
    try:
        async for data in response.content.iter_any():  # to its end, so that the connection can be used again
            now = clock()
            for event in lines.feed(data):
                meter.see(now, event)
    except (aiohttp.ClientError, OSError):
        if meter.done is None:
            raise
    now = clock()
    for event in lines.end():
        meter.see(now, event)
    meter.end(now)


def _told(body: bytes) -> str:
    try:
        return message_of(json.loads(body))
    except ValueError:
        return body[:300].decode("utf-8", "replace")
