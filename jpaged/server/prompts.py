"""Owns how prompts become token ids: texts, ids and messages as they come in bodies, checked against the limits."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jpaged.engine.prompt import to_token_ids
from jpaged.host.chat import check_messages
from jpaged.host.tokenizer import Tokenizer
from jpaged.server.errors import ApiError
from jpaged.server.protocol import ChatRequest, TokenizeRequest

LONG_TEXT = 4096  # characters, from which on another thread turns them into tokens
# Placed at the end of a message to find where the template has put its text.
_MARK = "\u2063jpaged\u2063"
# What `apply_chat_template` is given beside variables.
_NOT_VARIABLES = {"self", "messages", "add_generation_prompt"}


class EncodedPrompt(NamedTuple):
    text: str | None  # None: it came as ids
    token_ids: list[int]


class Prompts:
    """For one model: its tokenizer, its vocabulary, and how long a sequence may be."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int, max_prompts: int):
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._max_prompts = max_prompts

    async def of_completion(
        self, prompt: Any, add_special_tokens: bool = True, cut: bool = False, name: str = "prompt"
    ) -> list[EncodedPrompt]:
        """Of a text, a list of texts, ids, or a list of lists of ids. `cut`: a part of each may be all that is used;
        `name`: its key in the body. Raises ApiError."""
        several = [prompt]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            several = prompt
        elif not isinstance(prompt, str | list):
            raise _bad(name, f"{name} must be text, a list of texts, token ids or a list of them, got {_short(prompt)}")
        if len(several) > self._max_prompts:
            raise _bad(name, f"{name} has {len(several)} prompts and a request may have at most {self._max_prompts}")
        if len({type(one) for one in several}) > 1:
            raise _bad(name, f"{name} must be all texts or all lists of token ids, got some of each")
        found = []
        for index, one in enumerate(several):
            where = name if several[0] is prompt else f"{name}[{index}]"
            if not isinstance(one, str) and len(one) >= self.max_model_len and not cut:
                raise self.too_long(len(one), where)
            try:
                found.append(await aside(one, functools.partial(self._encoded, one, add_special_tokens)))
            except ValueError as error:
                raise _bad(name, f"{where}: {error}") from error
        return found

    def _encoded(self, prompt: Any, add_special_tokens: bool) -> EncodedPrompt:
        if isinstance(prompt, str) and prompt and not add_special_tokens and self.tokenizer is not None:
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
            return EncodedPrompt(prompt, to_token_ids(token_ids, self.tokenizer, self.vocab_size)[1])
        return EncodedPrompt(*to_token_ids(prompt, self.tokenizer, self.vocab_size))

    @property
    def _longest(self) -> str:
        # OpenAI's words: clients that shorten prompts by themselves look for them.
        return f"This model's maximum context length is {self.max_model_len} tokens"

    def too_long(self, num_tokens: int, where: str = "prompt") -> ApiError:
        return ApiError(
            400,
            f"{self._longest}, but {where} has {num_tokens}, and at least one is to be generated: shorten it",
            param=where.split("[")[0],
            code="context_length_exceeded",
        )

    async def of_chat(self, asked: ChatRequest | TokenizeRequest, tools: list[dict] | None) -> EncodedPrompt:
        """Of messages, by the model's template. Raises ApiError with what the template says of them."""
        messages = asked.messages or []
        size = sum(map(len, map(str, messages[:LONG_TEXT]))) + len(messages)
        special = bool(asked.add_special_tokens)
        text = await aside(size, lambda: self.chat_text(asked, tools))
        try:
            token_ids = await aside(text, lambda: self._need().encode(text, add_special_tokens=special))
            return EncodedPrompt(text, to_token_ids(token_ids, self.tokenizer, self.vocab_size)[1])
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error

    def chat_text(self, asked: ChatRequest | TokenizeRequest, tools: list[dict] | None) -> str:
        """The text that the template writes."""
        goes_on = asked.continue_final_message
        begins = asked.add_generation_prompt
        if goes_on and begins:
            raise ApiError(
                400,
                "continue_final_message goes on with the last message and add_generation_prompt begins another: give "
                "one of them",
                param="continue_final_message",
            )
        variables: dict[str, Any] = dict(asked.chat_template_kwargs)
        for name in _NOT_VARIABLES & variables.keys():
            raise _bad("chat_template_kwargs", f"chat_template_kwargs cannot say {name}: the request does elsewhere")
        if tools:
            variables["tools"] = tools
        try:
            messages = [_with_objects(message) for message in check_messages(asked.messages)]
            tokenizer = self._need()
            if not goes_on:
                return tokenizer.apply_chat_template(messages, begins is None or begins, **variables)
            if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
                raise ApiError(
                    400,
                    "continue_final_message needs a last message of the role assistant that has content",
                    param="continue_final_message",
                )
            # Templates trim what they are given, and write behind it: the mark shows what of the text it was.
            content = messages[-1]["content"]
            messages[-1] = {**messages[-1], "content": content + _MARK}
            text, mark, _ = tokenizer.apply_chat_template(messages, False, **variables).rpartition(_MARK)
            if not mark:
                raise ApiError(
                    400, "the chat template does not show the last message: it cannot go on", param="messages"
                )
            return text
        except ValueError as error:
            param = "messages"
            if "takes no variable 'tools'" in str(error):
                param = "tools"
                error = ValueError(
                    "the chat template of this model has no place for tools: leave them out, or start the server with "
                    "a chat_template that has"
                )
            elif "takes no variable" in str(error):
                param = "chat_template_kwargs"
            raise ApiError(400, str(error), param=param) from error

    def check_fit(self, prompt: EncodedPrompt, max_tokens: int | None, param: str, of_most: str = "max_tokens") -> None:
        """Raise ApiError for more tokens than the context holds. `of_most`: the key that said `max_tokens`."""
        num_tokens = len(prompt.token_ids)
        if num_tokens >= self.max_model_len:
            raise self.too_long(num_tokens, param)
        if max_tokens is not None and num_tokens + max_tokens > self.max_model_len:
            raise ApiError(
                400,
                f"{self._longest}, but {num_tokens + max_tokens} were asked for: {num_tokens} in the {param} and "
                f"{of_most}={max_tokens}; shorten one of them",
                param=of_most,
                code="context_length_exceeded",
            )

    def _need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: send token ids to /v1/completions or /v1/generate")
        return self.tokenizer


async def aside[T](size: Any, work: Callable[[], T]) -> T:
    """What `work` returns; long texts are worked on in another thread, for others to be served meanwhile."""
    length = size if isinstance(size, int) else len(size)
    return await asyncio.to_thread(work) if length > LONG_TEXT else work()


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as objects, as templates read them: they are sent as JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    found = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f"tool_calls[{index}] must be an object with a function, got {_short(call)}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"tool_calls[{index}]: arguments must be JSON, got {_short(arguments)}") from error
        found.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": found}


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
