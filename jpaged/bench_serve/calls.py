"""Owns what is sent to a server: calls out of files or drawn by lot, and when each of them is due."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jpaged.bench import read_workloads

Arrivals = Literal["poisson", "fixed"]
# Each is one token in most vocabularies, so that a prompt of n words has about n tokens.
WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years much where your way down should because long
each just state people those too mr how little good world make very year still see own work men day get here old
between both life being under three never know same last another while us off might great go come since against right
came take used himself few house american use place during high without again home around small however found part
school once general water
""".split()


class Call(NamedTuple):
    """One request to be sent: its prompt (text, token ids or chat messages) and how many tokens it asks for."""

    prompt: Any
    max_tokens: int


def workload_calls(path: str | Path, name: str) -> tuple[list[Call], bool]:
    """The calls of a workload file of `jpaged bench`, and whether it says `ignore_eos`."""
    works = read_workloads(path, [name])[name]
    calls = [Call(work.prompt, work.sampling.max_tokens or 1) for work in works]
    return calls, works[0].sampling.ignore_eos


def prompt_calls(path: str | Path, max_tokens: int) -> list[Call]:
    """The calls of a file that has on each line, in JSON, a string or a list of chat messages."""
    calls = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        messages = isinstance(prompt, list) and prompt and all(isinstance(one, dict) for one in prompt)
        if not (messages or isinstance(prompt, str) and prompt):
            raise ValueError(f"{path}, line {number} is neither a JSON string nor a list of chat messages")
        calls.append(Call(prompt, max_tokens))
    if not calls:
        raise ValueError(f"{path} has no prompts: put one on a line, as a JSON string or a list of chat messages")
    return calls


def drawn_calls(
    num_requests: int, input_len: int, output_len: int, spread: float, seed: int, vocab_size: int | None
) -> list[Call]:
    """Calls of drawn lengths and contents: token ids below `vocab_size`, without one a text of as many words.

    Lengths are uniform from (1 - spread) to (1 + spread) times what is asked for, and at least 1.
    """
    random = np.random.default_rng([seed, 0])

    def lengths(middle: int) -> list[int]:
        least, most = max(1, round(middle * (1 - spread))), max(1, round(middle * (1 + spread)))
        return random.integers(least, most, size=num_requests, endpoint=True).tolist()

    prompts: list[Any] = []
    for length in lengths(input_len):
        drawn = random.integers(0, vocab_size or len(WORDS), size=length).tolist()
        prompts.append(drawn if vocab_size else " ".join(WORDS[index] for index in drawn))
    return [Call(prompt, length) for prompt, length in zip(prompts, lengths(output_len))]


def shuffled(call: Call, seed: int) -> Call:
    """A call as long as this one whose prompt begins differently: to warm up a server, and leave nothing of the
    measured prompts in its prefix cache."""
    random = np.random.default_rng([seed, 1])

    def shuffle(prompt: Any) -> Any:
        if isinstance(prompt, str):
            words = prompt.split(" ")
            return " ".join(words[index] for index in random.permutation(len(words)))
        if isinstance(prompt[0], dict):
            return [one | {"content": shuffle(one["content"])} if _has_text(one) else one for one in prompt]
        return [prompt[index] for index in random.permutation(len(prompt))]

    return call._replace(prompt=shuffle(call.prompt))


def _has_text(message: dict[str, Any]) -> bool:
    return isinstance(message.get("content"), str)


def as_bodies(
    calls: Sequence[Call], endpoint: Literal["completions", "chat"], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """The JSON bodies of calls. Raises ValueError for a prompt that the endpoint has no field for."""
    return [{**_prompt_field(call.prompt, endpoint), "max_tokens": call.max_tokens, **common} for call in calls]


def _prompt_field(prompt: Any, endpoint: str) -> dict[str, Any]:
    is_text = isinstance(prompt, str)
    is_chat = not is_text and isinstance(prompt[0], dict)
    if endpoint == "completions":
        if is_chat:
            raise ValueError("prompts that are chat messages go to --endpoint chat")
        return {"prompt": prompt}
    if not is_text and not is_chat:
        raise ValueError("prompts that are token ids go to --endpoint completions")
    return {"messages": [{"role": "user", "content": prompt}] if is_text else prompt}


def arrival_times(num_requests: int, rate: float, arrivals: Arrivals, seed: int) -> list[float]:
    """When each request is due, in seconds from the first: at `rate` requests a second, in even steps or as a Poisson
    process; all at once for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * num_requests
    if arrivals == "fixed":
        return [index / rate for index in range(num_requests)]
    gaps = np.random.default_rng([seed, 2]).exponential(1 / rate, size=max(num_requests - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:num_requests]
