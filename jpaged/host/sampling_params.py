"""Owns `SamplingParams`: what a user asks of the generated text, checked once, where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

MAX_N = 1024
MAX_BEAMS = 64
MAX_PENALTY = 16  # a length to this power is still a float
MAX_BANNED_IDS = 32  # columns of the table of ids that `min_tokens` keeps from being drawn


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens and when to stop.

    num_beams: above 1, a beam search of this width instead of draws. It returns the `n` sequences found with the
        greatest score: log-probability over number of generated tokens to the power of `length_penalty`. It ends when
        no beam's score promises a better one; with `early_stopping` as soon as it has found `num_beams` sequences; with
        "never" only when none could get better at its full length either. It needs temperature 0 and no filters.
    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k: keep the k most likely tokens (0 or -1: all). top_p: keep the smallest set of most likely tokens whose
        probability reaches p. min_p: keep tokens at least min_p times as likely as the most likely one. They apply in
        this order, after the temperature, each to the distribution that the one before it left.
    max_tokens: at most this many new tokens; None: until the model's length is used up.
    min_tokens: no end-of-sequence or stop token is drawn, and no stop string ends the text, before this many tokens.
    stop: strings that end the text where they first appear (not shown unless `include_stop_str_in_output`).
    stop_token_ids: ids that end the text, beside the model's end-of-sequence ids (which `ignore_eos` switches off).
    n: how many samples of the same prompt. best_of: how many are drawn, of which those `n` with the greatest
        log-probability are returned, greatest first, when all have ended; None: `n`. seed: makes draws repeatable, each
        of the samples with draws of its own; None: fresh entropy.
    logprobs: True returns the log-probability of each generated token under the unmodified logits (before temperature
        and filters).
    skip_special_tokens: leave special tokens, such as the end of sequence, out of the text.
    cache_salt: text; KV is shared only between requests of the same salt. Where users must not learn from how soon an
        answer comes what others have asked, each has a salt.

    Raises ValueError naming the parameter, its value and its range.
    """

    n: int = 1
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None

    def __post_init__(self):
        def fail(name: str, rule: str):
            raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        def whole(name: str, low: int, high: float, rule: str):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
                fail(name, rule)
            object.__setattr__(self, name, int(value))  # NumPy has numbers of its own

        def real(name: str, low: float, high: float, rule: str):
            value = getattr(self, name)
            # Not math.isfinite: it fails for a whole number beyond all floats.
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float, np.integer, np.floating))
                or not low <= value <= high
                or value == math.inf
            ):
                fail(name, rule)
            object.__setattr__(self, name, int(value) if isinstance(value, (int, np.integer)) else float(value))

        whole("n", 1, MAX_N, f"a whole number from 1 to {MAX_N}")
        if self.best_of is not None:
            whole("best_of", self.n, MAX_N, f"a whole number from n ({self.n}) to {MAX_N}, or None")
        real("temperature", 0.0, math.inf, "a finite number of at least 0 (0 is greedy)")
        whole("top_k", -1, math.inf, "a whole number of at least 1, or 0 or -1 for no limit")
        real("top_p", 0.0, 1.0, "above 0 and at most 1 (1 is no limit)")
        if self.top_p == 0:
            fail("top_p", "above 0 and at most 1 (1 is no limit)")
        real("min_p", 0.0, 1.0, "from 0 (no limit) to 1")
        if self.max_tokens is not None:
            whole("max_tokens", 1, math.inf, "a whole number of at least 1, or None for as many as fit")
        whole("min_tokens", 0, math.inf, "a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            whole("seed", -(2**63), 2**64 - 1, "None or a whole number that fits in 64 bits")
        for name in ("include_stop_str_in_output", "ignore_eos", "logprobs", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                fail(name, "True or False")

        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            fail("cache_salt", "text or None")
        if not (self.cache_salt or "").isprintable():
            fail("cache_salt", "printable text")
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, (tuple, list)) or any(not isinstance(s, str) or not s for s in stop):
            fail("stop", "a non-empty string or a list of them")
        object.__setattr__(self, "stop", tuple(stop))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, (tuple, list)) or any(
            isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids
        ):
            fail("stop_token_ids", "a list of token ids of at least 0")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        whole("num_beams", 1, MAX_BEAMS, f"a whole number from 1 (no beam search) to {MAX_BEAMS}")
        real("length_penalty", -MAX_PENALTY, MAX_PENALTY, f"a number from -{MAX_PENALTY} to {MAX_PENALTY}")
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in (True, False, "never"):
            fail("early_stopping", "True, False or 'never'")
        if self.num_beams > 1:
            self._check_beams()
        elif (self.length_penalty, self.early_stopping) != (1.0, False):
            raise ValueError(
                f"length_penalty ({self.length_penalty}) and early_stopping ({self.early_stopping!r}) are of a beam "
                "search: set num_beams above 1"
            )
        # Very small temperatures overflow logits / temperature; the draw is the greedy one long before that.
        if self.temperature < 1e-4:
            object.__setattr__(self, "temperature", 0.0)

    def _check_beams(self) -> None:
        """Raise ValueError for what contradicts a beam search."""
        if self.n > self.num_beams:
            raise ValueError(f"n ({self.n}) must not exceed num_beams ({self.num_beams}): a beam ends as one sequence")
        off = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "best_of": None, "stop": ()}
        for name, value in off.items():
            if getattr(self, name) != value and not (name == "top_k" and self.top_k == -1):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} contradicts num_beams={self.num_beams}: a beam search draws "
                    f"nothing and ends at token ids, so set {name}={value!r}"
                )
