"""What a request says of tools: what is refused, and the answers to which a forced call is held."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import stored_tokenizers

from jpaged.host.grammar import Grammars
from jpaged.host.structured import Structured
from jpaged.server.tool_calls import CallArguments, CallStart, ForcedCalls
from jpaged.server.tools import check_tools, forced_schema

EOS = 2


def tool(name, parameters=None, **more):
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function | more}


def named(name):
    return {"type": "function", "function": {"name": name}}


WEATHER = tool(
    "get_weather",
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/Place"}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["Rome", "Oslo"]}},
    },
)
MOVE = tool(
    "move",
    {
        "$id": "https://example.com/move",
        "properties": {
            "to": {"$ref": "#/$defs/Place"},
            "then": {"$ref": "#"},
            "again": {"$ref": "#/properties/to"},
            "default": {"$ref": "#/$defs/Place"},
            "$ref": {"const": {"$ref": "#/$defs/Place"}},
        },
        "required": ["to"],
        "additionalProperties": False,
        "$defs": {"Place": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
    },
)
TIME = tool("get_time")


@pytest.fixture(scope="module")
def grammars():
    tokenizer = stored_tokenizers.smollm2()
    return Grammars(tokenizer, tokenizer.vocab_size, frozenset({EOS}))


def allowed(matcher):
    mask = np.zeros(-(-stored_tokenizers.smollm2().vocab_size // 32), np.uint32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def fits(grammars, schema, text):
    """Whether a model that is held to the schema can give this answer."""
    matcher = grammars.matcher(Structured(json=schema))
    ids = [*stored_tokenizers.smollm2().encode_continuation(text), EOS]
    for i, token_id in enumerate(ids):
        matcher.follow(ids[:i])
        if token_id not in allowed(matcher):
            return False
    return True


def call(name, parameters):
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("answer", "fitting"),
    [
        ([call("get_weather", {"city": "Rome"})], True),
        ([call("get_weather", {"city": "Oslo", "unit": "C"}), call("move", {"to": [1, 2]})], True),
        ([call("move", {"to": [1, 2], "then": {"to": [3, 4], "again": [5, 6], "default": [7, 8]}})], True),
        ([call("move", {"to": [1, 2], "$ref": {"$ref": "#/$defs/Place"}})], True),
        ([call("get_time", {}), call("get_time", {"any": 1})], True),
        ([], False),
        ({}, False),
        ([call("get_weather", {"city": [1, 2]})], False),
        ([call("move", {"to": "Rome"})], False),
        ([call("move", {"to": [1, 2], "then": {}})], False),
        ([call("move", {"to": [1, 2], "again": "Rome"})], False),
        ([call("move", {"to": [1, 2], "default": "Rome"})], False),
        ([call("move", 5)], False),
        ([call("get_time", [])], False),
        ([call("jump", {})], False),
        ([{"name": "get_time"}], False),
        ([{"name": "get_time", "parameters": {}, "id": 1}], False),
    ],
)
def test_an_answer_that_must_be_calls_is_a_list_of_them(grammars, answer, fitting):
    schema = forced_schema([WEATHER, MOVE, TIME], "required", parallel=True)
    assert fits(grammars, schema, json.dumps(answer)) is fitting


def test_without_parallel_calls_there_is_one(grammars):
    schema = forced_schema([TIME], "required", parallel=False)
    assert fits(grammars, schema, json.dumps([call("get_time", {})]))
    assert not fits(grammars, schema, json.dumps([call("get_time", {})] * 2))


def test_an_answer_that_must_call_one_function_is_its_arguments(grammars):
    tools = [WEATHER, MOVE, TIME, tool("either", {"anyOf": [{"required": ["a"]}, {"type": "integer"}]})]
    for name, answer, fitting in [
        ("get_weather", {"city": "Rome"}, True),
        ("get_weather", {}, False),
        ("move", {"to": [1, 2], "then": {"to": [3, 4]}}, True),
        ("move", {"to": "Rome"}, False),
        ("get_time", {"any": [1]}, True),
        ("get_time", 5, False),
        ("either", {"a": 1}, True),
        ("either", 5, False),
    ]:
        schema = forced_schema(tools, named(name), parallel=True)
        assert fits(grammars, schema, json.dumps(answer)) is fitting, (name, answer)


def test_whatever_is_drawn_under_a_forced_schema_is_read_as_calls(grammars):
    tokenizer, read = stored_tokenizers.smollm2(), 0
    for seed, choice in enumerate(["required", named("get_weather")] * 6):
        rng, tokens, reader, pieces = random.Random(seed), [], ForcedCalls(choice), []
        matcher = grammars.matcher(Structured(json=forced_schema([WEATHER, MOVE], choice, parallel=True)))
        while len(tokens) < 60:
            matcher.follow(tokens)
            ids = allowed(matcher)
            # Not only white space, which may go on for ever.
            inked = [i for i in ids if (tokenizer.piece(i) or b"").strip()] or ids
            token_id = EOS if EOS in ids else rng.choice(inked)
            if token_id == EOS:
                break
            tokens.append(token_id)
            pieces += reader.append(tokenizer.piece(token_id).decode())
        pieces += reader.finish()
        assert all(isinstance(piece, CallStart | CallArguments) for piece in pieces)
        if tokens and token_id == EOS:
            read += 1
            text = b"".join(map(tokenizer.piece, tokens)).decode()
            expected = json.loads(text) if choice == "required" else [call("get_weather", json.loads(text))]
            starts = [piece for piece in pieces if isinstance(piece, CallStart)]
            arguments = [
                "".join(piece.text for piece in pieces if isinstance(piece, CallArguments) and piece.index == i)
                for i in range(len(starts))
            ]
            assert [call(start.name, json.loads(text)) for start, text in zip(starts, arguments)] == expected
    assert read >= 6, "most end before they are cut off"


def test_parameters_that_are_nested_too_deep_are_refused():
    schema: dict = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="^tools have parameters that are nested too deep"):
        forced_schema([tool("f", schema)], "required", parallel=True)
    while schema:  # a deep object can't be freed at once
        schema = schema.pop("items")


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", named("get_time")])
def test_tools_as_openai_has_them_pass(choice):
    check_tools([WEATHER, MOVE, TIME, tool("f", {}, description="what", strict=None)], choice)
    if choice in (None, "none", "auto"):
        check_tools(None, choice)
        check_tools([], choice)


@pytest.mark.parametrize(
    ("tools", "choice", "complaint"),
    [
        ({"type": "function"}, None, "tools must be a list of tools, got {'type': 'function'}"),
        (["f"], None, "tools[0] must be an object like"),
        ([{"function": {"name": "f"}}], None, 'tools[0].type must be "function", the only kind there is, got None'),
        ([TIME, {"type": "web_search"}], None, "tools[1].type must be"),
        ([{"type": "function"}], None, "tools[0].function must be an object with a name, got None"),
        ([tool("")], None, "tools[0].function.name must be 1 to 64 letters, digits, _ and -, got ''"),
        ([tool("a b")], None, "tools[0].function.name must be"),
        ([tool("a\n")], None, "tools[0].function.name must be"),
        ([tool("a" * 65)], None, "tools[0].function.name must be"),
        ([tool(None)], None, "tools[0].function.name must be"),
        ([TIME, MOVE, TIME], None, "tools[2].function.name is 'get_time', which is the name of tools[0], too"),
        ([tool("f", description=5)], None, "tools[0].function.description must be a string, got 5"),
        ([tool("f", strict="yes")], None, "tools[0].function.strict must be true or false, got 'yes'"),
        ([tool("f", [])], None, "tools[0].function.parameters must be a JSON schema like"),
        ([tool("f", {"type": "string"})], None, 'tools[0].function.parameters.type must be "object"'),
        ([tool("f", {"properties": []})], None, "tools[0].function.parameters.properties must map names"),
        (None, "required", 'tool_choice is "required", which needs tools'),
        ([], "required", 'tool_choice is "required", which needs tools'),
        ([TIME], "any", 'tool_choice must be "none", "auto", "required" or an object like'),
        ([TIME], 5, "tool_choice must be"),
        ([TIME], {"type": "function", "name": "get_time"}, "tool_choice must be"),
        ([TIME], {"function": {"name": "get_time"}}, "tool_choice must be"),
        ([TIME], {"type": "allowed_tools", "function": {"name": "get_time"}}, "tool_choice must be"),
        ([TIME], named("move"), "tool_choice names the function 'move', which is not among the tools (get_time)"),
        (None, named("move"), "tool_choice names the function 'move', which is not among the tools (none)"),
    ],
)
def test_what_are_no_tools_is_refused_by_its_place(tools, choice, complaint):
    with pytest.raises(ValueError, match="^" + re.escape(complaint)):
        check_tools(tools, choice)
