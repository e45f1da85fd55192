"""Owns output files that are written whole or not at all, and known to be writable before the work begins."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType


class WholeFile:
    """A context to write a file in; what was there stays until all is written. Entering raises OSError if the file
    could not be written. A pipe or a device is written as it is; with None nothing is."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path).resolve()
        self._content: str | None = None
        self._part: Path | None = None

    def __enter__(self) -> WholeFile:
        if self.path is not None and (self.path.is_file() or not self.path.exists()):
            self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
            self._part.open("w", encoding="utf-8").close()
        return self

    def write(self, content: str) -> None:
        """Sets the file's whole content, for when the context is left without an error."""
        self._content = content

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._part is None:
            if self.path is not None and kind is None and self._content is not None:
                self.path.write_text(self._content, encoding="utf-8")
            return
        try:
            if kind is None and self._content is not None:
                with self._part.open("w", encoding="utf-8") as file:
                    file.write(self._content)
                    file.flush()
                    os.fsync(file.fileno())
                self._part.replace(self.path or self._part)
        finally:
            self._part.unlink(missing_ok=True)
