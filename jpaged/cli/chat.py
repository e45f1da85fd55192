"""Owns `jpaged chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from jpaged.cli.generate import figures
from jpaged.cli.options import (
    OpenedEngine,
    engine_for_one,
    engine_options,
    open_engine,
    sampling_from,
    sampling_options,
    spinner,
)

HELP = "/reset: start over, /quit or Ctrl-D: leave, Ctrl-C: stop an answer"


@click.command()
@click.option("--system", help="The system message.")
@click.option("--stats/--no-stats", default=True, help="Show tokens per second after each answer.")
@sampling_options(temperature=0.7, top_p=0.9, max_tokens=1024)
@engine_options
def chat(system: str | None, stats: bool, **options: Any) -> None:
    """Talk with the model in the terminal."""
    asked = sampling_from(options)
    sampling = asked.sampling
    if sampling.n != 1 or sampling.best_of is not None or sampling.num_beams != 1:
        raise click.UsageError("a chat shows one answer as it comes; leave -n, --best-of and --num-beams out")
    if sampling.returns_logprobs:
        raise click.UsageError("a chat shows no log-probabilities; leave --logprobs out")
    opened = open_engine(options, **engine_for_one())
    if not getattr(opened.tokenizer, "chat_template", None):
        raise click.UsageError("this model has no chat template; use `jpaged generate --raw`")
    Conversation(opened, asked.of_model(opened.params), system, stats).run()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, opened: OpenedEngine, sampling: Any, system: str | None, stats: bool):
        self.engine, self.sampling, self.stats = opened.engine, sampling, stats
        self.opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self.opening)

    def run(self) -> None:
        with contextlib.suppress(ImportError):  # gives input() line editing and history
            import readline  # noqa: F401
        if sys.stdin.isatty():
            note(HELP)
        while (line := read_line()) is not None:
            if line in ("/quit", "/exit"):
                return
            if line == "/reset":
                self.messages = list(self.opening)
                note("the conversation starts over")
            elif line == "/help":
                note(HELP)
            elif line.startswith("/"):
                note(f"no such command: {line}\n{HELP}")
            elif line:
                self.say(line)

    def say(self, line: str) -> None:
        """Adds a message and the model's answer to it; a message that does not fit is not kept."""
        self.messages.append({"role": "user", "content": line})
        started = time.perf_counter()
        try:
            request_id = self.engine.add_request(list(self.messages), self.sampling)
        except ValueError as error:
            self.messages.pop()
            note(f"{error} (/reset starts over)")
            return
        first, output, shown = None, None, 0
        with interrupt_flag() as interrupted:
            while self.engine.has_unfinished_requests() and not interrupted:
                with spinner("Waiting for the first token", shown=first is None):
                    outputs = self.engine.step()
                for output in outputs:
                    first = first or time.perf_counter()
                    text = output.outputs[0].text
                    sys.stdout.write(text[shown:])
                    sys.stdout.flush()
                    shown = len(text)
        ended = time.perf_counter()
        sys.stdout.write("\n")
        if interrupted:
            self.engine.abort(request_id)
        if output is None:
            self.messages.pop()
            return
        answer = output.outputs[0]
        self.messages.append({"role": "assistant", "content": answer.text})
        if interrupted:
            note("stopped")
        elif answer.finish_reason == "length":
            note(self.why_cut(len(answer.token_ids)))
        if self.stats:
            note(figures(output, len(answer.token_ids), started, first, ended))

    def why_cut(self, num_tokens: int) -> str:
        if num_tokens == self.sampling.max_tokens:
            return f"cut at --max-tokens {num_tokens}"
        return "cut: the conversation fills the model's context; /reset starts over"


def read_line() -> str | None:
    """A line from the user; empty after Ctrl-C, None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        note(f"\n{HELP}")
        return ""
    except EOFError:
        if sys.stdin.isatty():
            note("")  # the shell's prompt goes on a line of its own
        return None


def note(text: str) -> None:
    """Something the program says, told apart from the model's words."""
    click.secho(text, dim=True, err=True)


@contextlib.contextmanager
def interrupt_flag() -> Iterator[list[bool]]:
    """A list that Ctrl-C puts an entry into, so that a step is never cut in the middle; twice raises as ever."""
    pressed: list[bool] = []

    def press(signum: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
