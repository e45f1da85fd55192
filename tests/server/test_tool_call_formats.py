"""How a model's format of calls is found, and what its tokenizer shows and hides of them."""

from __future__ import annotations

import re

import pytest
import stored_tokenizers
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tool_texts import CALL, HERMES, LLAMA, read

from jpaged.host.detokenizer import Detokenizer
from jpaged.host.tokenizer import Tokenizer
from jpaged.server.tool_calls import MARKERS, EndOfTurn, ToolCallParser, format_of, needs_special_tokens


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (
            r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}""",
            "hermes",
        ),
        ("""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}""", None),
        ("{{ '\n<tool_call>' + tc.name }}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>{% endfor %}", None),
        ("""{{- "[TOOL_CALLS] [" }}""", "mistral"),
        ("""{{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}""", "mistral"),
        ("""{{- "<|python_tag|>" + tool_call.name + ".call(" }}""", "llama3"),
        (
            """{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": """
            """dictionary of argument name and its value}.' }}{%- endif %}""",
            "llama3",
        ),
        (
            r"""{%- if tools %}{{- "Respond in {\"name\": name, \"parameters\": dictionary}" }}{%- endif %}""",
            "llama3",
        ),
        ("""{% if tools %}[{ "tool_name": title of the tool, "parameters": a dict of parameters }]{% endif %}""", None),
        ("""{% if tools %}<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>{% endif %}""", None),
        (stored_tokenizers.CHATML, None),
        ("", None),
    ],
)
def test_the_format_is_read_off_the_chat_template(template, format):
    assert format_of(template) == format


def special_texts(tokenizer):
    return {tokenizer.piece(i, skip_special_tokens=False).decode() for i in tokenizer.special_ids}


def with_tokens(tokens, special):
    backend = tokenizers.Tokenizer.from_str(stored_tokenizers.smollm2_backend_text())
    backend.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False) for token in tokens])
    return Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"})


@pytest.mark.parametrize(
    ("format", "special", "text"),
    [
        ("hermes", False, HERMES),
        ("hermes", True, HERMES),
        ("mistral", True, '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("llama3", True, f"<|python_tag|>{LLAMA}"),
    ],
)
def test_markers_that_are_special_tokens_are_seen_and_the_end_of_the_turn_is_not(format, special, text):
    tokenizer = with_tokens(MARKERS[format], special)
    shown = needs_special_tokens(format, special_texts(tokenizer))
    assert shown is special
    ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=not shown)
    end, parser, parts = EndOfTurn(["<|im_end|>"]), ToolCallParser(format), []
    parts = [end.append(detokenizer.append(token_id)) for token_id in ids]
    parts += [end.append(detokenizer.finish()), end.finish()]
    assert read(parser, parts) == [CALL]


@given(st.lists(st.sampled_from(["<", "|", "end", "|>", "<|end|>", "<|end", "x", "</s>", "</"])), st.booleans())
@example(["<|end|>"], True)
@example(["<|end|>", "<|end|>"], True)
def test_only_the_token_that_ended_the_text_is_taken_off(parts, stopped):
    text = "".join(parts)
    end = EndOfTurn([">", "", "</s>", "<|end|>"])
    shown = "".join([*map(end.append, parts), end.finish(stopped)])
    assert shown == (re.sub(r"(</s>|<\|end\|>|>)\Z", "", text) if stopped else text)
    assert end.finish() == ""
    one_by_one = EndOfTurn(["<|end|>", "</s>", ">"])
    assert "".join([*map(one_by_one.append, text), one_by_one.finish(stopped)]) == shown
    assert EndOfTurn([]).append("text") == "text"
