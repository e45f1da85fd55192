"""Owns chat templates: messages are checked and rendered to the text that a model was trained to answer."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; for the text it is a plain block."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template ready to render, and the names of the variables that it reads."""
    # Templates come with downloaded weights: the sandbox keeps them from reaching Python.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(template))
        return environment.from_string(template), frozenset(names)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with every content a string; other keys of a message go to the template as they are.

    A list of text parts (`{"type": "text", "text": ...}`) becomes one string, the parts joined by newlines. Content may
    be missing or None in a message that carries `tool_calls`.

    Raises ValueError naming the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__iter__"):
        raise ValueError(
            f"messages must be a list of dicts like {{'role': 'user', 'content': 'Hi'}}, got {_short(messages)}"
        )
    checked = [_check_message(i, message) for i, message in enumerate(messages)]
    if not checked:
        raise ValueError("messages is empty: give at least one message")
    return checked


def _check_message(i: int, message: Any) -> dict[str, Any]:
    where = f"messages[{i}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be a dict with 'role' and 'content', got {_short(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: role must be a non-empty string such as 'user', got {_short(role)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    return {**message, "content": _check_content(where, content)}


def _check_content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"{where}: content must be a string or a list of text parts, got {_short(content)}")
    texts = []
    for j, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ValueError(
                f"{where}: content[{j}] must be a text part like {{'type': 'text', 'text': 'Hi'}}, got {_short(part)}"
            )
    return "\n".join(texts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def render(
    template: str,
    messages: Any,
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
) -> str:
    """The text of the messages. `variables` are the template's own options (`tools`, `enable_thinking`, ...); one that
    is None counts as not given.

    Raises ValueError: the messages' shape, a variable that the template does not read, or the template's own complaint.
    """
    compiled, names = _compile(template)
    given = {name: value for name, value in variables.items() if value is not None}
    own = {"messages", "add_generation_prompt", *special_tokens}
    for name in given:
        if name in own or name not in names:
            readable = ", ".join(sorted(names - own)) or "nothing"
            raise ValueError(f"the chat template takes no variable {name!r}; beside the messages it reads: {readable}")
    values = {
        "tools": None,  # templates tell "no tools" by none as well as by undefined
        "documents": None,
        **special_tokens,
        **given,
        "messages": check_messages(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return compiled.render(values)
    except Exception as error:  # a template is a program that came with the model: whatever it raises is its answer
        raise ValueError(f"the chat template refuses these messages: {error}") from error
