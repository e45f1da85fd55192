"""`litellm`, which turns what it is asked into requests of the `openai` package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Server, joined
from shapes import CALLED, CLOCK, HI, WEATHER, Forecast

litellm = pytest.importorskip("litellm")
litellm.telemetry = False


@pytest.fixture(scope="module")
def asked(server: Server) -> dict[str, Any]:
    return {"api_base": server.v1, "api_key": server.key, "temperature": 0, "max_tokens": 16, "num_retries": 0}


@pytest.mark.parametrize(
    "name", [{"model": "openai/tiny"}, {"model": "tiny", "custom_llm_provider": "openai"}], ids=str
)
def test_a_chat_that_is_streamed_is_the_plain_one_in_parts(asked, name):
    whole = litellm.completion(messages=HI, **asked | name)
    chunks = list(litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **asked | name))
    text = joined(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    rebuilt = litellm.stream_chunk_builder(chunks, messages=HI)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens == 16
    assert rebuilt.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_async_chats_are_the_plain_ones(asked):
    whole = litellm.completion(model="openai/tiny", messages=HI, **asked)
    other = await litellm.acompletion(model="openai/tiny", messages=HI, **asked)
    parts = [
        chunk.choices[0].delta.content
        async for chunk in await litellm.acompletion(model="openai/tiny", messages=HI, stream=True, **asked)
    ]
    assert other.choices[0].message.content == joined(parts) == whole.choices[0].message.content


def test_tools_are_called(asked):
    tools = {"tools": [WEATHER, CLOCK], "model": "openai/tiny", "messages": HI} | asked | {"max_tokens": 60}
    choice = litellm.completion(**tools).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", CALLED)
    assert choice.finish_reason == "tool_calls"
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**tools, stream=True))).choices[0]
    (streamed,) = rebuilt.message.tool_calls
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("weather", CALLED)
    assert rebuilt.finish_reason == "tool_calls"
    named = litellm.completion(**tools, tool_choice={"type": "function", "function": {"name": "clock"}}).choices[0]
    assert named.message.tool_calls[0].function.name == "clock"


def test_an_answer_has_the_shape_of_a_pydantic_model(asked):
    more = {"response_format": Forecast, "max_tokens": 200}
    answer = litellm.completion(model="openai/tiny", messages=HI, **asked | more)
    assert Forecast.model_validate_json(answer.choices[0].message.content)


def test_texts_are_completed(asked):
    whole = litellm.text_completion(model="text-completion-openai/tiny", prompt="Once upon", logprobs=1, **asked)
    assert whole.choices[0].text and len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    chunks = litellm.text_completion(model="text-completion-openai/tiny", prompt="Once upon", stream=True, **asked)
    assert joined(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    several = litellm.text_completion(model="text-completion-openai/tiny", prompt=["Once upon", "A"], **asked)
    assert several.choices[0].text == whole.choices[0].text and len(several.choices) == 2


def test_what_litellm_does_not_know_is_passed_on(asked):
    answer = litellm.completion(
        model="openai/tiny", messages=HI, extra_body={"guided_choice": ["yes", "no"]}, top_k=3, **asked
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_raised_as_the_exceptions_that_are_meant_for_them(asked, server, stream):
    def error_of(kind: type[Exception], **more: Any) -> Any:
        with pytest.raises(kind) as found:
            litellm.completion(**{"model": "openai/tiny", "messages": HI, "stream": stream} | asked | more)
        return found.value

    assert "top_p" in str(error_of(litellm.BadRequestError, top_p=7))
    error_of(litellm.ContextWindowExceededError, max_tokens=5000)
    error_of(litellm.AuthenticationError, api_key="sk-wrong")
    error_of(litellm.NotFoundError, model="openai/absent")
    with server.full():
        error_of(litellm.RateLimitError, n=40)
