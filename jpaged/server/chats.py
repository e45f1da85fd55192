"""Owns `POST /v1/chat/completions`: the assistant's answer to messages, or its calls of tools."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jpaged.engine.outputs import Part
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured
from jpaged.server.answers import send
from jpaged.server.engine_thread import Stream
from jpaged.server.errors import ApiError
from jpaged.server.prompts import EncodedPrompt
from jpaged.server.protocol import ChatRequest, check_size, sampling_of, structure_of
from jpaged.server.service import Service, new_id
from jpaged.server.token_logprobs import chat_logprobs, prompt_entries
from jpaged.server.tool_calls import (
    CallStart,
    Content,
    EndOfTurn,
    ForcedCalls,
    Piece,
    ToolCallParser,
    needs_special_tokens,
)
from jpaged.server.tools import check_tools, forced_schema


async def chats(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    asked = ChatRequest.read(body)
    model = service.check_model(asked.model)
    for key in ("functions", "function_call"):
        if body.get(key) is not None:
            raise ApiError(400, f"{key} is not supported: use tools and tool_choice", param=key)
    service.check_ready()
    tools = _Tools(service, asked)
    prompt = await service.prompts.of_chat(asked, tools.shown)  # first: its template may have no place for tools
    tools.check_format()
    if asked.truncate_prompt_tokens is not None:
        prompt = EncodedPrompt(None, prompt.token_ids[-asked.truncate_prompt_tokens :])
    return await send(_Answer(service, asked, model, prompt, tools), request)


class _Tools:
    """What a request says of tools, and how an answer is read for calls of them."""

    def __init__(self, service: Service, asked: ChatRequest):
        tools, choice = asked.tools or [], asked.tool_choice
        try:
            check_tools(tools, choice)
        except ValueError as error:
            raise ApiError(400, str(error), param="tool_choice" if "tool_choice" in str(error) else "tools") from error
        check_size("tools", tools, int(service.config.max_schema), "tools")
        self.shown = tools if tools and choice != "none" else None  # to the model
        self.structured: Structured | None = None
        self.shows_special_tokens = False
        self._choice, self._format, self._parallel = choice, service.tool_format, asked.parallel_tool_calls
        self._tokenizer = service.prompts.tokenizer
        if self.shown is None:
            return
        if choice not in (None, "auto"):
            schema = forced_schema(tools, choice, asked.parallel_tool_calls)
            # Nobody sees the white space between its parts, of which a weak model may write without end.
            self.structured = Structured(json=schema | {"x-guidance": {"whitespace_flexible": False}})
        elif self._format is not None and self._tokenizer is not None:
            special = {self._shown(token_id) for token_id in self._tokenizer.special_ids}
            self.shows_special_tokens = needs_special_tokens(self._format, special)

    def check_format(self) -> None:
        """Raise ApiError if calls would not be found in what the model writes."""
        if self.shown is not None and self.structured is None and self._format is None:
            raise ApiError(
                400,
                "it is not known how this model writes tool calls: use tool_choice 'required' or name a function, or "
                "start the server with tool_format",
                param="tools",
            )

    def reader(self, ending_ids: frozenset[int]) -> _Reader | None:
        """For one answer; None if it is text alone."""
        if self.shown is None:
            return None
        if self.structured is not None:
            assert self._choice is not None
            return _Reader(ForcedCalls(self._choice, self._format), None, self._parallel)
        assert self._format is not None
        ending = None
        if self.shows_special_tokens and self._tokenizer is not None:
            ending = EndOfTurn(map(self._shown, ending_ids))
        return _Reader(ToolCallParser(self._format), ending, self._parallel)

    def _shown(self, token_id: int) -> str:
        assert self._tokenizer is not None
        return (self._tokenizer.piece(token_id, skip_special_tokens=False) or b"").decode(errors="replace")


class _Reader:
    """An answer as content and calls, part by part."""

    def __init__(self, parser: ToolCallParser | ForcedCalls, ending: EndOfTurn | None, parallel: bool):
        self._parser, self._ending, self._parallel = parser, ending, parallel

    def pieces(self, part: Part) -> list[Piece]:
        text, ends = part.text, part.finish_reason is not None
        if self._ending is not None:
            text = self._ending.append(text)
            if ends:
                text += self._ending.finish(part.finish_reason == "stop" and not isinstance(part.stop_reason, str))
        found = [*self._parser.append(text), *(self._parser.finish() if ends else ())]
        # Without parallel_tool_calls the first one counts.
        return [piece for piece in found if self._parallel or isinstance(piece, Content) or piece.index == 0]

    @property
    def has_calls(self) -> bool:
        return self._parser.has_calls


class _Answer:
    """To one request. What is sent as it comes, joined, is what is sent at once."""

    def __init__(self, service: Service, asked: ChatRequest, model: str, prompt: EncodedPrompt, tools: _Tools):
        self.service, self.asked, self.prompts = service, asked, [prompt]
        self.tools = tools
        self.sampling = self._sampling()
        most = "max_completion_tokens" if asked.max_completion_tokens is not None else "max_tokens"
        service.prompts.check_fit(prompt, getattr(asked, most), "messages", most)
        self.texts = service.texts(asked.return_tokens_as_token_ids)
        common = {"id": asked.request_id or new_id("chatcmpl"), "created": int(time.time()), "model": model}
        self.base = common | {"object": "chat.completion"}
        self.chunk_base = common | {"object": "chat.completion.chunk"}
        self.streams: Sequence[Stream] = ()
        self.readers: dict[int, _Reader | None] = {}  # of the choices that have begun

    def _sampling(self) -> SamplingParams:
        asked, config = self.asked, self.service.config
        for name in ("top_logprobs", "prompt_logprobs"):
            if (getattr(asked, name) or 0) > config.max_logprobs:
                raise ApiError(
                    400, f"{name} must be at most {config.max_logprobs}, got {getattr(asked, name)}", param=name
                )
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        structured, self.shape_key = structure_of(asked, int(config.max_schema))
        if structured is not None and self.tools.shown is not None:
            raise ApiError(
                400, "tools and a shape of the text can't be asked for together: leave one of them out", param="tools"
            )
        more: dict[str, Any] = {"skip_special_tokens": False} if self.tools.shows_special_tokens else {}
        if asked.max_completion_tokens is not None:
            more["max_tokens"] = asked.max_completion_tokens
        if structured is None:
            structured, self.shape_key = self.tools.structured, "tools"
        defaults = {"max_tokens": None, **self.service.defaults}
        return sampling_of(
            asked,
            defaults,
            config,
            structured,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            **more,
        )

    def num_tokens(self, part: Part) -> int:
        return len(part.token_ids)

    def choice(self, number: int, part: Part) -> dict[str, Any]:
        content, calls = "", list[dict[str, Any]]()
        for piece in self._pieces(part):
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, CallStart):
                calls.append(_call(piece))
            else:
                calls[-1]["function"]["arguments"] += piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return self._choice(part, "message", message, self._logprobs(part), is_first=True)

    def chunks(self, number: int, part: Part) -> list[dict[str, Any]]:
        is_first, deltas = part.index not in self.readers, list[dict[str, Any]]()
        if is_first:
            deltas.append({"role": "assistant", "content": ""})
        for piece in self._pieces(part):
            if isinstance(piece, Content):
                deltas.append({"content": piece.text})
            elif isinstance(piece, CallStart):
                deltas.append({"tool_calls": [{"index": piece.index} | _call(piece)]})
            else:
                deltas.append({"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]})
        going = replace(part, finish_reason=None, stop_reason=None, token_ids=[])
        found = [
            self._choice(going, "delta", delta, None, is_first=i == 0 and is_first) for i, delta in enumerate(deltas)
        ]
        if part.finish_reason is not None:
            found.append(self._choice(replace(part, token_ids=[]), "delta", {}, None, is_first=False))
        if part.token_ids and (self.asked.logprobs or self.asked.return_token_ids):
            # A text may be held back; what is told of its tokens is not.
            if len(found) == is_first:
                found.append(self._choice(going, "delta", {}, None, is_first=False))
            told = found[is_first]
            told["logprobs"] = self._logprobs(part)
            if self.asked.return_token_ids:
                told["token_ids"] = part.token_ids
        return found

    def _pieces(self, part: Part) -> list[Piece]:
        if part.index not in self.readers:
            self.readers[part.index] = self.tools.reader(self._ending_ids())
        reader = self.readers[part.index]
        if reader is None:
            return [Content(part.text)] if part.text else []
        return reader.pieces(part)

    def _ending_ids(self) -> frozenset[int]:
        return self.service.thread.engine.limits.eos_token_ids | frozenset(self.sampling.stop_token_ids or ())

    def _choice(
        self, part: Part, key: str, value: dict[str, Any], logprobs: dict[str, Any] | None, is_first: bool
    ) -> dict[str, Any]:
        asked, reader, reason = self.asked, self.readers[part.index], part.finish_reason
        if reason == "stop" and reader is not None and reader.has_calls:
            reason = "tool_calls"
        choice = {"index": part.index, key: value, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = part.stop_reason
        if asked.return_token_ids:
            choice["token_ids"] = part.token_ids
            if is_first:
                choice["prompt_token_ids"] = self.prompts[0].token_ids
        if asked.prompt_logprobs is not None and is_first:
            output = self.streams[0].first
            assert output is not None and output.prompt_logprobs is not None
            choice["prompt_logprobs"] = prompt_entries(
                self.texts, output.prompt_token_ids, output.prompt_logprobs, output.prompt_top_logprobs
            )
        return choice

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        return {
            "content": chat_logprobs(self.texts, part.token_ids, part.logprobs, part.top_logprobs),
            "refusal": None,
        }


def _call(piece: CallStart) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
