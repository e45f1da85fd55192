"""The description of the endpoints, which clients are made from: answers look as it says."""

from __future__ import annotations

import json

import pydantic
import pytest

from jpaged.server.answer_types import ANSWERS
from jpaged.server.openapi import openapi

CALL = {"type": "function", "function": {"name": "clock", "parameters": {"additionalProperties": False}}}
HI = [{"role": "user", "content": "Hi"}]
MORE = {"max_tokens": 3, "n": 2, "seed": 1, "return_token_ids": True, "prompt_logprobs": 1}
ASKED = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["a b", "c"], "logprobs": 2, "echo": True, "stop": "e"} | MORE),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2} | MORE),
    ("/v1/chat/completions", {"messages": HI, "tools": [CALL], "tool_choice": "required", "max_tokens": 60}),
    ("/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}),
    (
        "/v1/generate",
        {"token_ids": [[5, 6], [7]], "sampling_params": {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1}},
    ),
    ("/tokenize", {"prompt": "a b", "return_token_strs": True}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [5, 6]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=str)
def test_an_answer_looks_as_it_is_described(live, path, body):
    answer = json.dumps(live.post(path, body))
    pydantic.TypeAdapter(ANSWERS[path]).validate_json(answer, strict=True)


@pytest.mark.parametrize("path", [path for path in ANSWERS if path not in dict(ASKED)])
def test_what_is_read_looks_as_it_is_described(live, path):
    status, _, raw = live.call("GET", path.replace("{id}", "tiny"))
    assert status == 200
    pydantic.TypeAdapter(ANSWERS[path]).validate_json(raw, strict=True)


def test_null_counts_as_not_given_and_is_described_so(live):
    schemas = openapi()["components"]["schemas"]
    names = schemas["CompletionRequest"]["properties"].keys() - {"prompt"}
    assert all({"type": "null"} in schemas["CompletionRequest"]["properties"][name]["anyOf"] for name in names)
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
    told = dict.fromkeys(names - body.keys()) | body
    first, second = (live.post("/v1/completions", asked)["choices"] for asked in (body, told))
    assert first == second


def test_a_number_without_a_fraction_is_an_integer(live):
    """JSON has one kind of numbers, and some clients have floats alone."""
    asked = {"prompt": "a", "max_tokens": 3.0, "n": 2.0, "logprobs": 1.0, "temperature": 1.0, "seed": 4.0}
    choices = live.post("/v1/completions", asked)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1] and len(choices[0]["logprobs"]["tokens"]) == 3
    assert live.refused("/v1/completions", asked | {"max_tokens": 2.5})["param"] == "max_tokens"
