"""Owns the requests of the protocol: which keys a body has, their types, and what is asked of the engine by them.

A key that is null counts as not given, and one that nothing here knows is ignored, as clients send them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from jpaged.host.sampling_params import MAX_BIASED_IDS, SamplingParams
from jpaged.host.structured import Structured
from jpaged.server.config import ServerConfig, sentence_of
from jpaged.server.errors import ApiError, from_value_error

# Keys of a body that are fields of `SamplingParams`.
SAMPLING = (
    "temperature top_p n best_of stop seed frequency_penalty presence_penalty logit_bias max_tokens top_k min_p "
    "repetition_penalty min_tokens ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens prompt_logprobs allowed_token_ids bad_words truncate_prompt_tokens cache_salt "
    "length_penalty early_stopping logprobs_mode"
).split()
_OUTPUTS = "structured_outputs"
# The first wrong item is told: a list of millions of them would take seconds, and gigabytes, to be told of.
type Listed[T] = Annotated[list[T], pydantic.FailFast()]
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# Of a message, for the description; what its template makes of it decides.
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string", "minLength": 1}},
    "anyOf": [
        {
            "required": ["content"],
            "properties": {"content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}},
        },
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ],
}


def _few(value: Any) -> Any:
    """As for lists: not each key of a large object is told of."""
    if isinstance(value, dict) and len(value) > MAX_BIASED_IDS:
        raise ValueError(f"must have at most {MAX_BIASED_IDS} keys, got {len(value)}")
    return value


class Body(pydantic.BaseModel):
    """The body of a request."""

    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Any:
        """From the JSON object that was sent. Raises ApiError that names the key."""
        given = {key: _integer(value) for key, value in body.items() if value is not None}
        try:
            return cls(**given)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = str(first["loc"][0]) if first["loc"] else None
            if first["type"] == "missing":
                raise ApiError(400, f"{place} is missing", param=place, code="missing_required_parameter") from error
            raise ApiError(400, sentence_of(error), param=place, code="invalid_type") from error


def _integer(value: Any) -> Any:
    """JSON has one kind of numbers: 16.0 is 16, as clients write it that have no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Body):
    """The shape of the text; one of its keys is given."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None


class Sampled(Body):
    """What completions and chats have in common."""

    model: str | None = Field(None, description="One of those that /v1/models lists.")
    stream: bool = Field(False, description="Send the text as it comes, as server-sent events.")
    stream_options: StreamOptions = StreamOptions()
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, description="Samples of each prompt.")
    best_of: int | None = Field(
        None, ge=1, description="Samples that are drawn, of which the n likeliest are returned."
    )
    stop: str | Listed[str] | None = Field(None, description="Texts that end the answer.")
    seed: int | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, pydantic.BeforeValidator(_few)] = None
    max_tokens: int | None = Field(None, ge=0)
    user: str | None = Field(None, description="Not used.")
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: Listed[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    allowed_token_ids: Listed[int] | None = None
    bad_words: str | Listed[str] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    cache_salt: str | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    use_beam_search: bool | None = Field(None, description="A search of best_of (or n) beams; needs temperature 0.")
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    structured_outputs: Annotated[StructuredOutputs | None, pydantic.BeforeValidator(_few)] = Field(
        None, description="The shape of the text."
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    priority: int = Field(0, description="The lower, the sooner it is served.")
    return_token_ids: bool = Field(False, description="Whether answers have the ids of prompt and text, too.")
    return_tokens_as_token_ids: bool = Field(False, description="Whether tokens are written token_id:5 in logprobs.")
    request_id: str | None = Field(None, description="Of the answer.", max_length=128, pattern=r"^[\x21-\x7e]+$")


class ResponseFormat(Body):
    """The shape of the text, as OpenAI says it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: Any = Field(
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        }
    )
    echo: bool = Field(False, description="Whether the text begins with the prompt.")
    logprobs: int | None = Field(None, ge=0, description="How many of the likeliest tokens are told in each place.")
    suffix: str | None = Field(None, max_length=0, description="Not supported.")
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = Field(True, description="Whether a prompt begins as the tokenizer says.")


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Listed[dict[str, Any]] = Field(min_length=1, json_schema_extra={"items": MESSAGE})
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = Field(None, description="Whether the prompt begins the assistant's answer.")
    continue_final_message: bool = Field(False, description="Go on with the last message, which is the assistant's.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables that the model's template reads.")
    add_special_tokens: bool = Field(False, description="Whether the tokenizer adds to what the template writes.")


