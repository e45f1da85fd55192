"""Owns `ToolCallParser`: what a model generates, in its format of calls of tools, as content and calls as they come."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jpaged.server.call_reader import SPACE, CallArguments, CallReader, CallStart, Content, Piece, Reading

__all__ = [
    "MARKERS",
    "CallArguments",
    "CallStart",
    "Content",
    "EndOfTurn",
    "ForcedCalls",
    "Piece",
    "ToolCallParser",
    "format_of",
    "needs_special_tokens",
]

# What stands for a call in the text of each format. Some tokenizers hold these as special tokens.
MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LLAMA3_CALL = re.compile(r'\{\\*"name\\*":[^{}]{0,60}?\\*"parameters\\*":')


def format_of(chat_template: str) -> str | None:
    """The format in which a model writes calls, by the source of its chat template (of the one that is used with
    tools, if there are several); None if that is none of those known.

    `<tool_call>` alone isn't enough: Qwen3-Coder and GLM-4.5 write XML in it.
    """
    if "<tool_call>" in chat_template:
        return None if "<function=" in chat_template or "<arg_key>" in chat_template else "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<|python_tag|>" in chat_template or ("tool" in chat_template and _LLAMA3_CALL.search(chat_template)):
        return "llama3"
    return None


def needs_special_tokens(format: str, special_tokens: Collection[str]) -> bool:
    """Whether a text in that format is complete only with `skip_special_tokens=False`, given the texts of the
    tokenizer's special tokens: `[TOOL_CALLS]` and `<|python_tag|>` are among them, Qwen's `<tool_call>` isn't. The text
    then has the token that ended it, too, which `EndOfTurn` takes away.
    """
    return not set(MARKERS[format]).isdisjoint(special_tokens)


class EndOfTurn:
    """Takes the token that ended a text (`<|eot_id|>`, `</s>`) off it, where special tokens are shown.

    `tokens` are the texts of all tokens that end one. Parts of any cut go in; what comes out joins to the text.
    """

    def __init__(self, tokens: Iterable[str]):
        self._tokens = list(tokens)
        self._held = ""

    def append(self, text: str) -> str:
        text = self._held + text
        longest = max(map(len, self._tokens), default=0)
        starts = range(max(0, len(text) - longest), len(text))
        border = next((i for i in starts if any(token.startswith(text[i:]) for token in self._tokens)), len(text))
        self._held = text[border:]
        return text[:border]

    def finish(self, stopped: bool = True) -> str:
        """What was held back. `stopped`: the text was ended by a token, and not by `max_tokens` or a stop string."""
        held, self._held = self._held, ""
        endings = [token for token in self._tokens if stopped and held.endswith(token)]
        return held.removesuffix(max(endings, key=len, default=""))


class ToolCallParser(CallReader):
    """Turns the text of a model into content and calls.

    format: "hermes" (Hermes 2 Pro, Qwen 2.5, Qwen 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any
    number of them in a text. "llama3" (Llama 3.1 to 3.3): the text begins with `{"name": ..., "parameters": {...}}`,
    after `<|python_tag|>` or not, and `;` stands between calls. "mistral": `[TOOL_CALLS]`, then a list of
    `{"name": ..., "arguments": {...}}`, or `name{...}`, or `name[ARGS]{...}`. Raises ValueError for another.

    A call begins when its name is known and its arguments begin. From there on they are passed on as the model writes
    them, up to the bracket that closes them, and nobody checks that they are JSON: a call that was announced can't be
    taken back. What is no call by then is content, to the letter. Without `<|python_tag|>` an object of "llama3" is a
    call only if it has parameters: others are answers in JSON.
    """

    def __init__(self, format: str):
        if format not in MARKERS:
            raise ValueError(f"format must be one of {', '.join(MARKERS)}, got {format!r}")
        super().__init__(_id_maker(format))
        self._format = format

    def _read(self) -> Reading[None]:
        return {"hermes": self._hermes, "llama3": self._llama3, "mistral": self._mistral}[self._format]()

    def _find(self, marker: str) -> Reading[bool]:
        """Shows what is held and the text up to a marker, and reads that, too."""
        if self._held[-1:] == [marker[0]]:  # what was no call may end where the marker begins
            self._held.pop()
            self._show_held()
            self._held.append(marker[0])
            if (yield from self._literal(marker, read=marker[0])):
                return True
        self._show_held()
        while self._unit:
            if self._unit in SPACE:
                yield from self._hold()
            elif self._unit != marker[0]:
                yield from self._show()
            elif (yield from self._literal(marker)):
                return True
            else:
                self._show_held()
        return False

    def _hermes(self) -> Reading[None]:
        begin, end = MARKERS["hermes"]
        while (yield from self._find(begin)):
            yield from self._skip_space()
            if (yield from self._call()):
                yield from self._forget_space()
                if (yield from self._literal(end)):
                    self._held.clear()
                    yield from self._forget_space()

    def _llama3(self) -> Reading[None]:
        yield from self._skip_space()
        tag = yield from self._literal(*MARKERS["llama3"])
        yield from self._skip_space()
        while tag is not None and (yield from self._call(needs_arguments=not tag)):
            if not (yield from self._separator(";")):
                return
        self._show_held()

    def _mistral(self) -> Reading[None]:
        while (yield from self._find("[TOOL_CALLS]")):
            yield from self._skip_space()
            read = {"[": self._calls, "{": self._call}.get(self._unit, self._named_call)
            if (yield from read()):
                yield from self._forget_space()

    def _named_call(self) -> Reading[bool]:
        name = yield from self._word()
        if not _NAME.fullmatch(name):
            return False
        yield from self._skip_space()
        if self._unit == "[":
            marker = yield from self._literal("[CALL_ID]", "[ARGS]")
            if marker == "[CALL_ID]":
                yield from self._word()
                marker = yield from self._literal("[ARGS]")
            if not marker:
                return False
            yield from self._skip_space()
        return (yield from self._bare_arguments(name))


class ForcedCalls(CallReader):
    """Reads an answer that was held to `forced_schema` of the same `tool_choice`: of a function that is named its
    arguments, else a list of calls. What is neither is content; the beginning of a call at which `max_tokens` cuts the
    answer off is not. `format` is that of the model, for the ids."""

    def __init__(self, tool_choice: str | dict[str, Any], format: str | None = None):
        super().__init__(_id_maker(format))
        self._forced_name = None if isinstance(tool_choice, str) else tool_choice["function"]["name"]

    def _read(self) -> Reading[None]:
        yield from self._skip_space()
        name = self._forced_name
        if (yield from self._calls() if name is None else self._bare_arguments(name)):
            yield from self._forget_space()
        if not self._unit:
            self._held.clear()
        self._show_held()


def _id_maker(format: str | None) -> Callable[[], str]:
    if format == "mistral":  # its templates refuse others
        letters = string.ascii_letters + string.digits
        return lambda: "".join(secrets.choice(letters) for _ in range(9))
    return lambda: "call_" + secrets.token_hex(12)
