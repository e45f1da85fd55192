"""A server without a model: a real scheduler and pool whose rows draw a fixed token, and a chat that says a script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from jpaged.host.metrics import EngineStats, Latencies
from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler
from jpaged.host.snapshot import snapshot
from jpaged.host.swap_costs import SwapCosts
from jpaged.host.swap_space import SwapSpace
from jpaged.server.pages import OPEN_PATHS, page_routes
from jpaged.server.watch import Watch


class FakeEngine:
    """What the pages know of an engine, over a scheduler whose steps compute nothing."""

    def __init__(self, num_pages: int = 240, page_size: int = 16, swap_pages: int = 0, **limits: int):
        swap_space = SwapSpace(swap_pages, SwapCosts(page_size, always=True), swap_pages) if swap_pages else None
        limits = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 1024} | limits
        self.pool = PagePool(num_pages + 1, page_size, swap_space)
        self.scheduler = Scheduler(self.pool, reserve=0, **limits)
        self.stats = EngineStats()
        self.ended: list[Request] = []

    def add(self, name: str, prompt: list[int], max_tokens: int = 64, **fields: Any) -> Request:
        request = Request(name, prompt, SamplingParams(max_tokens=None), 0, frozenset(), max_tokens, **fields)
        self.scheduler.add(request)
        return request

    def step(self, times: int = 1) -> None:
        stats = self.stats
        for _ in range(times):
            plan = self.scheduler.schedule()
            if plan is None:
                return
            gained = self.scheduler.update(plan, [7] * len(plan.rows), [-0.5] * len(plan.rows))
            padded = 1 << (plan.num_tokens - 1).bit_length()
            decodes = plan.num_tokens == len(plan.rows)
            stats.record_step(
                num_tokens=plan.num_tokens, batch_tokens=padded, is_decode=decodes, num_output_tokens=len(gained)
            )
            stats.num_page_copies += len(plan.page_copies)
            stats.num_pages_swapped_out += len(plan.moves.swap_out)
            stats.num_pages_swapped_in += len(plan.moves.swap_in)
            stats.num_preemptions = self.scheduler.num_preemptions
            stats.num_cached_tokens = self.scheduler.num_cached_tokens
            self.ended += [request for request in gained if request.finish_reason]

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self.scheduler, self.pool)


class Output:
    """As much of a `RequestOutput` as a `Watch` asks for."""

    def __init__(self, request: Request):
        self.latencies = [Latencies.of(request)]


class FakeServer:
    """Serves the pages at `url` from a thread of its own. `engine` may be changed under `lock`.

    say: what the chat answers with: pieces of text, numbers of seconds to wait, and dicts, which are sent as they are.
    """

    def __init__(self, engine: FakeEngine | None = None):
        self.engine = engine or FakeEngine()
        self.lock = threading.Lock()
        self.say: list[Any] = ["Hello."]
        self.ends = True  # its streams say so
        self.key: str | None = None
        self.error: tuple[int, dict] | None = None  # that the chat answers with
        self.delay = 0.0  # of a snapshot
        self.asked: list[dict[str, Any]] = []
        self.num_gone = 0  # streams that the browser has left before their end
        self.num_looks = 0
        self.watch = Watch(self)
        routes = [
            *page_routes(self.watch),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self._app = Starlette(routes=routes)
        self.start()

    def start(self, port: int = 0) -> None:
        config = uvicorn.Config(
            self._guarded, port=port, log_level="critical", lifespan="off", ws="none", interface="asgi3"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server has not started"
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)

    async def run(self, function: Any) -> Any:
        self.num_looks += 1
        await asyncio.sleep(self.delay)
        with self.lock:
            return function(self.engine)

    async def _guarded(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self.key is not None and scope["path"] not in OPEN_PATHS:
            if dict(scope["headers"]).get(b"authorization") != f"Bearer {self.key}".encode():
                body = {"error": {"message": "Incorrect API key provided.", "type": "authentication_error"}}
                await JSONResponse(body, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _models(self, request: HttpRequest) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "tiny-llama"}, {"id": "tiny-llama:adapter"}]})

    async def _chat(self, request: HttpRequest) -> Any:
        self.asked.append(await request.json())
        if self.error is not None:
            return JSONResponse(self.error[1], self.error[0])
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> Any:
        ended, num_tokens = False, 0
        try:
            for piece in self.say:
                if isinstance(piece, (int, float)):
                    await asyncio.sleep(piece)
                elif isinstance(piece, dict):
                    yield f"data: {json.dumps(piece)}\n\n".encode()
                else:
                    num_tokens += 1
                    choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
                    event = f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()
                    yield event
            if not self.ends:
                return
            yield b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\r\n\r\n'
            usage = json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}})
            yield f": a comment\n\ndata: {usage}\n\ndata: [DONE]\n\n".encode()
            ended = True
        finally:
            self.num_gone += not ended
