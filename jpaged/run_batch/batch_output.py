"""Owns the file of answers: a line for each request, appended whole, and how a run that was killed finds its place."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jpaged.run_batch.batch_input import BadLine, BatchIndex, BatchRequest

_BEGINNING = b'{"id":"batch_req_'
_ID = re.compile(r"batch_req_(\d{1,18})_([0-9a-f]{16})")


class Reply(NamedTuple):
    """What an app has answered."""

    status: int
    request_id: str | None
    body: bytes


@dataclass
class Tally:
    """What the lines of an output say."""

    num_answered: int = 0
    num_bad: int = 0  # lines of the input that were no requests
    statuses: Counter[int] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def count(self, line: dict[str, Any]) -> None:
        response = line.get("response")
        if not isinstance(response, dict):
            self.num_bad += 1
            return
        self.num_answered += 1
        self.statuses[response.get("status_code", 0)] += 1
        body = response.get("body")
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.num_prompt_tokens += usage.get("prompt_tokens") or 0
            self.num_output_tokens += usage.get("completion_tokens") or 0

    @property
    def num_failed(self) -> int:
        """Answers that are errors."""
        return sum(count for status, count in self.statuses.items() if not 200 <= status < 300)


def answer_line(request: BatchRequest, reply: Reply) -> dict[str, Any]:
    """The line of an answer."""
    try:
        body: Any = json.loads(reply.body)
    except ValueError:
        body = reply.body.decode("utf-8", "replace")
    response = {"status_code": reply.status, "request_id": reply.request_id or line_id(request), "body": body}
    return {"id": line_id(request), "custom_id": request.custom_id, "response": response, "error": None}


def error_line(bad: BadLine) -> dict[str, Any]:
    """The line for a request that can't be asked. One without a custom_id of its own has none here."""
    error = {"code": bad.code, "message": bad.message, "line": bad.line}
    return {"id": line_id(bad), "custom_id": bad.custom_id, "response": None, "error": error}


def line_id(line: BatchRequest | BadLine) -> str:
    """By which a later run knows the line that was answered, and that it still says the same."""
    return f"batch_req_{line.line}_{line.digest}"


class BatchOutput:
    """The open file of answers. Nobody else may write it meanwhile; raises ValueError if somebody does, or if it is
    not a regular file."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._is_synced = True
        self._lost: OSError | None = None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError(f"{path} is not a regular file, so a run that was stopped could not go on")
            self._lock()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another run is writing {self.path}") from error

    def resume(self, index: BatchIndex) -> Tally:
        """Marks what is answered, and cuts the last line off if it is torn. Raises ValueError, and changes nothing, if
        this is no output of that input."""
        tally = Tally()
        whole = 0  # bytes
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    if not (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw) or raw.startswith(b"\0")):
                        raise ValueError(f"{self.path}, line {number} is no answer to a batch: give another file")
                    break
                self._take(number, raw, index, tally)
                whole += len(raw)
        if whole < os.fstat(self._file).st_size:
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        return tally

    def _take(self, number: int, raw: bytes, index: BatchIndex, tally: Tally) -> None:
        try:
            line = json.loads(raw)
            found = _ID.fullmatch(line["id"])
        except (ValueError, TypeError, KeyError, RecursionError):
            found = None
        if found is None:
            raise ValueError(f"{self.path}, line {number} is no answer to a batch: give another file")
        if not index.mark_done(int(found[1]), found[2]):
            raise ValueError(
                f"{self.path} holds answers to other requests than {index.path}: its line {number} is of "
                f"custom_id {json.dumps(line.get('custom_id'))[:80]}; give another file"
            )
        tally.count(line)

    def append(self, line: dict[str, Any]) -> None:
        """Writes a line, at once and whole, or raises OSError and leaves the file as it was."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            rest = data
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, before)
            raise
        self._is_synced = False

    def sync(self) -> None:
        """Has what was written outlive the machine, too."""
        if self._lost is not None:  # the system tells it once, to the thread that asked
            raise self._lost
        if not self._is_synced:
            self._is_synced = True
            try:
                os.fsync(self._file)
            except OSError as error:
                self._lost = error
                raise

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._file)
