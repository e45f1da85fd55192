"""Owns what one request measured: from the events of a stream to the times of its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What became of one request. Times are in seconds since the measurement began.

    ttft and e2e_latency count from the moment of sending, so a new connection is part of them; e2e_latency ends when
    the response has ended. tpot is the time from the first token to the last, divided by the number of tokens less one.

    How the gaps between tokens (itl) are counted: a chunk of a stream may hold several tokens. If the server tells with
    each chunk how many there are (`continuous_usage_stats`), k tokens in one chunk are k tokens at one moment: one gap
    to the chunk before, and k - 1 gaps of zero, as `jpaged bench throughput` counts them. So the mean over gaps is the
    mean time of a token, and the greatest gap is what a reader has waited. If it doesn't tell, each chunk with content
    counts as one token for the gaps alone (`exact` is False); the number of tokens is still that of `usage`.
    """

    sent: float
    due: float | None = None  # None where a request is sent as soon as another has ended
    ended: float | None = None
    pieces: list[tuple[float, float]] = field(default_factory=list)  # when tokens came, and how many
    exact: bool = True
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None  # its kind; None for an answer that is whole
    detail: str = ""

    @property
    def lag(self) -> float | None:
        """How much later than due the client has sent it."""
        return None if self.due is None else self.sent - self.due

    @property
    def ttft(self) -> float | None:
        return self.pieces[0][0] - self.sent if self.pieces else None

    @property
    def tpot(self) -> float | None:
        if not self.pieces or self.num_output_tokens < 2:
            return None
        return (self.pieces[-1][0] - self.pieces[0][0]) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        gaps: list[float] = []
        before = None
        for time, count in self.pieces:
            gaps += [] if before is None else [time - before]
            gaps += [0.0] * (round(count) - 1 if self.exact else 0)
            before = time
        return gaps

    @property
    def e2e_latency(self) -> float | None:
        return None if self.ended is None else self.ended - self.sent

    def fail(self, kind: str, detail: str = "") -> None:
        if self.error is None:
            self.error, self.detail = kind, " ".join(detail.split())[:300]


class EventLines:
    """Cuts the bytes of a server-sent event stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        """The events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def end(self) -> list[str]:
        """The event that lacks its empty line at the end of the stream, if there is one."""
        return self.feed(b"\n\n")


class Meter:
    """Fills an `Answer` from the events of its stream, each of them with the time at which it came."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.done: float | None = None  # when the stream has told its end
        self._chunks: list[tuple[float, bool, int | None]] = []  # time, with content, tokens so far if told
        self._finished = False

    def see(self, now: float, event: str) -> None:
        if event == "[DONE]":
            self.done = now
            return
        try:
            data = json.loads(event)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            self.answer.fail("broken stream", f"an event that is no JSON object: {event[:80]}")
            return
        if data.get("error"):
            self.answer.fail("error in the stream", message_of(data))
            return
        choices = [one for one in data.get("choices") or [] if isinstance(one, dict)]
        usage = data["usage"] if isinstance(data.get("usage"), dict) else {}
        self._finished = self._finished or any(one.get("finish_reason") for one in choices)
        self._chunks.append((now, any(map(has_content, choices)), usage.get("completion_tokens")))
        self.answer.num_prompt_tokens = usage.get("prompt_tokens") or self.answer.num_prompt_tokens

    def end(self, now: float) -> None:
        """To be called when the stream has ended, or broken off."""
        if self.done is None and not self._finished:
            self.answer.fail("broken stream", "it ended before its end was told")
        self.answer.ended = now if self.done is None else self.done
        told = [count for *_, count in self._chunks if count is not None]
        shown = [(time, count) for time, content, count in self._chunks if content]
        self.answer.num_output_tokens = told[-1] if told else len(shown)
        self.answer.exact = bool(told) and all(count is not None for _, count in shown)
        if self.answer.exact:
            before = 0
            for time, _, count in self._chunks:
                if count is not None and count > before:
                    self.answer.pieces.append((time, count - before))
                    before = count
        else:
            self.answer.pieces = [(time, self.answer.num_output_tokens / len(shown)) for time, _ in shown]


def has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk holds something that was generated; the first of a chat only names the role."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal"))


def read_whole(answer: Answer, now: float, body: bytes) -> None:
    """Fills an `Answer` from a response that was not streamed: there is nothing to say of single tokens."""
    answer.ended = now
    try:
        usage = json.loads(body).get("usage") or {}
        answer.num_prompt_tokens = usage.get("prompt_tokens") or answer.num_prompt_tokens
        answer.num_output_tokens = usage.get("completion_tokens") or 0
    except (ValueError, AttributeError):
        answer.fail("not JSON", body[:80].decode("utf-8", "replace"))


def message_of(data: Any) -> str:
    """The message of an error as OpenAI servers tell it, else all that was told."""
    error = data.get("error", data) if isinstance(data, dict) else data
    found = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return str(found if found is not None else error)
