"""Owns what the answers of the server look like: for its description, which clients are made from and tested by."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

import pydantic


class Answer(TypedDict):
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]


FinishReason = Literal["stop", "length", "tool_calls", "abort"]
type StopReason = str | int | None  # the string or token that ended the text, if it was not the end of text


class CachedTokens(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptToken(Answer):
    logprob: float
    rank: int | None
    decoded_token: str


type PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class Choice(Answer):
    """What a text and a message have in common."""

    index: int
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Token(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Token):
    top_logprobs: list[Token]


class ChatLogprobs(Answer):
    content: list[ChosenToken]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    message: Message
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class RolloutOutput(Answer):
    index: int
    prompt_index: int
    token_ids: list[int]
    logprobs: NotRequired[list[float]]
    top_logprobs: NotRequired[list[dict[str, float]]]
    finish_reason: FinishReason
    stop_reason: StopReason


class RolloutPrompt(Answer):
    num_tokens: int
    num_cached_tokens: int
    logprobs: NotRequired[list[float | None]]
    top_logprobs: NotRequired[list[dict[str, float] | None]]


class Rollouts(Answer):
    id: str
    outputs: list[RolloutOutput]
    prompts: list[RolloutPrompt]


class Tokenized(Answer):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class Detokenized(Answer):
    prompt: str


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[int]


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class TokenizerInfo(TypedDict):
    """The tokenizer's special tokens among it, by their names."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    tokenizer_vocab_size: NotRequired[int]
    special_tokens: NotRequired[dict[str, str]]
    bos_token_id: NotRequired[int | None]
    chat_template: NotRequired[str | None]


class Status(Answer):
    status: str


class Version(Answer):
    version: str


ANSWERS: dict[str, Any] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/generate": Rollouts,
    "/tokenize": Tokenized,
    "/detokenize": Detokenized,
    "/v1/models": ModelList,
    "/v1/models/{id}": Model,
    "/tokenizer_info": TokenizerInfo,
    "/health": Status,
    "/ready": Status,
    "/version": Version,
    "/openapi.json": dict[str, Any],
}
