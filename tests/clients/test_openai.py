"""The `openai` package for Python."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from conftest import Server, joined
from shapes import CALLED, CLOCK, HI, WEATHER, Forecast

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 16}
CHAT: dict[str, Any] = GREEDY | {"messages": HI}
SHORT: dict[str, Any] = CHAT | {"stop": ["e"]}  # the stream helper refuses answers that are cut off
LONG: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Server):
    with openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server):
    async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0) as client:
        yield client


def test_a_chat_that_is_streamed_is_the_plain_one_in_parts(client):
    asked = CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.object == "chat.completion" and whole.model == "tiny" and abs(whole.created - time.time()) < 600
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].id != whole.id
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert joined(one.delta.content for one in mine) == choice.message.content
        assert mine[0].delta.role == choice.message.role == "assistant"
        assert mine[-1].finish_reason == choice.finish_reason
        told = [entry for one in mine if one.logprobs for entry in one.logprobs.content]
        assert told == choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in told).decode(errors="replace") == choice.message.content
        assert all(len(entry.top_logprobs) == 2 for entry in told)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_the_stream_helper_adds_a_chat_up_to_the_plain_one(client):
    asked = SHORT | {"logprobs": True}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= set(kinds)
    assert joined(event.delta for event in events if event.type == "content.delta") == whole.choices[0].message.content
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert final.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("role", ["system", "developer"])
def test_roles_and_content_may_be_as_openai_has_them(client, role):
    messages = [
        {"role": role, "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": "Hello", "refusal": None, "audio": None},
        {"role": "user", "content": "Well?"},
    ]
    ignored = {"user": "a", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": 1}
    answer = client.chat.completions.create(**CHAT | {"messages": messages} | ignored)
    assert answer.choices[0].message.content and answer.usage.prompt_tokens > 20


def test_many_at_once_get_the_answers_that_each_gets_alone(client, server):
    prompts = [f"Number {number} is" for number in range(24)]
    alone = {prompt: client.completions.create(**GREEDY, prompt=prompt).choices[0].text for prompt in prompts[::6]}

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0) as many:

            async def ask(number: int, prompt: str) -> str:
                if number % 2:
                    return (await many.completions.create(**GREEDY, prompt=prompt)).choices[0].text
                parts = await many.completions.create(**GREEDY, prompt=prompt, stream=True)
                return "".join([part.choices[0].text async for part in parts])

            return await asyncio.gather(*map(ask, range(len(prompts)), prompts))

    together = dict(zip(prompts, asyncio.run(all_at_once()), strict=True))
    assert {prompt: together[prompt] for prompt in alone} == alone


async def test_an_async_stream_helper_has_its_events(async_client):
    async with async_client.chat.completions.stream(**SHORT) as stream:
        parts = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert joined(parts) == final.choices[0].message.content != ""


def test_an_answer_is_parsed_into_a_pydantic_model(client):
    asked = CHAT | {"max_tokens": 200}
    answer = client.chat.completions.parse(**asked, response_format=Forecast)
    found = answer.choices[0].message.parsed
    assert isinstance(found, Forecast) and found == Forecast.model_validate_json(answer.choices[0].message.content)
    with client.chat.completions.stream(**asked, response_format=Forecast) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == found


def test_an_answer_that_is_cut_off_is_not_parsed(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**CHAT | {"max_tokens": 3}, response_format=Forecast)


def test_a_tool_is_called_and_its_result_answered(client):
    first = client.chat.completions.create(**CHAT | {"max_tokens": 60}, tools=[WEATHER, CLOCK]).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and first.message.content is None and call.type == "function"
    assert call.function.name == "weather" and json.loads(call.function.arguments) == CALLED
    messages = [*HI, first.message, {"role": "tool", "tool_call_id": call.id, "content": "cold"}]
    second = client.chat.completions.create(**CHAT | {"messages": messages}, tools=[WEATHER, CLOCK]).choices[0]
    assert second.message.content and second.message.tool_calls is None


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_that_is_streamed_is_the_plain_one_in_parts(client, choice):
    asked = CHAT | {"max_tokens": 300, "tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    (plain,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls
    assert (call.function.name, call.function.arguments) == (plain.function.name, plain.function.arguments)
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert joined(event.arguments_delta for event in deltas) == done.arguments == plain.function.arguments
    assert done.name == plain.function.name and final.finish_reason in ("tool_calls", "stop")
    assert choice == "required" or call.function.name == "weather"


def test_no_tool_is_called_when_none_may_be(client):
    message = client.chat.completions.create(**CHAT, tools=[WEATHER], tool_choice="none").choices[0].message
    assert message.content and message.tool_calls is None


def test_a_tool_made_of_a_pydantic_model_has_its_arguments_parsed(client):
    tools = [openai.pydantic_function_tool(Forecast)]
    choice = {"type": "function", "function": {"name": "Forecast"}}
    answer = client.chat.completions.parse(**CHAT | {"max_tokens": 150}, tools=tools, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Forecast)


def test_completions_echo_their_prompt_with_log_probabilities(client, server):
    for text, reference in server.references.items():
        asked = {"model": "tiny", "prompt": text, "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
        choice = client.completions.create(**asked).choices[0]
        assert choice.text.startswith(text) and choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:-1] == pytest.approx(reference["logprobs"], abs=1e-3)
        assert "".join(choice.logprobs.tokens[:-1]) == text


def test_completions_that_are_streamed_are_the_plain_ones_in_parts(client):
    asked = GREEDY | {"prompt": ["Once", "Twice"], "n": 2, "logprobs": 2, "seed": 1, "temperature": 1.0, "stop": ["e"]}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert joined(one.text for one in mine) == choice.text and "e" not in choice.text
        assert [token for one in mine for token in one.logprobs.tokens] == choice.logprobs.tokens
        assert mine[-1].finish_reason == choice.finish_reason


def test_what_goes_beyond_the_protocol_goes_into_the_extra_body(client):
    more = {
        "guided_choice": ["yes", "no"],
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "return_token_ids": True,
    }
    choice = client.chat.completions.create(**CHAT, extra_body=more).choices[0]
    assert choice.message.content in ("yes", "no") and choice.model_extra["token_ids"]
    biased = client.chat.completions.create(**CHAT | {"max_tokens": 3}, logit_bias={"1000": 100}).choices[0]
    assert len(set(biased.message.content.split())) == 1


def test_models_are_listed_and_retrieved(client):
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("tiny").id == "tiny" and client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


def test_raw_responses_have_the_headers_and_the_answer(client):
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"X-Request-ID": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1" and raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content and raw.parse()._request_id == "mine-1"
    with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert list(response.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_raised_as_the_exceptions_that_are_meant_for_them(client, server, stream):
    def error_of(kind: type[openai.APIStatusError], of: openai.OpenAI = client, **more: Any) -> Any:
        with pytest.raises(kind) as found:
            of.chat.completions.create(**CHAT | {"stream": stream} | more)
        return found.value

    error = error_of(openai.BadRequestError, temperature=-1)
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error")
    assert error.request_id and "temperature" in error.message and error.body["message"]
    assert error_of(openai.BadRequestError, max_tokens=2000).code == "context_length_exceeded"
    assert error_of(openai.BadRequestError, response_format={"type": "json_schema"}).param == "response_format"
    assert error_of(openai.NotFoundError, model="gpt-4o").code == "model_not_found"
    with server.full():
        assert error_of(openai.RateLimitError, n=40).code == "queue_full"
    wrong = client.with_options(api_key="sk-wrong")
    assert error_of(openai.AuthenticationError, wrong).code == "invalid_api_key"


def test_endpoints_that_are_not_served_are_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="a")


@pytest.mark.parametrize("way", ["close", "break"])
def test_a_stream_that_is_left_ends_the_work(client, server, way):
    stream = client.chat.completions.create(**CHAT | LONG, n=4, stream=True)
    next(stream)
    if way == "break":
        with stream:
            for _ in stream:
                break
    else:
        stream.close()
    server.wait_until_idle()


def test_a_client_that_waits_no_longer_ends_the_work(client, server):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(**CHAT | LONG, n=60)
    server.wait_until_idle()


async def test_a_task_that_is_cancelled_ends_the_work(async_client, server):
    task = asyncio.ensure_future(async_client.chat.completions.create(**CHAT | LONG, n=60))
    while not await asyncio.to_thread(server.num_running):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(server.wait_until_idle)


def test_a_full_queue_is_waited_for(client, server):
    """As the client does by itself: it tries again after what Retry-After says."""
    busy = client.chat.completions.create(**CHAT | LONG, n=60, stream=True)
    next(busy)
    with pytest.raises(openai.RateLimitError) as found:
        client.chat.completions.create(**CHAT, n=10)
    assert found.value.response.headers["retry-after"] == "1"
    busy.close()
    assert client.with_options(max_retries=5).chat.completions.create(**CHAT, n=10).choices[9].message.content
