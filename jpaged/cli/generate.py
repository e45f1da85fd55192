"""Owns `jpaged generate`: one prompt, its answer streamed to standard output, what it took on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from jpaged.cli.options import (
    OpenedEngine,
    engine_for_one,
    engine_options,
    open_engine,
    sampling_from,
    sampling_options,
    spinner,
)

INTERRUPTED = 130


@click.command(context_settings={"show_default": True}, short_help="Stream the answer to a prompt.")
@click.argument("prompt", required=False)
@click.option("--chat/--raw", default=None, help="Use the chat template [default: if the model has one].")
@click.option("--system", help="The system message of the chat.")
@sampling_options(temperature=0.0, max_tokens=256)
@engine_options
def generate(prompt: str | None, chat: bool | None, system: str | None, **options: Any) -> None:
    """Stream the model's answer to PROMPT. Without PROMPT, or with "-", the prompt is read from standard input.

    The answer goes to standard output, what it took to standard error.
    """
    asked = sampling_from(options)
    prompt = read_prompt(prompt)
    if chat is False and system is not None:
        raise click.UsageError("--system is part of a chat; it does not go with --raw")
    sampling = asked.sampling
    opened = open_engine(options, **engine_for_one(sampling.best_of or sampling.n, sampling.num_beams))
    has_template = bool(getattr(opened.tokenizer, "chat_template", None))
    if (chat or system is not None) and not has_template:
        raise click.UsageError("this model has no chat template; leave --chat and --system out")
    request: Any = prompt
    if chat or (chat is None and has_template):
        request = [{"role": "system", "content": system}] if system is not None else []
        request.append({"role": "user", "content": prompt})
    if not stream_answer(opened, request, asked.of_model(opened.params)):
        sys.exit(INTERRUPTED)


def read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("a prompt is needed, as the argument or on standard input")
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise click.UsageError("the prompt is empty")
    return prompt


def stream_answer(opened: OpenedEngine, request: Any, sampling: Any) -> bool:
    """Prints the answer as it comes, then the figures; False when it was interrupted."""
    engine = opened.engine
    shown, output, first, complete = 0, None, None, True
    started = time.perf_counter()
    request_id = engine.add_request(request, sampling)
    try:
        while engine.has_unfinished_requests():
            with spinner("Waiting for the first token", shown=first is None):
                outputs = engine.step()
            for output in outputs:
                first = first or time.perf_counter()
                if sampling.n == 1:
                    text = output.outputs[0].text
                    sys.stdout.write(text[shown:])
                    sys.stdout.flush()
                    shown = len(text)
    except KeyboardInterrupt:
        engine.abort(request_id)
        complete = False
    ended = time.perf_counter()
    if output is None:
        return complete
    if sampling.n == 1:
        sys.stdout.write("\n")
    else:
        for sample in sorted(output.outputs, key=lambda sample: sample.index):
            sys.stdout.write(f"[{sample.index + 1}/{sampling.n}] {sample.text}\n")
    sys.stdout.flush()
    if sampling.returns_logprobs:
        for sample in output.outputs:
            click.echo(f"log-probability {sample.cumulative_logprob:.4f}", err=True)
    num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    click.echo(
        f"{'' if complete else 'interrupted; '}loaded in {opened.load_seconds:.1f} s, "
        f"engine ready in {opened.warm_up_seconds:.1f} s; {figures(output, num_tokens, started, first, ended)}",
        err=True,
    )
    return complete


def figures(output: Any, num_tokens: int, started: float, first: float | None, ended: float) -> str:
    """Prompt and output tokens, time to the first, and the rate of those after it."""
    first = first if first is not None else ended
    after_first = num_tokens - len(output.outputs)
    came_one_by_one = after_first > 0 and ended - first > 0.5 * (ended - started) / num_tokens
    rate = after_first / (ended - first) if came_one_by_one else num_tokens / (ended - started)
    return (
        f"{len(output.prompt_token_ids)} prompt tokens, {num_tokens} output tokens, "
        f"first after {(first - started) * 1000:.0f} ms, {rate:.1f} tokens/s"
    )
