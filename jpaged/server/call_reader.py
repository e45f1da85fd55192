"""Owns `CallReader`: reads calls of tools, and the text around them, from a text that is still growing."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

SPACE = frozenset(" \t\r\n")
_SINGLE = frozenset(' \t\r\n<>{}[]"\\,:;|')
# A text is read in units: one of these characters, or a run of others, among which nothing begins or ends.
_UNIT = re.compile(r'[^ \t\r\n<>{}\[\]"\\,:;|]+|.', re.DOTALL)
_BROKEN_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}")
# Halves of surrogate pairs stay escaped: no text can hold one, and what is escaped here is JSON, which reads the same.
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})')

type Reading[T] = Generator[None, None, T]  # yields where it needs the next unit


class Content(NamedTuple):
    """Text for the user."""

    text: str


class CallStart(NamedTuple):
    """A call, the `index`-th of its text (from 0)."""

    index: int  # type: ignore[assignment]  # a tuple has a method of that name
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next part of a call's arguments, which are JSON."""

    index: int  # type: ignore[assignment]
    text: str


type Piece = Content | CallStart | CallArguments


class CallReader:
    """Reads a text unit by unit, in coroutines that wait wherever the text may go on.

    Where it is not certain yet whether a text is content, it is held, to be shown as content if it turns out to be, and
    forgotten once a call is certain. Each unit is read once: what follows a text that is no call after all is read from
    the unit at which this showed. So a text takes the time of its length, and how it is cut makes no difference.
    """

    def __init__(self, make_id: Callable[[], str]):
        self._make_id = make_id
        self._num_calls = 0
        self._pieces: list[Piece] = []
        self._held: list[str] = []
        self._finished = False
        self._unit = ""  # the next one, which is not read yet; "" where the text ends
        self._forget_call()
        self._reading = self._run()
        next(self._reading)

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def append(self, text: str) -> list[Piece]:
        """What the next part of the text makes certain."""
        assert not self._finished, "append after finish"
        for self._unit in _UNIT.findall(text):
            next(self._reading)
        return self._take_pieces()

    def finish(self) -> list[Piece]:
        """The rest, now that the text has ended, be it in the middle of a call. A second call returns nothing."""
        if not self._finished:
            self._finished, self._unit = True, ""
            next(self._reading, None)
            self._show_held()
        return self._take_pieces()

    def _run(self) -> Reading[None]:
        yield
        yield from self._read()
        while self._unit:  # nothing can be a call any more
            yield from self._show()

    def _read(self) -> Reading[None]:
        """The calls in the text, as the format of a subclass has them."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its format is read")

    def _take_pieces(self) -> list[Piece]:
        """The pieces so far, parts of one joined."""
        taken: list[Piece] = []
        for kind, group in itertools.groupby(self._pieces, type):
            pieces: list[Any] = list(group)
            if kind is CallStart:
                taken += pieces
            else:
                taken.append(pieces[0]._replace(text="".join(piece.text for piece in pieces)))
        self._pieces = []
        return taken

    # ---- a unit, and what was read

    def _hold(self) -> Reading[None]:
        self._held.append(self._unit)
        yield

    def _show(self) -> Reading[None]:
        self._show_held()
        self._pieces.append(Content(self._unit))
        yield

    def _show_held(self) -> None:
        if self._held:
            self._pieces.append(Content("".join(self._held)))
            self._held.clear()

    def _skip_space(self) -> Reading[None]:
        while self._unit in SPACE:
            yield from self._hold()

    def _forget_space(self) -> Reading[None]:
        """Between calls and around markers white space is no content."""
        assert not self._held
        yield from self._skip_space()
        self._held.clear()

    def _literal(self, *texts: str, read: str = "") -> Reading[str | None]:
        """Reads one of the texts, of which `read` is read already; "" if none of them stands here, None if there is
        only the beginning of one."""
        while self._unit and read not in texts and any(text.startswith(read + self._unit) for text in texts):
            read += self._unit
            yield from self._hold()
        return read if read in texts or not read else None

    # ---- JSON

    def _word(self) -> Reading[str]:
        """A run of other characters: a number, a literal, a name; "" if there is none."""
        word = ""
        while self._unit and self._unit not in _SINGLE:
            word += self._unit
            yield from self._hold()
        return word

    def _string(self) -> Reading[str | None]:
        """A string, whole; None if there is none."""
        if self._unit != '"':
            return None
        yield from self._hold()
        raw, escaped = "", False
        while escaped or self._unit != '"':
            if self._unit in ("", "\n", "\r", "\t"):  # no string goes on in the next line
                return None
            raw += self._unit
            escaped = self._unit == "\\" and not escaped
            yield from self._hold()
        yield from self._hold()
        try:
            return json.loads(f'"{raw}"')
        except ValueError:
            return None

    def _brackets(self, keep: Callable[[str], None]) -> Reading[bool]:
        """Reads to the bracket that closes the one here, and gives each unit to `keep`. False if there is none, or a
        character that JSON has in strings only."""
        depth, quoted = 0, False
        while self._unit and (quoted or self._unit not in "<>|;\\"):
            unit = self._unit
            keep(unit)
            yield
            if unit == '"':
                quoted = not quoted
            elif quoted:
                if unit == "\\" and self._unit:
                    keep(self._unit)
                    yield
            elif unit in "{[":
                depth += 1
            elif unit in "}]":
                depth -= 1
                if depth == 0:
                    return True
        return False

    def _value(self) -> Reading[bool]:
        if self._unit == '"':
            return (yield from self._string()) is not None
        if self._unit in ("{", "["):
            return (yield from self._brackets(self._held.append))
        return bool((yield from self._word()))

    # ---- calls

    def _forget_call(self) -> None:
        self._name: str | None = None
        self._is_open = False  # its name is out
        self._has_arguments = False
        self._early: list[str] = []  # arguments that came before the name

    def _open(self, name: str) -> None:
        self._pieces.append(CallStart(self._num_calls, self._make_id(), name))
        self._num_calls += 1
        self._is_open = True
        self._held.clear()

    def _argue(self, text: str, raw: str) -> None:
        """Arguments, which stand in the text as `raw`."""
        if self._name is not None and not self._is_open:
            self._open(self._name)
        if not self._is_open:
            self._early.append(text)
            self._held.append(raw)
        elif text:
            self._pieces.append(CallArguments(self._num_calls - 1, text))

    def _argue_unit(self, unit: str) -> None:
        self._argue(unit, unit)

    def _call(self, needs_arguments: bool = False) -> Reading[bool]:
        """Reads `{"name": ..., "arguments": {...}}`, with the keys in any order and others among them. False if it is
        none. What has gone out stays a call: one that breaks off after its arguments is whole."""
        self._forget_call()
        if self._unit != "{":
            return False
        yield from self._hold()
        while (yield from self._member()):
            yield from self._skip_space()
            if self._unit == "}":
                yield from self._hold()
                return self._close(needs_arguments)
            if self._unit != ",":
                break
            yield from self._hold()
        if self._is_open and (not self._unit or SPACE.issuperset(self._held)):
            self._held.clear()
            return True
        return False

    def _calls(self) -> Reading[bool]:
        """Reads `[{"name": ...}, ...]`. False where something in it is no call; those before have gone out."""
        if self._unit != "[":
            return False
        yield from self._hold()
        yield from self._skip_space()
        while (yield from self._call()):
            if not (yield from self._separator(",")):
                if self._unit == "]":
                    yield from self._hold()
                    self._held.clear()
                return True
        return False

    def _separator(self, char: str) -> Reading[bool]:
        """After a call: whether another one is to follow."""
        yield from self._forget_space()
        if self._unit != char:
            return False
        yield from self._hold()
        yield from self._skip_space()
        if not self._unit:
            self._held.clear()  # the text is cut off, and no call was begun
        return True

    def _bare_arguments(self, name: str) -> Reading[bool]:
        """Reads the arguments of a call whose name is known. False if there are none."""
        if self._unit != "{":
            return False
        self._forget_call()
        self._name = name
        yield from self._brackets(self._argue_unit)
        return True

    def _close(self, needs_arguments: bool) -> bool:
        if not self._is_open:
            if self._name is None or (needs_arguments and not self._has_arguments):
                return False
            self._argue_unit("{}")
        self._held.clear()
        return True

    def _member(self) -> Reading[bool]:
        yield from self._skip_space()
        key = yield from self._string()
        if key is None:
            return False
        yield from self._skip_space()
        if self._unit != ":":
            return False
        yield from self._hold()
        yield from self._skip_space()
        if key == "name" and self._name is None:
            self._name = yield from self._string()
            if not self._name or not self._name.isprintable():
                return False
            if early := "".join(self._early):
                self._argue_unit(early)
            return True
        if key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._arguments())
        return (yield from self._value())

    def _arguments(self) -> Reading[bool]:
        if self._unit == "{":
            return (yield from self._brackets(self._argue_unit))
        if self._unit == '"':
            return (yield from self._quoted_arguments())
        return (yield from self._word()) == "null"

    def _quoted_arguments(self) -> Reading[bool]:
        """Arguments in a string, without its quotes and escapes."""
        yield from self._hold()
        begun = False
        while self._unit and self._unit != '"':
            raw = self._unit
            while raw == "\\" or _BROKEN_ESCAPE.fullmatch(raw):
                yield
                if not self._unit or (raw != "\\" and self._unit in _SINGLE):
                    self._held.append(raw)
                    return False
                raw += self._unit
            escape = _ESCAPE.match(raw)
            text = json.loads(f'"{escape[0]}"') + raw[escape.end() :] if escape else raw
            if not begun:
                text = text.lstrip(" \t\r\n")
                if text and text[0] != "{":  # no JSON of an object
                    self._held.append(raw)
                    yield
                    return False
                begun = bool(text)
            if begun:
                self._argue(text, raw)
            else:
                self._held.append(raw)
            yield
        if not self._unit:
            return False
        if begun:
            self._argue("", '"')
        else:
            self._held.append('"')
        yield
        return True
