"""Texts with calls of tools, and what a reader makes of them."""

from __future__ import annotations

import itertools

from jpaged.server.tool_calls import MARKERS, CallArguments, CallStart, Content, ForcedCalls, ToolCallParser

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
CALL = ("f", '{"a": 1}')

NAMED = {"type": "function", "function": {"name": "f"}}
READERS = {
    **{format: lambda format=format: ToolCallParser(format) for format in MARKERS},
    "required": lambda: ForcedCalls("required"),
    "named": lambda: ForcedCalls(NAMED),
}


def read(reader, parts):
    """What comes out, in its order: text, and (name, arguments) for a call."""
    found = []
    for piece in [*itertools.chain.from_iterable(map(reader.append, parts)), *reader.finish()]:
        match piece:
            case Content(text):
                assert text
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case CallStart(index, _, name):
                assert index == sum(isinstance(item, tuple) for item in found), "calls are counted from 0"
                found.append((name, ""))
            case CallArguments(index, text):
                assert text and index == sum(isinstance(item, tuple) for item in found) - 1
                name, before = found[-1]
                found[-1] = (name, before + text)
    assert reader.has_calls == any(isinstance(item, tuple) for item in found)
    assert reader.finish() == []
    return found


def parse(format, text):
    whole = read(READERS[format](), [text])
    assert read(READERS[format](), list(text)) == whole, "a character at a time"
    return whole
