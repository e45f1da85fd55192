"""`jpaged run-batch` as a process to kill, with an app that repeats its prompts or with a small model:
`python tests/server/killable_batch.py fake|model LOG LAST PIECE run-batch INPUT OUTPUT ...`.

LOG gets the id of each request that the app is asked. The one of line LAST takes a while, so that a run near its end
can be killed. The disk is slow and takes PIECE bytes at a time, so that a line takes many writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), *(str(tests / name) for name in ("server", "host", "device", "engine"))]

from jpaged.cli import main, run_batch

LAST_SECONDS = 1.5
WRITE_SECONDS = 0.0005

write = os.write


class Watched:
    """In the place of `ModelServing`: another serving, whose app's requests are told."""

    def __init__(self, serving, is_alive, log, last):
        self._serving, self._is_alive, self._last = serving, is_alive, last
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @property
    def is_alive(self):
        return self._is_alive()

    @contextlib.asynccontextmanager
    async def __call__(self, stop):
        async with self._serving(stop) as served:

            async def app(scope, receive, send):
                if scope["type"] == "http":
                    line_id = dict(scope["headers"])[b"x-request-id"]
                    write(self._log, line_id + b"\n")
                    if int(line_id.split(b"_")[2]) == self._last:
                        await asyncio.sleep(LAST_SECONDS)
                await served.app(scope, receive, send)

            yield served and served._replace(app=app)


def be_killable(kind, log, last, piece):
    def slow_write(file, data):
        time.sleep(WRITE_SECONDS)
        return write(file, data[: int(piece)])

    def fake(config):
        from test_run_batch import FakeApp

        return Watched(FakeApp(seconds=0.001).serving, lambda: False, log, int(last))

    def model(config):
        import server_support as support

        serving = ModelServing(config, lambda: support.build(support.random_params()))
        return Watched(serving, lambda: serving.is_alive, log, int(last))

    module = sys.modules[run_batch.callback.__module__]
    ModelServing = module.ModelServing
    module.ModelServing = {"fake": fake, "model": model}[kind]
    os.write = slow_write


if __name__ == "__main__":
    be_killable(*sys.argv[1:5])
    main(sys.argv[5:])
