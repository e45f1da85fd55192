"""Owns the run of a batch: so many requests at a time, each answer written as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

from jpaged.run_batch.asgi import App, post
from jpaged.run_batch.batch_input import BadLine, BatchIndex, BatchRequest
from jpaged.run_batch.batch_output import BatchOutput, Reply, Tally, answer_line, error_line, line_id

SYNC_SECONDS = 1.0  # between two times that what was written is made to outlive the machine
RETRY_SECONDS = 0.2  # until a request that found the queue full is sent again


class EngineStopped(Exception):
    """The app serves nothing any more; what is not answered is left to a later run."""


class BatchRun:
    """Answers what is left of a batch. `tally` counts what is in the output."""

    def __init__(
        self,
        app: App,
        index: BatchIndex,
        output: BatchOutput,
        tally: Tally,
        headers: dict[str, str] | None = None,
        tell: Callable[[Tally, int], None] = lambda tally, running: None,
    ):
        self.tally = tally
        self.num_running = 0  # requests that the app has
        self._app, self._output, self._headers, self._tell = app, output, headers or {}, tell
        self._left = index.left()

    async def run(self, num_in_flight: int, stop: asyncio.Event) -> bool:
        """Keeps `num_in_flight` requests with the app; False if `stop` was set before all were answered, and then what
        was under way is given up. Raises EngineStopped, OSError if the output can't be written, and ValueError if the
        input has changed."""
        workers = [asyncio.ensure_future(self._work(self._left)) for _ in range(num_in_flight)]
        stopping = asyncio.ensure_future(stop.wait())
        syncing = asyncio.ensure_future(self._sync())
        try:
            going = set(workers)
            while going and not stop.is_set():
                waited: set[asyncio.Future[Any]] = {*going, stopping, syncing}
                ended, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()  # raises what it failed with
                going -= ended
            return not going
        finally:
            for task in (*workers, stopping, syncing):
                task.cancel()
            await asyncio.gather(*workers, stopping, syncing, return_exceptions=True)
            self._output.sync()

    async def _work(self, lines: Iterator[BatchRequest | BadLine]) -> None:
        for line in lines:
            if isinstance(line, BadLine):
                found = error_line(line)
                await asyncio.sleep(0)  # a file of such lines would leave nobody else a turn
            else:
                found = answer_line(line, await self._ask(line))
            self._output.append(found)
            self.tally.count(found)

    async def _ask(self, request: BatchRequest) -> Reply:
        body = json.dumps(request.body).encode()
        while True:
            self.num_running += 1
            try:
                reply = await post(self._app, request.url, body, self._headers | {"x-request-id": line_id(request)})
            finally:
                self.num_running -= 1
            if reply.status == 503:
                raise EngineStopped(_message(reply))
            if reply.status != 429 or not self.num_running:  # with nothing else there, it will never have room
                return reply
            await asyncio.sleep(RETRY_SECONDS)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self._output.sync)
            self._tell(self.tally, self.num_running)


def _message(reply: Reply) -> str:
    try:
        return json.loads(reply.body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return reply.body[:200].decode("utf-8", "replace")
