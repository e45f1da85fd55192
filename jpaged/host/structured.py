"""Owns `Structured`: what a generated text is to look like, as a caller says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_CHOICES = 4096


@dataclass(frozen=True, kw_only=True)
class Structured:
    """The shape of a text; exactly one of these is given.

    json: a JSON schema, as a mapping or as text. Keys come in the schema's order; others may follow unless it says
        `"additionalProperties": False`; white space is free unless it says
        `"x-guidance": {"whitespace_flexible": False}`. json_object: True for any JSON object.
    regex: a regular expression that the whole text matches, in the syntax of Rust's `regex` without its assertions
        (`^`, `$` and `\\b` are not needed, or not known).
    grammar: a grammar in the format of Lark, as `llguidance` reads it, whose start rule is `start`.
    choice: texts, of which it is one.

    The text ends where nothing may follow, or where the model ends it at a place where it is complete: bound
    repetitions, as it may not want to. `max_tokens` (16 unless said otherwise) cuts it off, with
    `finish_reason="length"`, and so does a stop string. Raises ValueError for what is none of these; a schema, pattern
    or grammar itself is read, and refused if no text can meet it, when a request is added.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | list[str] | None = None

    def __post_init__(self):
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise ValueError(
                f"Structured needs exactly one of {names} (False is none), got {', '.join(given) or 'none'}"
            )
        if not isinstance(self.json_object, bool):
            raise ValueError(f"json_object must be True or False, got {self.json_object!r}")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text, got {type(getattr(self, name)).__name__}")
        if self.choice is not None:
            texts = self.choice
            if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
                raise ValueError(f"choice must be a list of non-empty texts, got {texts!r}")
            if not 1 <= len(texts) <= MAX_CHOICES:
                raise ValueError(f"choice must have from 1 to {MAX_CHOICES} texts, got {len(texts)}")
            object.__setattr__(self, "choice", tuple(texts))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))


def _schema_text(schema: Any) -> str:
    """A schema as text, so that equal ones are compiled once."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json must be a JSON schema, but the text is not JSON: {error}") from error
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"json must be a JSON schema (an object), got {type(schema).__name__}")
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json must be a JSON schema, and this is not JSON: {error}") from error
