"""Owns `POST /v1/completions`: texts that go on from prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jpaged.engine.outputs import Part
from jpaged.host.detokenizer import Detokenizer
from jpaged.host.sampling_params import MAX_PROMPT_TOPS, SamplingParams
from jpaged.host.structured import Structured
from jpaged.server.answers import send
from jpaged.server.engine_thread import Stream
from jpaged.server.errors import ApiError
from jpaged.server.prompts import EncodedPrompt
from jpaged.server.protocol import CompletionRequest, sampling_of, structure_of
from jpaged.server.service import Service, new_id
from jpaged.server.token_logprobs import CompletionLogprobs, prompt_entries


async def completions(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    asked = CompletionRequest.read(body)
    model = service.check_model(asked.model)
    service.check_ready()
    cut = asked.truncate_prompt_tokens
    prompts = await service.prompts.of_completion(asked.prompt, asked.add_special_tokens, cut is not None)
    if cut is not None:
        prompts = [EncodedPrompt(None, prompt.token_ids[-cut:]) for prompt in prompts]
    return await send(_Answer(service, asked, model, prompts), request)


class _Answer:
    """To one request. What is sent as it comes, joined, is what is sent at once."""

    def __init__(self, service: Service, asked: CompletionRequest, model: str, prompts: list[EncodedPrompt]):
        self.service, self.asked, self.prompts = service, asked, prompts
        # Nothing is generated for max_tokens=0, but the engine's requests have a token at least: it is left out.
        self.only_prompt = asked.max_tokens == 0
        if asked.echo and asked.logprobs is not None and asked.logprobs > MAX_PROMPT_TOPS:
            raise ApiError(
                400, f"logprobs must be at most {MAX_PROMPT_TOPS} with echo, got {asked.logprobs}", param="logprobs"
            )
        structured, self.shape_key = structure_of(asked, int(service.config.max_schema))
        self.sampling = self._sampling(structured)
        for prompt in prompts:
            service.prompts.check_fit(prompt, None if self.only_prompt else asked.max_tokens, "prompt")
        self.texts = service.texts(asked.return_tokens_as_token_ids)
        self.base = self.chunk_base = {
            "id": asked.request_id or new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.begun: set[int] = set()  # choices of which something was sent
        self.logprobs: dict[int, CompletionLogprobs] = {}  # of each of them
        self.streams: Sequence[Stream] = ()

    def _sampling(self, structured: Structured | None) -> SamplingParams:
        asked, config = self.asked, self.service.config
        if asked.logprobs is not None and asked.logprobs > config.max_logprobs:
            raise ApiError(
                400, f"logprobs must be at most {config.max_logprobs}, got {asked.logprobs}", param="logprobs"
            )
        if (asked.prompt_logprobs or 0) > config.max_logprobs:
            raise ApiError(
                400, f"prompt_logprobs must be at most {config.max_logprobs}, got {asked.prompt_logprobs}",
                param="prompt_logprobs",
            )  # fmt: skip
        scores = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
        return sampling_of(
            asked,
            self.service.defaults,
            config,
            structured,
            logprobs=asked.logprobs,
            prompt_logprobs=max((score for score in scores if score is not None), default=None),
            max_tokens=1 if self.only_prompt else 16 if asked.max_tokens is None else asked.max_tokens,
        )

    def chunks(self, number: int, part: Part) -> list[dict[str, Any]]:
        return [self.choice(number, part)]

    def choice(self, number: int, part: Part) -> dict[str, Any]:
        asked, index = self.asked, number * self.asked.n + part.index
        is_first = index not in self.begun
        self.begun.add(index)
        text, logprobs = ("", None) if self.only_prompt else (part.text, None)
        if asked.echo and is_first:
            text = self._prompt_text(number) + text
        if asked.logprobs is not None:
            logprobs = self._logprobs(number, index, part, is_first)
        finish_reason = part.finish_reason
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self.only_prompt else finish_reason,
            "stop_reason": None if self.only_prompt else part.stop_reason,
        }
        if asked.return_token_ids:
            choice["token_ids"] = [] if self.only_prompt else part.token_ids
            if is_first:
                choice["prompt_token_ids"] = self.prompts[number].token_ids
        if asked.prompt_logprobs is not None and is_first:
            output = self.streams[number].first
            assert output is not None and output.prompt_logprobs is not None
            choice["prompt_logprobs"] = prompt_entries(
                self.texts, output.prompt_token_ids, output.prompt_logprobs, output.prompt_top_logprobs
            )
        return choice

    def _prompt_text(self, number: int) -> str:
        prompt, tokenizer = self.prompts[number], self.service.prompts.tokenizer
        if prompt.text is not None or tokenizer is None:
            return prompt.text or ""
        sampling = self.sampling
        shown = Detokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )
        text = "".join(map(shown.append, prompt.token_ids))
        # A character that begins in the prompt is shown by what follows.
        return text + shown.finish() if self.only_prompt else text

    def _logprobs(self, number: int, index: int, part: Part, is_first: bool) -> dict[str, Any]:
        asked = self.asked
        ids: list[int] = [] if self.only_prompt else part.token_ids
        values: list[float | None] = [] if self.only_prompt else list(part.logprobs or [])
        tops: list[dict[int, float] | None] | None = None
        if asked.logprobs:
            tops = [] if self.only_prompt else list(part.top_logprobs or [])
        if is_first:
            tail = () if asked.echo else self.prompts[number].token_ids
            sampling = self.sampling
            self.logprobs[index] = CompletionLogprobs(
                self.texts, sampling.skip_special_tokens, tail, sampling.spaces_between_special_tokens
            )
            output = self.streams[number].first
            if asked.echo and output is not None and output.prompt_logprobs is not None:
                ids, values = output.prompt_token_ids + ids, output.prompt_logprobs + values
                if tops is not None:
                    found = output.prompt_top_logprobs or []
                    tops = [None if top is None else dict([*top.items()][: asked.logprobs]) for top in found] + tops
        return self.logprobs[index].part(ids, values, tops, is_last=part.finish_reason is not None)

    def num_tokens(self, part: Part) -> int:
        return 0 if self.only_prompt else len(part.token_ids)
