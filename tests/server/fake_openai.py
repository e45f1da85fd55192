"""An OpenAI server that says what a script tells it, for tests of clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BREAK = object()  # closes the connection in the middle of the answer


def chunk(text: str = "", tokens: int | None = None, finish: str | None = None, prompt_tokens: int = 3) -> dict:
    """A chunk of a stream of completions; `tokens` are all so far, if they are to be told."""
    usage = None if tokens is None else {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": usage}


def usage_chunk(tokens: int, prompt_tokens: int = 3) -> dict:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}}


def plain_answer(body: dict) -> list[Any]:
    """As many tokens as were asked for, one a chunk and without a pause."""
    told = (body.get("stream_options") or {}).get("continuous_usage_stats")
    count = body["max_tokens"]
    chunks: list[Any] = [
        chunk(f"w{index} ", index if told else None, "length" if index == count else None)
        for index in range(1, count + 1)
    ]
    return [*chunks, usage_chunk(count), "[DONE]"]


class FakeServer:
    """`script(body)` returns what to answer: a `Response`, or a list of pauses (floats, in seconds), conditions to wait
    for (functions), chunks (dicts or strings), bytes as they are, and BREAK. `seen` are the bodies that came; the first
    is a client's probe."""

    def __init__(self) -> None:
        self.script: Callable[[dict], Any] = plain_answer
        self.seen: list[dict] = []
        self.headers: list[dict] = []
        self.models = ["tiny", "other"]
        self.vocab_size: int | None = 320
        self.api_key: str | None = None
        self.running = self.most_running = 0
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.list_models),
                Route("/tokenizer_info", self.tokenizer_info),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
            ]
        )

    def list_models(self, request: Request) -> Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        return JSONResponse({"data": [{"id": name} for name in self.models]})

    def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse({"vocab_size": self.vocab_size}, 200 if self.vocab_size else 404)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        script = self.script(body)
        if isinstance(script, Response):
            return script
        return StreamingResponse(self.play(script), media_type="text/event-stream")

    async def play(self, script: list[Any]) -> Any:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for step in script:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif callable(step):
                    async with asyncio.timeout(20):
                        while not step():
                            await asyncio.sleep(0.005)
                elif isinstance(step, bytes):
                    yield step
                elif step is BREAK:
                    raise ConnectionResetError("as the script says")
                else:
                    yield f"data: {step if isinstance(step, str) else json.dumps(step)}\n\n".encode()
        finally:
            self.running -= 1


@contextlib.contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    """Serves in a thread, at a free port."""
    config = uvicorn.Config(server.app(), port=0, log_level="critical", lifespan="off", ws="none")
    running = uvicorn.Server(config)
    begun = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(running.serve())
        while not running.started and not task.done():
            await asyncio.sleep(0.002)
        begun.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert begun.wait(20)
        server.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
        yield server
    finally:
        running.should_exit = True
        thread.join(20)
