"""Owns the file of requests: what a line of it must be, and `BatchIndex`, which knows all lines and holds none."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE = 64 << 20  # bytes

_TO_DO, _DONE, _BLANK = range(3)


class BatchRequest(NamedTuple):
    """A line that asks for something."""

    line: int  # from 1
    custom_id: str
    url: str
    body: dict[str, Any]
    digest: str


class BadLine(NamedTuple):
    """A line that can't be asked, and why; `custom_id` is its own where it has one."""

    line: int
    custom_id: str | None
    code: str
    message: str
    digest: str


def parse_line(line: int, raw: bytes) -> BatchRequest | BadLine:
    """What a line of a batch file says."""
    digest = _digest(raw)

    def bad(code: str, message: str, custom_id: str | None = None) -> BadLine:
        return BadLine(line, custom_id, code, f"line {line}: {message}", digest)

    if len(raw) > MAX_LINE:
        return bad("line_too_long", f"it has more than {MAX_LINE} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return bad("invalid_json", f"it is no JSON: {error}")
    if not isinstance(found, dict):
        return bad("invalid_line", f"it must be a JSON object, got a {type(found).__name__}")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return bad("invalid_custom_id", f"custom_id must be a text, got {json.dumps(custom_id)[:80]}")
    if found.get("method") != "POST":
        return bad("invalid_method", f"method must be POST, got {json.dumps(found.get('method'))[:80]}", custom_id)
    if found.get("url") not in URLS:
        given = json.dumps(found.get("url"))[:80]
        return bad("invalid_url", f"url must be {' or '.join(URLS)}, got {given}", custom_id)
    body = found.get("body")
    if not isinstance(body, dict):
        return bad("invalid_body", f"body must be a JSON object, got {json.dumps(body)[:80]}", custom_id)
    if body.get("stream"):
        return bad("invalid_body", "an answer in a file is no stream: leave body.stream out", custom_id)
    return BatchRequest(line, custom_id, found["url"], body, digest)


def raw_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file without the white space around them, empty ones too; no more than `MAX_LINE` + 1 bytes of
    each."""
    with open(path, "rb") as file:
        first = True
        while raw := file.readline(MAX_LINE + 1):
            while not raw.endswith(b"\n") and (rest := file.readline(MAX_LINE + 1)):
                raw = raw[: MAX_LINE + 1] + rest[-1:]
            yield (raw.removeprefix(b"\xef\xbb\xbf") if first else raw).strip()
            first = False


class BatchIndex:
    """All lines of a batch file, in 17 bytes each: which of them are done, and what they were when it was made.

    Raises ValueError for a file that has no request at all.
    """

    def __init__(self, path: str | Path, tell: Callable[[int], None] = lambda line: None):
        self.path = Path(path)
        digests, keys = array("Q"), array("Q")  # of a line; of a custom_id, 0 where there is none
        self._states = bytearray()
        num_requests, problem = 0, None
        for line, raw in enumerate(raw_lines(path), 1):
            if line % 10_000 == 0:
                tell(line)
            if not raw:
                digests.append(0)
                keys.append(0)
                self._states.append(_BLANK)
                continue
            found = parse_line(line, raw)
            digests.append(int(found.digest, 16))
            keys.append(0 if found.custom_id is None else int(_digest(found.custom_id.encode("utf-8", "replace")), 16))
            self._states.append(_TO_DO)
            if isinstance(found, BatchRequest):
                num_requests += 1
            else:
                problem = problem or found.message
        if not num_requests:
            raise ValueError(f"{path} is no batch file: {problem or 'it is empty'}")
        self._digests = digests
        self._first_lines = _duplicates(np.frombuffer(keys, np.uint64))
        self.num_lines = len(self._states) - self._states.count(_BLANK)

    @property
    def num_done(self) -> int:
        return self._states.count(_DONE)

    def mark_done(self, line: int, digest: str) -> bool:
        """Marks a line that there is an answer to; False if no line like this is left to do."""
        if not 1 <= line <= len(self._states) or self._states[line - 1] != _TO_DO:
            return False
        if self._digests[line - 1] != int(digest, 16):
            return False
        self._states[line - 1] = _DONE
        return True

    def left(self) -> Iterator[BatchRequest | BadLine]:
        """The lines that are not done, read again. Raises ValueError if the file has changed."""
        states, line = self._states, 0
        for line, raw in enumerate(raw_lines(self.path), 1):
            if line <= len(states) and states[line - 1] != _TO_DO:
                continue
            found = parse_line(line, raw)
            if line > len(states) or self._digests[line - 1] != int(found.digest, 16):
                raise ValueError(f"{self.path} has changed while it was read: line {line} is another")
            first = self._first_lines.get(line)
            if first is not None:
                message = f"line {line}: custom_id {json.dumps(found.custom_id)[:80]} is that of line {first}, too"
                found = BadLine(line, None, "duplicate_custom_id", message, found.digest)
            yield found
        if line < len(states):
            raise ValueError(f"{self.path} has changed while it was read: it has {line} lines, and had {len(states)}")


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _duplicates(keys: np.ndarray) -> dict[int, int]:
    """Each line whose key an earlier one has, to the first of those."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    repeated = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)) + 1
    firsts = np.searchsorted(ordered, ordered[repeated], side="left")
    return {int(order[place]) + 1: int(order[first]) + 1 for place, first in zip(repeated, firsts)}
