"""`langchain-openai`."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Server, joined
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from shapes import CALLED, Forecast

QUESTION = [SystemMessage("Be short."), HumanMessage("What is the weather?")]


@tool
def weather(places: list[str]) -> str:
    """Of places."""
    return f"cold in {', '.join(places)}"


@pytest.fixture(scope="module")
def options(server: Server) -> dict[str, Any]:
    return {"base_url": server.v1, "api_key": server.key, "model": "tiny", "temperature": 0, "max_retries": 0}


@pytest.fixture(scope="module")
def chat(options) -> ChatOpenAI:
    return ChatOpenAI(**options, max_tokens=16)


async def test_a_chat_that_is_streamed_is_the_plain_one_in_parts(chat):
    whole = chat.invoke(QUESTION)
    assert whole.content and whole.usage_metadata["output_tokens"] > 1
    total = None
    for part in chat.stream(QUESTION, stream_usage=True):
        total = part if total is None else total + part
    assert (
        total.content == whole.content and total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    )
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert joined([part.content async for part in chat.astream(QUESTION)]) == whole.content
    assert (await chat.ainvoke(QUESTION)).content == whole.content
    assert [answer.content for answer in chat.batch([QUESTION, QUESTION])] == [whole.content] * 2


def test_log_probabilities_are_told(options):
    chat = ChatOpenAI(**options, max_tokens=4, logprobs=True, top_logprobs=2)
    assert len(chat.invoke(QUESTION).response_metadata["logprobs"]["content"]) == 4


def test_a_tool_is_called_and_its_result_answered(options):
    with_tools = ChatOpenAI(**options, max_tokens=60).bind_tools([weather])
    answer = with_tools.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", CALLED) and not answer.invalid_tool_calls
    total = None
    for part in with_tools.stream(QUESTION):
        total = part if total is None else total + part
    assert [(one["name"], one["args"]) for one in total.tool_calls] == [("weather", CALLED)]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.content == "cold in Oslo"
    final = with_tools.invoke([*QUESTION, answer, result])
    assert isinstance(final, AIMessage) and final.content and not final.tool_calls


@pytest.mark.parametrize("choice", ["weather", "any", "required", True])
def test_a_tool_can_be_forced(options, choice):
    chat = ChatOpenAI(**options, max_tokens=200).bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    message = chat.invoke(QUESTION)
    assert [call["name"] for call in message.tool_calls + message.invalid_tool_calls] == ["weather"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_parsed_into_a_pydantic_model(options, method):
    chat = ChatOpenAI(**options, max_tokens=150).with_structured_output(Forecast, method=method, include_raw=True)
    found = chat.invoke(QUESTION)
    assert isinstance(found["parsed"], Forecast), found


async def test_an_answer_in_a_shape_can_be_streamed(options):
    chat = ChatOpenAI(**options, max_tokens=150).with_structured_output(Forecast)
    assert isinstance([part async for part in chat.astream(QUESTION)][-1], Forecast)


def test_texts_are_completed(options):
    model = OpenAI(**options, max_tokens=16)
    text = model.invoke("Once upon")
    assert text and "".join(model.stream("Once upon")) == text
    assert [found[0].text for found in model.generate(["Once upon", "A"]).generations][0] == text
