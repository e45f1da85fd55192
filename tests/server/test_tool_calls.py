"""Texts of models, cut anywhere, come out as what was meant: content and calls."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_texts import CALL, HERMES, LLAMA, NAMED, READERS, parse, read

from jpaged.server.tool_calls import MARKERS, CallArguments, Content, ForcedCalls, ToolCallParser

# ---- what each format means


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", HERMES, [CALL]),
        ("hermes", f"\n{HERMES}\n", [CALL]),
        ("hermes", f"{HERMES}\n{HERMES}{HERMES}", [CALL] * 3),
        ("hermes", f"Let me look.\n\n{HERMES}\nThat was it. \n", ["Let me look.", CALL, "That was it. \n"]),
        ("hermes", f"<think>\nHm.\n</think>\n\n{HERMES}", ["<think>\nHm.\n</think>", CALL]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [CALL]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', [CALL]),
        (
            "mistral",
            'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}} , {"name": "g"}] ',
            ["Hm.", CALL, ("g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', [CALL]),
        ("mistral", 'Hm.\n[TOOL_CALLS]f{"a": 1}', ["Hm.", CALL]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [CALL, ("g", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [CALL]),
        ("llama3", LLAMA, [CALL]),
        ("llama3", f"\n <|python_tag|> {LLAMA}", [CALL]),
        ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA};\n{LLAMA}", [CALL] * 3),
        ("llama3", f"{LLAMA};{LLAMA}\nDone.", [CALL, CALL, "Done."]),
        ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [CALL]),
        ("llama3", '<|python_tag|>{"name": "f"}', [("f", "{}")]),
        ("named", ' {"a": 1} ', [CALL]),
        ("required", '[{"name": "f", "parameters": {"a": 1}}, {"name":"g","parameters":{}}]\n', [CALL, ("g", "{}")]),
    ],
)
def test_calls_are_read_as_their_format_writes_them(format, text, expected):
    assert parse(format, text) == expected


def hermes(call):
    return parse("hermes", f"<tool_call>\n{call}\n</tool_call>")


def test_the_keys_of_a_call_come_in_any_order_and_with_others():
    assert hermes('{"arguments": {"a": 1}, "name": "f"}') == [CALL]
    assert hermes('{"id": 7, "x": [{"name": "g"}], "name": "f", "y": null, "arguments": {"a": 1}, "z": "}"}') == [CALL]
    assert hermes(r'{"x": "\\", "y\"": "\\\"", "name": "f", "arguments": {"a": 1}}') == [CALL]
    assert hermes('{"parameters": {"a": 1}, "name": "f", "arguments": {"b": 2}}') == [CALL], "the first one counts"
    assert hermes('{"name": "f", "name": "g", "arguments": {"a": 1}, "name": "h"}') == [CALL]


def test_arguments_are_passed_as_they_are_written():
    for text in [
        "{}",
        '{ "a" :\n1.50 }',
        '{"a": "\\u00e9 \\"}]\\" \\\\", "b": [{"c": []}]}',
        '{"a": "</tool_call> <tool_call> {"}',
        '{"ä": "漢字 🙂"}',
        "{'a': True}",
    ]:
        assert hermes(f'{{"name": "f", "arguments": {text}}}') == [("f", text)]


def test_arguments_in_a_string_are_passed_as_its_contents():
    for arguments in ({"a": 1}, {}, {"ä": '"\\\n\té漢 🙂</tool_call>', "b": [{"c": "/"}]}):
        for inner, outer in itertools.product((True, False), repeat=2):
            text = json.dumps(arguments, ensure_ascii=inner)
            quoted = json.dumps(text, ensure_ascii=outer)
            for call in (f'{{"name": "f", "arguments": {quoted}}}', f'{{"arguments": {quoted}, "name": "f"}}'):
                [(name, found)] = hermes(call)
                assert name == "f" and json.loads(found) == arguments
                assert found == text or "\\ud83d" in quoted
    assert hermes(r'{"name": "f", "arguments": " \n\u007b\/\"a\": \"\ud83d\"}"}') == [("f", '{/"a": "\\ud83d"}')]


def test_a_call_without_arguments_has_none():
    for rest in ("", ', "arguments": null', ', "arguments": ""', ', "arguments": " "', ', "arguments": {}'):
        assert hermes(f'{{"name": "f"{rest}}}') == [("f", "{}")]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "I would write <tool_call> here, and </tool_call> there."),
        ("hermes", "a < b, <tool, <tool_calls>, <<tool_call> "),
        ("hermes", " <tool_call>\n"),
        ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}'[:-2] + '"\\nx"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", }</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
        ("hermes", '<tool_call> {"arguments": {"a": "b"}} </tool_call> '),
        ("hermes", '<tool_call> {"arguments": "{\\"a\\": 1}"} </tool_call> '),
        ("hermes", '<tool_call>{"arguments": {"a": <}, "name": "f"}'),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", '<tool_call>[{"name": "f"}]</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": '),
        ("hermes", LLAMA),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALL] [TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]of this kind [ARGS] {}"),
        ("mistral", "[TOOL_CALLS]f[ARG{}"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]x{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS][]"),
        ("mistral", "[TOOL_CALLS]fä{}"),
        ("mistral", '[TOOL_CALLS]["f", {}]'),
        ("llama3", f"Here it is: {LLAMA}"),
        ("llama3", f"<|python_tag{LLAMA}"),
        ("llama3", f"[{LLAMA}]"),
        ("llama3", '{"name": "Ann", "age": 5}'),
        ("llama3", '{"name": "Ann"}'),
        ("llama3", '<|python_tag|>brave_search.call(query="weather")'),
        ("llama3", "<|python_tag|>"),
        ("named", "[1]"),
        ("required", LLAMA),
        ("required", '["f"]'),
    ],
)
def test_what_only_looks_like_a_call_is_content(format, text):
    assert parse(format, text) == [text]


def test_a_call_after_one_that_is_none_is_read():
    bad = '<tool_call>\n{"name": "g, "arguments": {}}\n</tool_call>'
    assert parse("hermes", f"{bad}\n{HERMES}") == [bad, CALL]
    assert parse("hermes", f"<tool_call>{HERMES}") == ["<tool_call>", CALL]
    for bad in ("?", "", "[", "f", "f[ARGS]", "f[CALL_ID]x", '[{"name": ['):
        assert parse("mistral", f'[TOOL_CALLS]{bad}[TOOL_CALLS]f{{"a": 1}}') == [f"[TOOL_CALLS]{bad}", CALL]


def test_what_follows_a_call_and_is_no_other_is_content():
    assert parse("hermes", f"{HERMES[:-12]}Done. ") == [CALL, "Done. "]
    assert parse("hermes", f"{HERMES[:-12]}</tool> ") == [CALL, "</tool> "]
    assert parse("hermes", f"{HERMES[:-12]}{HERMES}") == [CALL, CALL]
    assert parse("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, 5] x') == [CALL, ", 5] x"]
    assert parse("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}} x') == [CALL, "x"]
    assert parse("llama3", f"{LLAMA}; so") == [CALL, "; so"]
    assert parse("llama3", f"{LLAMA} {LLAMA}") == [CALL, LLAMA]


def test_a_call_that_is_out_stays_one_though_its_brackets_are_wrong():
    assert hermes('{"name": "f", "arguments": {"a": 1}') == [CALL]
    assert hermes('{"name": "f", "arguments": {"a": 1') == [("f", '{"a": 1\n')]
    assert hermes('{"name": "f", "arguments": {"a": 1}, "id"}') == [CALL, ', "id"}\n</tool_call>']
    assert hermes('{"name": "f", "arguments": "{\\"a\\": 1}"') == [CALL]
    assert hermes(r'{"name": "f", "arguments": "{\u00"}') == [("f", "{"), '\\u00"}\n</tool_call>']
    assert hermes(r'{"name": "f", "arguments": "{\x\u00zz"}') == [("f", r"{\x\u00zz")]
    assert parse("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}]') == [CALL]


def test_a_text_that_is_cut_off_leaves_what_there_was():
    assert parse("hermes", HERMES[:-18]) == [("f", '{"a"')]
    assert parse("hermes", HERMES[:-13]) == [CALL]
    assert parse("hermes", HERMES[:-10]) == [CALL, "</"], "nothing tells it from text"
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\') == [("f", '{"a": ')]
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "ab') == [CALL]
    assert parse("hermes", 'Hm. <tool_call>{"name": "f"') == ['Hm. <tool_call>{"name": "f"']
    assert parse("llama3", f"{LLAMA}; ") == [CALL]
    assert parse("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}},') == [CALL]
    assert parse("named", '{"a": "b') == [("f", '{"a": "b')]
    assert parse("named", "") == parse("required", "") == []
    assert parse("required", '[{"name": "f", ') == [] and parse("required", '[{"name": x') == ['[{"name": x']


# ---- what holds for any text

FRAGMENTS = [
    *itertools.chain.from_iterable(MARKERS.values()),
    *'{}[]",:;\\<>| \n',
    *(
        '"name"',
        '"arguments"',
        '"parameters"',
        '"f"',
        ": ",
        ", ",
        "{}",
        '{"a": 1}',
        '"{\\"a\\": 1}"',
        "null",
        "f",
        "g1",
    ),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"arguments": {"a": 1}, ', '"name": "f"'),
    *("\\u00e9", "\\ud83d\\ude00", "\\u00", "\\n", '\\"', "ä🙂", "<tool_", "_call>", "[TOOL", "<|py", "}}", "}]"),
    *(HERMES, LLAMA, "[TOOL_CALLS][", "[TOOL_CALLS]f", '[{"name": "f", "parameters": '),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


@settings(max_examples=250)
@given(st.sampled_from([*READERS]), TEXTS, st.lists(st.integers(0, 200), max_size=12))
def test_however_a_text_is_cut_the_same_comes_out(format, text, cuts):
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert read(READERS[format](), parts) == parse(format, text)


@settings(max_examples=200)
@given(st.sampled_from([*MARKERS]), TEXTS)
def test_a_text_without_a_call_comes_out_exactly(format, text):
    found = parse(format, text)
    if format == "llama3":
        possible = text.lstrip(" \t\r\n").startswith(("{", "<|python_tag|>"))
    else:
        possible = MARKERS[format][0] in text
    if not possible or not any(isinstance(item, tuple) for item in found):
        assert found == ([text] if text else [])


@settings(max_examples=200)
@given(st.sampled_from([*READERS]), TEXTS.map(lambda text: text.replace("\\", "")))
def test_no_letter_comes_out_twice_or_is_made_up(format, text):
    """Without escapes, as arguments in strings come out without them."""
    at = 0
    for item in parse(format, text):
        part = item if isinstance(item, str) else item[1]
        if part == "{}":
            continue  # of a call that has none
        at = text.find(part, at) + len(part)
        assert at >= len(part), f"{part!r} is not in the rest of the text"


ARGUMENTS = st.sampled_from(
    [
        {},
        {"a": 1},
        {"": None, "b": [[], {}, [{"c": -1.5}]]},
        {"d": '</tool_call> "}]\\'},
        {"é🙂": "[ARGS]\n;"},
        {"e": {"f": {}}},
    ]
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a-b"]), ARGUMENTS), min_size=1, max_size=4)
SAYINGS = st.sampled_from(["", "Hm.", "a {b}", "two\n\nlines", '"', "<", "[]"])


def written(format, calls, draw):
    """The calls as a model writes them, and what is to come out."""
    key = "parameters" if format in ("llama3", "required") else "arguments"
    objects, expected = [], []
    for name, arguments in calls:
        text = json.dumps(arguments, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        members = [f'"name": {json.dumps(name)}', f'"{key}": {text}']
        if draw(st.booleans()):
            members.reverse()
        objects.append(f"{{{', '.join(members)}}}")
        expected.append((name, text))
    if format == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects), expected
    if format == "llama3":
        return "; ".join(objects), expected
    if format == "mistral" and draw(st.booleans()):
        infix = draw(st.sampled_from(["", "[ARGS]"]))
        return "".join(f"[TOOL_CALLS]{name}{infix}{text}" for name, text in expected), expected
    return ("[TOOL_CALLS] " if format == "mistral" else "") + f"[{', '.join(objects)}]", expected


@settings(max_examples=120)
@given(st.sampled_from(["hermes", "mistral", "llama3", "required"]), CALLS, SAYINGS, SAYINGS, st.data())
def test_calls_that_were_written_are_read(format, calls, before, after, data):
    text, expected = written(format, calls, data.draw)
    if format in ("hermes", "mistral"):
        text, expected = f"{before}\n{text}", [*([before] if before else []), *expected]
    text, expected = f"{text}\n{after}", [*expected, *([after] if after else [])]
    assert parse(format, text) == expected


@settings(max_examples=100)
@given(st.sampled_from(["hermes", "mistral", "llama3", "required"]), CALLS, st.data())
def test_the_calls_of_a_beginning_are_the_beginning_of_the_calls(format, calls, data):
    text, expected = written(format, calls, data.draw)
    text = text[: data.draw(st.integers(0, len(text)))]
    found = [item for item in parse(format, text) if isinstance(item, tuple)]
    for (name, arguments), (whole_name, whole) in zip(found, expected):
        assert name == whole_name and whole.startswith(arguments)
    assert found[:-1] == expected[: max(len(found) - 1, 0)]


# ---- what is certain comes at once


def test_content_and_arguments_come_as_soon_as_they_are_certain():
    parser = ToolCallParser("hermes")
    assert parser.append("Let me see") == [Content("Let me see")]
    assert parser.append(". \n") == [Content(".")]
    assert parser.append("<tool_c") == []
    assert parser.append('all>{"name": "f", "arguments": ') == [] and not parser.has_calls
    start, arguments = parser.append('{"a": "b')
    assert (start.index, start.name) == (0, "f") and arguments == CallArguments(0, '{"a": "b')
    assert parser.append("c d\\") == [CallArguments(0, "c d\\")]
    assert parser.append('"e"}') == [CallArguments(0, '"e"}')]
    assert parser.append("}\n</tool_call>") == []
    assert parser.append("\nOh") == [Content("Oh")] and parser.append("!") == [Content("!")]
    assert parser.finish() == []


def test_arguments_in_a_string_come_as_soon_as_their_escapes_are_whole():
    parser = ToolCallParser("hermes")
    assert parser.append('<tool_call>{"name": "f", "arguments": "') == []
    assert parser.append('{\\"a\\": ')[1:] == [CallArguments(0, '{"a": ')]
    assert parser.append("\\") == [] and parser.append('"\\u00') == [CallArguments(0, '"')]
    assert parser.append("e9x ") == [CallArguments(0, "éx ")]
    assert parser.append('\\"}"}') == [CallArguments(0, '"}')]


def test_arguments_that_come_first_are_passed_with_the_name():
    parser = ToolCallParser("llama3")
    assert parser.append('{"parameters": {"a": 1}, ') == []
    start, arguments = parser.append('"name": "f"}')
    assert start.name == "f" and arguments == CallArguments(0, '{"a": 1}')


def test_a_text_that_can_be_no_call_is_shown_at_once():
    parser = ToolCallParser("llama3")
    assert parser.append("H") == [Content("H")] and parser.append("i \n") == [Content("i \n")]
    parser = ToolCallParser("llama3")
    assert parser.append('{"n') == [] and parser.append("\n") == [Content('{"n\n')]


def test_ids_are_unlike_each_other_and_as_their_format_demands():
    usual, short = "call_[0-9a-f]{24}", "[A-Za-z0-9]{9}"
    for format, pattern in {"hermes": usual, "llama3": usual, "mistral": short, None: usual}.items():
        forced = [ForcedCalls(NAMED, format).append("{}") for _ in range(20)]
        ids = {pieces[0].id for pieces in forced}
        assert len(ids) == 20 and all(re.fullmatch(pattern, id) for id in ids)
    assert re.fullmatch(short, ToolCallParser("mistral").append("[TOOL_CALLS]f{}")[0].id)
    assert re.fullmatch(usual, ToolCallParser("hermes").append(HERMES)[0].id)


def test_an_unknown_format_is_refused_with_those_known():
    with pytest.raises(ValueError, match="format must be one of hermes, llama3, mistral, got 'pythonic'"):
        ToolCallParser("pythonic")
