"""Owns `EngineThread`: an engine in a thread of its own, and the streams through which an event loop hears of it."""

from __future__ import annotations

import asyncio
import collections
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jpaged.engine.engine import Engine
from jpaged.engine.outputs import CompletionOutput, Part, RequestOutput
from jpaged.host.request import RequestFailed
from jpaged.host.sampling_params import SamplingParams


class EngineGone(Exception):
    """The engine has no answer to a request, for a reason that is not the request's."""


class Stream:
    """What an event loop hears of one request. To be closed in any case, which ends a request that goes on.

    A reader that is slow finds more in each part, not more parts.
    """

    def __init__(self, thread: EngineThread, request_id: str, num_samples: int, as_it_comes: bool, news: asyncio.Event):
        self.request_id = request_id
        self.num_samples = num_samples
        self.first: RequestOutput | None = None  # the first output that was seen: what is known of the prompt
        self.last: RequestOutput | None = None  # when it has finished
        self.accepted: asyncio.Future[None] = thread.loop.create_future()
        self._thread = thread
        self._as_it_comes = as_it_comes
        self._parts: collections.deque[Part] = collections.deque()  # appended on the engine's thread
        self._seen: dict[int, tuple[int, int]] = {}  # tokens and characters of each sample that were passed on
        self.news = news
        self.error: BaseException | None = None

    def drain(self) -> list[Part]:
        """What each sample gained since the last call, at most one part a sample. Raises what it failed with."""
        if self.error is not None:  # first: until it is closed, the request may go on gaining
            raise self.error
        found: dict[int, Part] = {}
        while self._parts:
            part = self._parts.popleft()
            found[part.index] = found[part.index].then(part) if part.index in found else part
        return list(found.values())

    @property
    def was_accepted(self) -> bool:
        return self.accepted.done() and not self.accepted.cancelled() and self.accepted.exception() is None

    def close(self) -> None:
        """End the request, if it goes on."""
        self._thread.forget(self)

    # On the engine's thread:

    def take(self, output: RequestOutput) -> bool:
        """Takes in how the request stands; whether that is news."""
        if self.first is None:
            self.first = output
        if not (self._as_it_comes or output.finished):
            return False
        before = len(self._parts)
        for sample in output.outputs:
            part = self._gained(sample)
            if part is not None:
                self._parts.append(part)
        if output.finished:
            self.last = output
        return output.finished or len(self._parts) > before

    def _gained(self, sample: CompletionOutput) -> Part | None:
        num_tokens, num_chars = self._seen.get(sample.index, (0, 0))
        if num_tokens < 0:
            return None  # it has ended
        part, ended = sample.part(num_tokens, num_chars), sample.finish_reason is not None
        if not (part.token_ids or part.text or ended):
            return None
        self._seen[sample.index] = (-1, -1) if ended else (num_tokens + len(part.token_ids), num_chars + len(part.text))
        return part

    # On the event loop:

    def fail(self, error: BaseException) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen, should nobody wait for it any more
        self.error = error
        self.news.set()


