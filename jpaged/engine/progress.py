"""Owns the progress bar of a long `generate`."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich import progress
from rich.console import Console

PATIENCE = 1.0  # seconds of work before a bar is worth showing
EVERY = 0.1  # seconds between two drawings


class Progress:
    """Finished requests of all, tokens a second, time left; on standard error. Short work shows nothing, unless
    `at_once`."""

    def __init__(self, total: int, *, at_once: bool):
        console = Console(file=sys.stderr)
        self._bar = progress.Progress(
            progress.TextColumn("generating"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]:.0f} tokens/s"),
            progress.TimeRemainingColumn(),
            console=console,
            transient=console.is_terminal,  # elsewhere the last state is all that is ever written
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=total, rate=0.0)
        self._began = self._drawn = time.perf_counter()
        self._tokens = self._num_finished = 0
        self._shown = at_once

    def __enter__(self) -> Progress:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._shown:
            self._draw(time.perf_counter())
            self._bar.stop()

    def update(self, num_finished: int, new_tokens: int) -> None:
        self._tokens += new_tokens
        self._num_finished = num_finished
        now = time.perf_counter()
        if not self._shown and now - self._began > PATIENCE:
            self._shown = True
            self._bar.start()
        if self._shown and now - self._drawn > EVERY:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn = now
        self._bar.update(self._task, completed=self._num_finished, rate=self._tokens / (now - self._began))
        self._bar.refresh()
