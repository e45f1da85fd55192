"""Owns `POST /v1/generate`: token ids in, token ids and log-probabilities out, for rollout workers."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jpaged.engine.outputs import Part
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured
from jpaged.server.engine_thread import Stream, parts_of
from jpaged.server.errors import ApiError
from jpaged.server.http import Events, Json, dumps, while_there
from jpaged.server.prompts import EncodedPrompt
from jpaged.server.protocol import GenerateRequest, check_size
from jpaged.server.service import Service, new_id
from jpaged.server.token_logprobs import finite

# Of `SamplingParams`, what makes no sense where there is no text, or is a function.
LEFT_OUT = {"logits_processor", "stop", "include_stop_str_in_output", "skip_special_tokens", "detokenize"}
LEFT_OUT |= {"spaces_between_special_tokens"}
FIELDS = sorted(set(SamplingParams.__dataclass_fields__) - LEFT_OUT)


async def rollouts(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    asked = GenerateRequest.read(body)
    for name in (name for name in FIELDS if body.get(name) is not None):
        raise ApiError(400, f"{name} belongs into sampling_params", param=name)
    service.check_model(asked.model)
    service.check_ready()
    sampling = _sampling(service, asked)
    prompts = await service.prompts.of_completion(
        asked.token_ids, cut=sampling.truncate_prompt_tokens is not None, name="token_ids"
    )
    for prompt in prompts:
        if sampling.truncate_prompt_tokens is None:
            service.prompts.check_fit(prompt, sampling.max_tokens, "token_ids")
    answer = _Answer(service, asked, prompts, sampling)
    if not asked.stream:
        return await while_there(request, answer.whole())
    if sampling.num_beams > 1 or (sampling.best_of or 1) > sampling.n:
        raise ApiError(400, "which samples are the best is known at the end alone: leave stream out", param="stream")
    events = answer.events()
    await anext(events)
    return Events(events)


def _sampling(service: Service, asked: GenerateRequest) -> SamplingParams:
    given = {name: value for name, value in asked.sampling_params.items() if value is not None}
    for name in given:
        if name in LEFT_OUT:
            raise ApiError(
                400,
                f"{name} is about texts, of which there are none here: use /v1/completions",
                param="sampling_params",
            )
        if name not in FIELDS:
            near = difflib.get_close_matches(name[:100], FIELDS, n=1)
            cure = f"did you mean {near[0]}?" if near else f"they are {', '.join(FIELDS)}"
            raise ApiError(400, f"sampling_params has no {name[:100]!r}: {cure}", param="sampling_params")
    config = service.config
    try:
        if "structured" in given:
            shape = given["structured"]
            names = set(Structured.__dataclass_fields__)
            if not isinstance(shape, dict) or not shape.keys() <= names:
                raise ValueError(f"structured must be an object with one of {', '.join(sorted(names))}")
            check_size("structured", shape, int(config.max_schema), "sampling_params")
            given["structured"] = Structured(**shape)
        defaults = service.defaults if given.get("num_beams", 1) == 1 else {}  # which a beam search would contradict
        found = SamplingParams(**{"logprobs": 0, **defaults, **given}, detokenize=False)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param="sampling_params") from error
    for name, value, most in (
        ("n", found.n, config.max_n),
        ("best_of", found.best_of or 1, config.max_n),
        ("logprobs", found.num_top_logprobs % 2**62, config.max_logprobs),
        ("prompt_logprobs", found.prompt_logprobs or 0, config.max_logprobs),
    ):
        if value > most:
            raise ApiError(400, f"{name} must be at most {most}, got {getattr(found, name)}", param="sampling_params")
    return found


class _Answer:
    """To one request."""

    def __init__(
        self,
        service: Service,
        asked: GenerateRequest,
        prompts: list[EncodedPrompt],
        sampling: SamplingParams,
    ):
        self.service, self.asked, self.prompts, self.sampling = service, asked, prompts, sampling
        self.base = {"id": new_id("gen")}
        self.streams: list[Stream] = []

    def output(self, number: int, part: Part) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_index": number, "index": part.index, "token_ids": part.token_ids}
        if part.logprobs is not None:
            found["logprobs"] = [finite(value) for value in part.logprobs]
        if part.top_logprobs is not None:
            found["top_logprobs"] = [_pairs(top) for top in part.top_logprobs]
        return found | {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}

    def prompt(self, number: int) -> dict[str, Any]:
        """What is told of a prompt."""
        output = self.streams[number].last
        assert output is not None
        found: dict[str, Any] = {
            "num_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
        }
        if output.prompt_logprobs is not None:
            found["logprobs"] = [None if value is None else finite(value) for value in output.prompt_logprobs]
        if output.prompt_top_logprobs is not None:
            found["top_logprobs"] = [None if top is None else _pairs(top) for top in output.prompt_top_logprobs]
        return found

    def _streams(self) -> contextlib.AbstractAsyncContextManager[list[Stream]]:
        return self.service.streams(
            self.prompts,
            self.sampling,
            priority=self.asked.priority,
            as_it_comes=self.asked.stream,
            names=dict.fromkeys(FIELDS, "sampling_params"),
            shape_key="sampling_params",
        )

    async def whole(self) -> Response:
        parts: dict[tuple[int, int], Part] = {}
        async with self._streams() as self.streams:
            async for found in parts_of(self.streams):
                parts |= {(number, part.index): part for number, part in found}
        outputs = [self.output(number, parts[number, index]) for number, index in sorted(parts)]
        return Json(self.base | {"outputs": outputs, "prompts": [self.prompt(i) for i in range(len(self.prompts))]})

    async def events(self) -> AsyncIterator[bytes]:
        async with self._streams() as self.streams:
            yield b""
            async for found in parts_of(self.streams):
                yield dumps(self.base | {"outputs": [self.output(number, part) for number, part in found]})
        yield dumps(self.base | {"outputs": [], "prompts": [self.prompt(i) for i in range(len(self.prompts))]})


def _pairs(top: Mapping[int, float]) -> dict[str, float]:
    return {str(token_id): finite(value) for token_id, value in top.items()}