class EngineThread:
    """Builds an engine and steps it, in a thread. `submit` and `run` are called on the event loop that `start` was.

    state: "starting" until `build` has returned, then "ready"; "crashed" when it or a step has raised, which is `error`
    then; "stopped" after `stop`. On the thread, on_step is called after each step, on_end with the last output of each
    request, on_crash with what a step has raised.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        on_step: Callable[[Engine], None] = lambda engine: None,
        on_end: Callable[[RequestOutput], None] = lambda output: None,
        on_crash: Callable[[BaseException], None] = lambda error: None,
    ):
        self.state = "starting"
        self.error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # until `start`
        self.changed = asyncio.Event()  # the state did
        self.num_sequences = 0  # of all streams that are open
        self._build = build
        self._on_step, self._on_end, self._on_crash = on_step, on_end, on_crash
        self._engine: Engine | None = None
        self._streams: dict[str, Stream] = {}  # of the loop
        self._served: dict[str, Stream] = {}  # of the thread
        # No lock of ours: the loop would wait for it, and then for Python's own, while a step is prepared.
        self._commands: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._stopping = False
        self._num_requests = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def engine(self) -> Engine:
        """For what never changes of it; all else is asked by `run`. Raises EngineGone unless it is ready."""
        if self.state != "ready" or self._engine is None:
            raise EngineGone(f"the engine is {self.state}")
        return self._engine

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        news: asyncio.Event,
        *,
        priority: int = 0,
        as_it_comes: bool = False,
        name: str = "",
    ) -> Stream:
        """Hand a request to the engine. `accepted` of the stream is done when it is queued; it raises what the engine
        does that refuses it (ValueError), and EngineGone. `news` is set when there is any, for other streams, too.
        The engine knows the request by a number and its `name`.
        """
        engine = self.engine
        num_samples = max(sampling.best_of or sampling.n, sampling.num_beams)
        self._num_requests += 1
        stream = Stream(self, f"{self._num_requests}:{name}", num_samples, as_it_comes, news)
        self._streams[stream.request_id] = stream
        self.num_sequences += num_samples

        def add() -> None:
            try:
                engine.add_request(list(prompt), sampling, request_id=stream.request_id, priority=priority)
            except Exception as error:  # of this request, which has left nothing behind: others go on
                self._tell(self._refused, stream, error)
                return
            self._served[stream.request_id] = stream
            self._tell(self._accepted, stream)

        self._commands.put(add)
        return stream

    async def run[T](self, function: Callable[[Engine], T]) -> T:
        """What a function of the engine returns, called on its thread between two steps. Raises EngineGone."""
        engine, answer = self.engine, self.loop.create_future()

        def call() -> None:
            try:
                found = function(engine)
            except Exception as error:
                self._tell(_settle, answer, None, error)
            else:
                self._tell(_settle, answer, found, None)

        self._commands.put(call)
        while not answer.done():
            changed = asyncio.ensure_future(self.changed.wait())
            await asyncio.wait([answer, changed], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if not answer.done() and self.state != "ready":
                raise EngineGone(f"the engine is {self.state}")
        return answer.result()

    def forget(self, stream: Stream) -> None:
        """Let go of a stream; a request that goes on ends."""
        if self._streams.pop(stream.request_id, None) is None:
            return
        self.num_sequences -= stream.num_samples
        if stream.last is None and self._engine is not None:
            engine = self._engine

            def abort() -> None:
                if self._served.pop(stream.request_id, None) is not None:
                    engine.abort(stream.request_id)

            self._commands.put(abort)

    @property
    def num_requests(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    def fail_all(self, message: str) -> None:
        """Give up every request."""
        for stream in list(self._streams.values()):
            stream.fail(EngineGone(message))

    async def stop(self) -> None:
        """End the thread, after the step that it is in. It may be compiling, and is not waited for then."""
        self._stopping = True
        self._commands.put(lambda: None)
        if self.state == "starting":
            return
        await asyncio.to_thread(self._thread.join, 60)

    def _tell(self, function: Callable[..., Any], *values: Any) -> None:
        """Have the event loop call a function."""
        try:
            self.loop.call_soon_threadsafe(function, *values)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            pass

    # On the loop:

    def _accepted(self, stream: Stream) -> None:
        if not stream.accepted.done():
            stream.accepted.set_result(None)

    def _refused(self, stream: Stream, error: BaseException) -> None:
        if self._streams.pop(stream.request_id, None) is not None:
            self.num_sequences -= stream.num_samples
        stream.fail(error)

    def _become(self, state: str, error: BaseException | None = None) -> None:
        self.state, self.error = state, error
        self.changed.set()
        self.changed = asyncio.Event()
        if state != "ready":
            self.fail_all(f"the engine has {state}" + (f": {error}" if error else ""))

    # On the thread:

    def _run(self) -> None:
        try:
            engine = self._engine = self._build()
            self._tell(self._become, "ready")
            while self._take_commands(engine):
                try:
                    outputs = engine.step()
                except RequestFailed as error:  # one of them; with the next step the others go on
                    stream = self._served.pop(error.request_id, None)
                    if stream is not None:
                        self._tell(self._refused, stream, error)
                    continue
                self._on_step(engine)
                self._deliver(outputs)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._tell(self._become, "crashed", error)
            if self._engine is not None:
                self._on_crash(error)
        else:
            self._tell(self._become, "stopped")

    def _take_commands(self, engine: Engine) -> bool:
        """Does what was asked for; waits while there is nothing to do. False when the thread is to end."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if self._stopping:
                return False
            command()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        news = []
        for output in outputs:
            stream = self._served.get(output.request_id)
            if stream is None:
                continue
            if stream.take(output):
                news.append(stream)
            if output.finished:  # after `take`: from then on nobody takes it for one that was given up
                self._on_end(output)
                del self._served[output.request_id]
        if news:
            self._tell(_wake_all, news)


async def parts_of(streams: Sequence[Stream]) -> AsyncIterator[list[tuple[int, Part]]]:
    """What is gained by streams of one `news`, until all have ended: the number of the stream, and a part of one of its
    samples. Raises what one of them failed with."""
    news, going = streams[0].news, list(range(len(streams)))
    while going:
        await news.wait()
        news.clear()
        over = [number for number in going if streams[number].last is not None]  # before what is there is taken
        found = [(number, part) for number in going for part in streams[number].drain()]
        if found:
            yield found
        going = [number for number in going if number not in over]


def _wake_all(streams: list[Stream]) -> None:
    for stream in streams:
        stream.news.set()


def _settle(answer: asyncio.Future, value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
