"""`POST /v1/chat/completions`, as clients of OpenAI's protocol send it and read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import stored_tokenizers
from server_support import chat_tokenizer, close, saying
from test_completions import SCRIPT, STOPS

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"model": "tiny", "temperature": 0, "messages": HI}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"additionalProperties": False}}}


def joined(events: list[dict], index: int = 0) -> dict[str, Any]:
    """The message that a stream's events make, as clients add it up."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1 and choices[-1]["finish_reason"], "one finish reason, in the last event of the choice"
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    calls: list[dict] = []
    for choice in choices:
        for delta in choice["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                assert delta["id"] and delta["function"]["name"]
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    told = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return {"content": content, "calls": calls, "finish_reason": reasons[0], "logprobs": told}


def plain(choice: dict) -> dict[str, Any]:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    told = choice["logprobs"]["content"] if choice["logprobs"] else []
    for entry in told:  # a prompt that is found in the cache is computed in other parts
        for one in (entry, *entry["top_logprobs"]):
            one["logprob"] = pytest.approx(one["logprob"], abs=1e-4)
    return {
        "content": message["content"] or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
        "logprobs": told,
    }


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 20},
        {"max_completion_tokens": 12, "logprobs": True, "top_logprobs": 3},
        {"max_tokens": 12, "n": 3, "temperature": 2.0, "seed": 4, "logprobs": True, "ignore_eos": True},
        {"max_tokens": 30, "temperature": 3.0, "seed": 9, "stop": ["a", "in"]},
        {"max_tokens": 20, "tools": [WEATHER], "temperature": 1.5, "seed": 2, "logprobs": True},
        {"max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"},
        {"max_tokens": 60, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"max_tokens": 30, "response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_a_stream_is_the_plain_answer_in_parts(live, asked):
    whole = live.post(PATH, GREEDY | asked)
    events = live.events(PATH, GREEDY | asked | {"stream_options": {"include_usage": True}})
    assert whole["object"] == "chat.completion" and {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        assert joined(events, choice["index"]) == close(plain(choice))
    assert events[-1]["choices"] == []
    for usage in (whole["usage"], events[-1]["usage"]):
        del usage["prompt_tokens_details"]
    assert events[-1]["usage"] == whole["usage"]
    if "tools" not in asked:
        assert whole["usage"]["prompt_tokens"] == len(chat_tokenizer().encode_chat(HI)), "once, whatever n"
    if "ignore_eos" in asked:
        assert whole["usage"]["completion_tokens"] == asked["n"] * asked["max_tokens"]


@pytest.mark.parametrize("name", ["live", "llama_parrot"])
def test_a_chat_has_one_beginning_of_sequence(name, request):
    """The template writes it; the tokenizer, which does for other texts, adds none."""
    live = request.getfixturevalue(name)
    tokenizer = live.engine.tokenizer
    ids = tokenizer.encode_chat(HI)
    answer = live.post(PATH, GREEDY | {"max_tokens": 1, "return_token_ids": True})
    assert answer["choices"][0]["prompt_token_ids"] == ids and answer["usage"]["prompt_tokens"] == len(ids)
    assert live.post("/tokenize", {"messages": HI})["tokens"] == ids
    assert name == "live" or (ids.count(1) == 1 and ids[0] == 1)
    text = {"prompt": "Hi", "max_tokens": 1, "return_token_ids": True}
    for more, added in (({}, True), ({"add_special_tokens": False}, False)):
        found = live.post("/v1/completions", text | more)["choices"][0]["prompt_token_ids"]
        assert found == tokenizer.encode("Hi", add_special_tokens=added)
        assert found == live.post("/tokenize", {"prompt": "Hi"} | more)["tokens"]
        assert found.count(1) == (added and name != "live")


@pytest.mark.parametrize(("stop", "included", "text", "reason"), STOPS)
def test_stop_strings_end_streams_and_plain_answers_alike(any_parrot, stop, included, text, reason):
    asked = {"max_tokens": 30, "stop": stop, "include_stop_str_in_output": included, "logprobs": True}
    with saying(any_parrot, SCRIPT):
        whole = any_parrot.post(PATH, GREEDY | asked)
        events = any_parrot.events(PATH, GREEDY | asked)
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
    assert joined(events) == plain(choice)


@pytest.mark.parametrize("text", [" a 👩‍🚀 b 日本 c", "é🙂"])
def test_characters_of_several_tokens_arrive_whole(any_parrot, text):
    with saying(any_parrot, text):
        events = any_parrot.events(PATH, GREEDY | {"max_tokens": 40})
    parts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(parts) == text and all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_what_asks_for_more_tokens_than_generated_by_the_end_of_text_is_honoured(parrot, stream):
    def told(**more: Any) -> tuple[str, str, int]:
        body = GREEDY | {"max_tokens": 20, "logprobs": True} | more
        found = joined(parrot.events(PATH, body)) if stream else plain(parrot.post(PATH, body)["choices"][0])
        return found["content"], found["finish_reason"], len(found["logprobs"])

    with saying(parrot, SCRIPT) as script:
        assert told() == (SCRIPT, "stop", len(script))
        assert told(ignore_eos=True)[1:] == ("length", 20)
        assert told(ignore_eos=True, stop="HERE")[:2] == (SCRIPT.partition("HERE")[0], "stop")
        assert told(min_tokens=12)[2] >= 12


def test_content_may_come_in_parts(live):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    one, other = (live.post(PATH, GREEDY | {"messages": m, "max_tokens": 5})["choices"][0] for m in (HI, parts))
    assert one["message"] == other["message"]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "text part" in live.refused(PATH, GREEDY | {"messages": image})["message"]


def test_an_answer_has_its_alternatives_with_their_bytes(live):
    asked = {"max_tokens": 30, "logprobs": True, "top_logprobs": 4, "temperature": 3.0, "seed": 1, "ignore_eos": True}
    choice = live.post(PATH, GREEDY | asked)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 4 for entry in entries) and len(entries) == 30
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == choice["message"]["content"]


def test_the_final_message_can_be_continued(live):
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    choice = live.post(
        PATH,
        GREEDY | {"messages": messages, "continue_final_message": True, "max_tokens": 3, "return_token_ids": True},
    )["choices"][0]
    text = chat_tokenizer().decode(choice["prompt_token_ids"], skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    both = GREEDY | {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert live.refused(PATH, both)["param"] == "continue_final_message"
    assert live.refused(PATH, GREEDY | {"continue_final_message": True})["param"] == "continue_final_message"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "param", "told"),
    [
        ({"messages": [*HI, {"role": "system", "content": "x"}]}, "messages", "system comes first"),
        ({"messages": []}, "messages", ""),
        ({"messages": [{"content": "x"}]}, "messages", "role"),
        ({"messages": "hi"}, "messages", ""),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
        ({"chat_template_kwargs": {"absent": 1}}, "chat_template_kwargs", "absent"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "weather"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tool_choice": "required"}, "tool_choice", ""),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "x"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "xml"}}, "response_format", ""),
        ({"functions": []}, "functions", "tools"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ""),
        ({"max_tokens": 0}, "max_tokens", ""),
        ({"max_tokens": 100_000}, "max_tokens", "256"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_a_stream_begins(live, more, param, told, stream):
    error = live.refused(PATH, GREEDY | more | {"stream": stream})
    assert error["param"] == param and told in error["message"], error


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_a_template_refuses_chats(plain, live, monkeypatch, stream):
    body = GREEDY | {"stream": stream}
    assert "tokenizer" in plain.refused(PATH, body)["message"]
    monkeypatch.setattr(live.service.prompts, "tokenizer", stored_tokenizers.smollm2())
    error = live.refused(PATH, body)
    assert error["param"] == "messages" and "no chat template" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("roles", [["user", "user"], ["system", "user"], ["user", "assistant", "assistant"]], ids=str)
def test_roles_that_the_template_refuses_are_said_in_its_words(llama_parrot, roles, stream):
    messages = [{"role": role, "content": "x"} for role in roles]
    error = llama_parrot.refused(PATH, GREEDY | {"messages": messages, "stream": stream})
    assert error["param"] == "messages" and "roles must alternate" in error["message"]


@pytest.mark.parametrize("temperature", [1e-4, 1e-40])
def test_a_tiny_temperature_is_greedy(live, temperature):
    body = GREEDY | {"max_tokens": 12, "ignore_eos": True}
    assert plain(live.post(PATH, body | {"temperature": temperature})["choices"][0]) == plain(
        live.post(PATH, body)["choices"][0]
    )


def test_equal_chats_have_equal_answers(live):
    body = GREEDY | {"max_tokens": 16, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    live.engine.reset_prefix_cache()
    first, *others = (live.post(PATH, body)["choices"][0] for _ in range(5))
    assert all(other == close(first) for other in others)


@pytest.mark.parametrize("parallel", [False, True])
def test_required_tools_are_called_with_valid_arguments(live, parallel):
    asked = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": parallel, "max_tokens": 100}
    for seed in range(3):
        choice = live.post(PATH, GREEDY | asked | {"temperature": 1.0, "seed": seed})["choices"][0]
        calls = choice["message"]["tool_calls"]
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert parallel or len(calls) == 1
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] != "weather" or arguments["place"] in ("Rome", "Oslo")


def test_a_named_tool_is_called(live):
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = live.post(PATH, GREEDY | {"tools": [WEATHER, CLOCK], "tool_choice": choice, "max_tokens": 60})["choices"][
        0
    ]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["place"]
    assert answer["finish_reason"] == "tool_calls"
    for forced in (choice, "required"):
        body = GREEDY | {"tools": [WEATHER, CLOCK], "tool_choice": forced, "max_tokens": 3}
        cut = live.post(PATH, body)["choices"][0]
        assert cut["finish_reason"] == "length" and plain(cut) == joined(live.events(PATH, body))


def test_a_call_in_the_models_own_words_is_read(parrot):
    text = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
    with saying(parrot, text) as script:
        whole = parrot.post(PATH, GREEDY | {"tools": [WEATHER], "max_tokens": 60})["choices"][0]
        events = parrot.events(PATH, GREEDY | {"tools": [WEATHER], "max_tokens": 60})
        assert plain(whole) == joined(events)
        (call,) = plain(whole)["calls"]
        assert call["name"] == "weather" and json.loads(call["arguments"]) == {"place": "Oslo"}
        assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
        # Cut off anywhere.
        for most in range(1, len(script)):
            cut = parrot.post(PATH, GREEDY | {"tools": [WEATHER], "max_tokens": most})["choices"][0]
            assert cut["finish_reason"] == "length"
            assert plain(cut) == joined(parrot.events(PATH, GREEDY | {"tools": [WEATHER], "max_tokens": most}))
        # Without tools, or with none to be called, it is a text.
        for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            choice = parrot.post(PATH, GREEDY | more | {"max_tokens": 60})["choices"][0]
            assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]


def test_a_template_without_a_place_for_tools_is_said_before_their_format(live, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(live.service, "tool_format", None)
    assert "tool_format" in live.refused(PATH, GREEDY | {"tools": [WEATHER]})["message"]
    monkeypatch.setattr(live.service.prompts, "tokenizer", chat_tokenizer().with_chat_template(template))
    for choice in ("auto", "required"):
        assert (
            "no place for tools" in live.refused(PATH, GREEDY | {"tools": [WEATHER], "tool_choice": choice})["message"]
        )


def test_what_was_called_and_found_goes_into_the_prompt(live):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
    ]
    body = GREEDY | {"messages": messages, "tools": [WEATHER], "max_tokens": 2, "return_token_ids": True}
    ids = live.post(PATH, body)["choices"][0]["prompt_token_ids"]
    text = chat_tokenizer().decode(ids, skip_special_tokens=False)
    assert '"arguments": {"place": "Oslo"}' in text and "cold" in text
    call["function"]["arguments"] = "{broken"
    assert "arguments" in live.refused(PATH, body)["message"]


def test_seeds_repeat_and_differ(live):
    def texts(**more: Any) -> list[str]:
        asked = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True} | more
        return [choice["message"]["content"] for choice in live.post(PATH, GREEDY | asked)["choices"]]

    seeded = [texts(seed=seed)[0] for seed in range(5)]
    assert len(set(seeded)) == 5 and seeded == [texts(seed=seed)[0] for seed in range(5)]
    assert len(set(texts(seed=42, n=4))) == 4 and texts(seed=42, n=4) == texts(seed=42, n=4)
    assert len({texts()[0] for _ in range(3)}) == 3