class TokenizeRequest(Body):
    """`POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = Field(
        None, json_schema_extra={"anyOf": [{"type": "array", "items": MESSAGE, "minItems": 1}, {"type": "null"}]}
    )
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Listed[dict[str, Any]] | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Listed[int]
    skip_special_tokens: bool = False


class GenerateRequest(Body):
    """`POST /v1/generate`: token ids in, token ids and log-probabilities out, for rollout workers."""

    model: str | None = None
    token_ids: Listed[int] | Listed[Listed[int]] = Field(description="A prompt, or several.")
    sampling_params: dict[str, Any] = Field({}, description="Fields of jpaged.SamplingParams.")
    stream: bool = False
    priority: int = 0


def structure_of(asked: CompletionRequest | ChatRequest, max_schema: int) -> tuple[Structured | None, str | None]:
    """The shape of the text that a request asks for, and the key that does. Raises ApiError."""
    found: dict[str, tuple[str, Any]] = {}  # key of the body: field of Structured, value
    for key, name in GUIDED.items():
        if getattr(asked, key) is not None:
            found[key] = name, getattr(asked, key)
    if asked.structured_outputs is not None:
        for name, value in asked.structured_outputs.model_dump(by_alias=True, exclude_none=True).items():
            found[f"structured_outputs.{name}"] = name, value
    shape = asked.response_format
    if shape is not None and shape.type == "json_object":
        found["response_format"] = "json_object", True
    elif shape is not None and shape.type == "json_schema":
        schema = (shape.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise ApiError(
                400,
                'response_format of type json_schema needs {"json_schema": {"name": ..., "schema": {...}}}',
                param="response_format",
            )
        found["response_format"] = "json", schema
    if asked.structured_outputs is not None and not any(key.startswith("structured_outputs") for key in found):
        raise ApiError(400, "structured_outputs needs one of json, json_object, regex, choice, grammar", param=_OUTPUTS)
    if not found:
        return None, None
    if len(found) > 1:
        told = " and ".join(found)
        raise ApiError(400, f"{told} each say what the text is to look like: give one", param=[*found][1].split(".")[0])
    (key, (name, value)), param = next(iter(found.items())), [*found][0].split(".")[0]
    check_size(key, value, max_schema, param)
    try:
        return Structured(**{name: value}), param
    except ValueError as error:
        raise ApiError(400, f"{key}: {error}", param=param) from error


def check_size(key: str, value: Any, most: int, param: str) -> None:
    """Raise ApiError for more text than a grammar is made of."""
    size = len(value) if isinstance(value, str) else len(repr(value))
    if size > most:
        raise ApiError(400, f"{key} has {size} characters and at most {most} are taken: make it smaller", param=param)


def sampling_of(
    asked: Sampled, defaults: Mapping[str, Any], config: ServerConfig, structured: Structured | None, **more: Any
) -> SamplingParams:
    """What is asked of the engine. `defaults`: of the model, for what the request does not say; `more`: what it says in
    other words. Raises ApiError that names the key."""
    given = {name: getattr(asked, name) for name in SAMPLING if name in asked.model_fields_set}
    given |= {name: value for name, value in more.items() if value is not None}
    stops = given.get("stop") or []
    if not isinstance(stops, str) and len(stops) > config.max_stop:
        raise ApiError(400, f"stop has {len(stops)} strings and at most {config.max_stop} are taken", param="stop")
    for name in ("stop", "bad_words"):  # the engine's thread makes tables of them, and all others wait
        check_size(name, given.get(name) or "", int(config.max_schema), name)
    for name in ("n", "best_of"):
        if given.get(name, 1) > config.max_n:
            raise ApiError(400, f"{name} must be at most {config.max_n}, got {given[name]}", param=name)
    if structured is not None:
        given["structured"] = structured
    names = {name: name for name in (*SAMPLING, "logprobs")} | {"num_beams": "best_of" if asked.best_of else "n"}
    # A shape of the text is named by several keys: of what contradicts it there is one.
    against = [name for name in ("allowed_token_ids", "ignore_eos", "use_beam_search") if getattr(asked, name)]
    names |= {"structured": against[0]} if against else {}
    if asked.use_beam_search:
        given["num_beams"] = given.pop("best_of", None) or asked.n
        given.setdefault("temperature", 0.0)
        if given["num_beams"] < 2:
            raise ApiError(400, "use_beam_search needs best_of (or n) of at least 2, its beams", param="best_of")
    else:
        given = {name: value for name, value in defaults.items() if name not in given} | given
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise from_value_error(error, names) from error
