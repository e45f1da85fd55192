from __future__ import annotations

import datetime
import json

import pytest
import tokenizers
from stored_tokenizers import CHATML, DATA, smollm2_backend_text
from tokenizers import processors

from jpaged.host import chat
from jpaged.host.tokenizer import Tokenizer

REFERENCE = json.loads((DATA / "smollm2_tokenizer.json").read_text())
HI = [{"role": "user", "content": "hi"}]


def render(template, messages=HI, add_generation_prompt=True, **variables):
    special = {"bos_token": "<s>"}
    return chat.render(
        template, messages, add_generation_prompt=add_generation_prompt, special_tokens=special, variables=variables
    )


def with_bos(template: str | None) -> Tokenizer:
    """A tokenizer whose `encode` adds a BOS."""
    backend = tokenizers.Tokenizer.from_str(smollm2_backend_text())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", 1)]
    )
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|im_start|>"},
        chat_templates={"default": template} if template is not None else {},
    )


def test_a_template_that_writes_the_bos_gives_exactly_one():
    tokenizer = with_bos("{{ bos_token }}{{ messages[0].content }}")
    assert tokenizer.encode_chat(HI) == [1, *tokenizer.encode("hi", add_special_tokens=False)]
    assert tokenizer.encode("hi") == tokenizer.encode_chat(HI)


def test_chats_become_the_ids_of_the_reference():
    # The template of the small model, written with one line per statement.
    template = (
        "{% for message in messages %}"
        "{% if loop.first and message.role != 'system' %}<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>{{ '\n' }}{% endif %}"
        "<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>{{ '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
    )
    tokenizer = with_bos(template)
    for case in REFERENCE["chats"]:
        assert tokenizer.apply_chat_template(case["messages"], case["add_generation_prompt"]) == case["text"]
        assert tokenizer.encode_chat(case["messages"], case["add_generation_prompt"]) == case["ids"]


def test_a_model_without_a_template_says_so():
    with pytest.raises(ValueError, match="no chat template.*chat_template.jinja"):
        with_bos(None).encode_chat(HI)


def test_a_model_without_a_default_template_names_those_it_has():
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(smollm2_backend_text()), chat_templates={"rag": "x"})
    with pytest.raises(ValueError, match="'default'.*rag"):
        tokenizer.apply_chat_template(HI)


def test_the_template_s_own_complaint_is_the_error():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    assert render(template) == "ok"
    with pytest.raises(ValueError, match="refuses these messages: System role not supported"):
        render(template, [{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content + none }}", "{{ nothing.at_all }}", "{{ messages[7].role.x }}", "{{ 1 // 0 }}"]
)
def test_a_template_that_breaks_is_an_error_about_the_template(template):
    with pytest.raises(ValueError, match="the chat template refuses these messages"):
        render(template)


def test_a_template_with_bad_syntax_is_an_error_about_the_template():
    with pytest.raises(ValueError, match="the chat template cannot be read"):
        render("{% if %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ lipsum.__globals__['os'] }}",
    ],
)
def test_a_template_cannot_reach_python(template):
    with pytest.raises(ValueError, match="the chat template refuses these messages"):
        render(template)


def test_templates_see_what_they_are_written_for():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hi"}]'
    assert render("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": "<é>"\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"
    assert render("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}") == "<s>True"
    assert render("{% if tools is none and documents is none %}no tools{% endif %}") == "no tools"


def test_options_of_a_template_are_passed_on_and_unknown_ones_refused():
    template = "{% if enable_thinking is defined and not enable_thinking %}quick{% else %}slow{% endif %}"
    assert render(template) == "slow"
    assert render(template, enable_thinking=False) == "quick"
    assert render(template, tools=None) == "slow"
    with pytest.raises(ValueError, match="no variable 'enable_thinkin'; beside the messages it reads: enable_thinking"):
        render(template, enable_thinkin=False)
    with pytest.raises(ValueError, match="no variable 'tools'"):
        render(template, tools=[{}])
    with pytest.raises(ValueError, match="no variable 'bos_token'"):
        render("{{ bos_token }}", bos_token="x")


def test_text_parts_are_joined_to_a_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert render("[{{ messages[0].content }}]", [{"role": "user", "content": []}]) == "[]"


def test_an_answer_of_tool_calls_needs_no_content():
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    template = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.name }}"
    assert render(template, [message]) == "f"


def test_the_messages_given_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render(CHATML, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    "messages, message",
    [
        ("hi", "messages must be a list.*'hi'"),
        (None, "messages must be a list.*None"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be a dict.*'hi'"),
        ([*HI, {"content": "x"}], r"messages\[1\]: role must be .*None"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]: role must be .*3"),
        ([{"role": "", "content": "x"}], r"messages\[0\]: role must be .*''"),
        ([{"role": "user"}], r"messages\[0\]: content must be .*None"),
        ([{"role": "user", "content": 5}], r"messages\[0\]: content must be .*5"),
        ([{"role": "user", "content": {"text": "x"}}], r"messages\[0\]: content must be"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be a text part.*'x'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"content\[0\].*image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"content\[0\] must be a text part"),
    ],
)
def test_messages_of_another_shape_are_refused_by_name(messages, message):
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages)
