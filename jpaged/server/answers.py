"""Owns how an answer is sent: all at once, or as it comes, with what was used of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from jpaged.engine.outputs import Part
from jpaged.host.sampling_params import SamplingParams
from jpaged.server.engine_thread import Stream, parts_of
from jpaged.server.errors import ApiError
from jpaged.server.http import Events, Json, dumps, while_there
from jpaged.server.prompts import EncodedPrompt
from jpaged.server.protocol import Sampled
from jpaged.server.service import Service


class Answer(Protocol):
    """What an endpoint says of one request."""

    service: Service
    prompts: list[EncodedPrompt]
    sampling: SamplingParams
    shape_key: str | None  # of the body: what says which shape the text is to have
    base: dict[str, Any]  # of the answer, beside its choices
    chunk_base: dict[str, Any]  # of each event
    streams: Sequence[Stream]  # of the prompts, when they are queued

    @property
    def asked(self) -> Sampled: ...

    def choice(self, number: int, part: Part) -> dict[str, Any]:
        """A sample of a prompt, whole."""

    def chunks(self, number: int, part: Part) -> list[dict[str, Any]]:
        """What a sample of a prompt gained."""

    def num_tokens(self, part: Part) -> int:
        """How many tokens of output it is."""


async def send(answer: Answer, request: Request) -> Response:
    """The answer, in the way that was asked for."""
    asked = answer.asked
    if not asked.stream:
        return await while_there(request, _whole(answer))
    if asked.use_beam_search or (asked.best_of or 1) > asked.n:
        raise ApiError(
            400, "which samples are the best is known at the end alone: leave stream or best_of out", param="stream"
        )
    events = _events(answer)
    await anext(events)  # it is queued: what is wrong with it has a status of its own, not 200
    return Events(events)


async def _whole(answer: Answer) -> Response:
    parts: dict[tuple[int, int], Part] = {}
    async with _streams(answer) as answer.streams:
        async for found in parts_of(answer.streams):
            parts |= {(number, part.index): part for number, part in found}
    choices = [answer.choice(number, parts[number, index]) for number, index in sorted(parts)]
    return Json(
        answer.base | {"choices": choices, "usage": _usage(answer, sum(map(answer.num_tokens, parts.values())))}
    )


async def _events(answer: Answer) -> AsyncIterator[bytes]:
    """An empty one first, when all is queued."""
    options, num_tokens = answer.asked.stream_options, 0
    async with _streams(answer) as answer.streams:
        yield b""
        async for found in parts_of(answer.streams):
            for number, part in found:
                num_tokens += answer.num_tokens(part)
                for chunk in answer.chunks(number, part):
                    event = answer.chunk_base | {"choices": [chunk]}
                    if options.continuous_usage_stats:
                        event["usage"] = _usage(answer, num_tokens)
                    elif options.include_usage:
                        event["usage"] = None
                    yield dumps(event)
    if options.include_usage:
        yield dumps(answer.chunk_base | {"choices": [], "usage": _usage(answer, num_tokens)})


def _streams(answer: Answer) -> contextlib.AbstractAsyncContextManager[list[Stream]]:
    asked = answer.asked
    return answer.service.streams(
        answer.prompts,
        answer.sampling,
        priority=asked.priority,
        as_it_comes=asked.stream,
        shape_key=answer.shape_key,
        names={"num_beams": "best_of" if asked.best_of else "n"},
    )


def _usage(answer: Answer, num_output_tokens: int) -> dict[str, Any]:
    """Each prompt counts once, whatever `n`; of the output each token of each choice."""
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in answer.prompts)
    outputs = [stream.last or stream.first for stream in answer.streams]
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs if output)},
    }
