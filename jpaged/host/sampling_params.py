"""Owns `SamplingParams`: what a user asks of the generated text, checked once, where it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from .structured import Structured

MAX_N = 1024
MAX_BEAMS = 64
MAX_PENALTY = 16  # a length to this power is still a float
MAX_PROMPT_TOPS = 32  # of the likeliest tokens in each place of a prompt
MAX_BIASED_IDS = 1024
MAX_BIAS = 100
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
    repetition_penalty: logits of ids that the prompt or the output has are divided by it if positive and multiplied by
        it otherwise (Keskar et al. 2019; 1: none). frequency_penalty is subtracted from an id's logit for each time
        that the output has it, presence_penalty once if it has it at all.
    logit_bias: ids to numbers that are added to their logits, after the penalties; -100 is as good as never. The ids of
        a text are `params.tokenizer.encode(text)`.
    allowed_token_ids: the only ids that are drawn. structured: a `Structured`, the shape of the text. bad_words: each
        is encoded, with and without a space before it, and the last token of such a sequence is not drawn after the
        others (case matters, and a longer token that contains the word is drawn). Where all these leave nothing to
        draw, min_tokens gives way first, then bad_words.
    logits_processor: a function (token_ids, logits) -> logits that is called on the host for every token, with prompt
        and output so far and the model's logits, float32 [vocab]; what it returns takes their place. For research: the
        logits of all rows travel to the host and back in every step, and no step is started ahead of it.
    max_tokens: at most this many new tokens; None: until the model's length is used up.
    min_tokens: no end-of-sequence or stop token is drawn, and no stop string ends the text, before this many tokens.
    stop: strings that end the text where they first appear (not shown unless `include_stop_str_in_output`).
    stop_token_ids: ids that end the text, beside the model's end-of-sequence ids (which `ignore_eos` switches off).
    n: how many samples of the same prompt. best_of: how many are drawn, of which those `n` with the greatest
        log-probability are returned, greatest first, when all have ended; None: `n`. seed: makes draws repeatable, each
        of the samples with draws of its own; None: fresh entropy.
    logprobs: None or False: none; True or 0: the log-probability of each generated token, `CompletionOutput.logprobs`;
        k: the k likeliest tokens in its place, too, `top_logprobs` (-1: all of the vocabulary). logprobs_mode: "raw":
        under the model's own logits; "processed": under what the token is drawn from, that is after penalties, bias,
        masks, temperature and filters (at temperature 0: without these two), of what can be drawn. `cumulative_logprob`
        and `best_of` go by it, too.
    prompt_logprobs: 0: the log-probability of each token of the prompt but the first, under the model's own logits; k:
        the k likeliest tokens in its place, too. The engine must be built with `prompt_logprobs=True`. Nothing of such
        a prompt is taken from the prefix cache.
    skip_special_tokens: leave special tokens, such as the end of sequence, out of the text.
    spaces_between_special_tokens: how special tokens stand in the text, where they are shown. None: as the tokenizer
        writes them, most without spaces. True: where one of two neighbours is special, the second begins with a space
        (one is put there if it has none). False: no space there that the tokenizer puts between tokens; what tokens
        say themselves stays.
    detokenize: False: token ids only, no text.
    truncate_prompt_tokens: only so many of the prompt's last tokens are used.
    cache_salt: text; KV is shared only between requests of the same salt. Where users must not learn from how soon an
        answer comes what others have asked, each has a salt.

    Raises ValueError naming the parameter, its value and its range.
    """

    n: int = 1
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: str | tuple[str, ...] | list[str] | None = None
    structured: Structured | None = None
    logits_processor: Callable[[list[int], np.ndarray], np.ndarray] | None = None
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
    logprobs: bool | int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
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
        real("repetition_penalty", 0.0, math.inf, "a finite number above 0 (1 is none)")
        if self.repetition_penalty == 0:
            fail("repetition_penalty", "a finite number above 0 (1 is none)")
        for name in ("frequency_penalty", "presence_penalty"):
            real(name, -2.0, 2.0, "from -2 to 2 (0 is none)")
        self._check_logit_bias()
        if isinstance(self.logprobs, bool):
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        if self.logprobs is not None:
            whole("logprobs", -1, math.inf, "True, False, None, a whole number of at least 0, or -1 for the vocabulary")
        if self.prompt_logprobs is not None:
            whole("prompt_logprobs", 0, MAX_PROMPT_TOPS, f"a whole number from 0 to {MAX_PROMPT_TOPS}, or None")
        if self.logprobs_mode not in ("raw", "processed"):
            fail("logprobs_mode", "'raw' or 'processed'")
        if self.truncate_prompt_tokens is not None:
            whole("truncate_prompt_tokens", 1, math.inf, "a whole number of at least 1, or None")
        if self.max_tokens is not None:
            whole("max_tokens", 1, math.inf, "a whole number of at least 1, or None for as many as fit")
        whole("min_tokens", 0, math.inf, "a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            whole("seed", -(2**63), 2**64 - 1, "None or a whole number that fits in 64 bits")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                fail(name, "True or False")
        if not isinstance(self.spaces_between_special_tokens, bool | None):
            fail("spaces_between_special_tokens", "True, False or None for the tokenizer's own way")

        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            fail("cache_salt", "text or None")
        if not (self.cache_salt or "").isprintable():
            fail("cache_salt", "printable text")
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            words = (value,) if isinstance(value, str) else () if value is None else value
            if not isinstance(words, (tuple, list)) or any(not isinstance(word, str) or not word for word in words):
                fail(name, "a non-empty string or a list of them")
            object.__setattr__(self, name, tuple(words))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} is looked for in the text: it needs detokenize=True")
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            ids = () if value is None else value
            if isinstance(ids, (range, set, frozenset)):
                ids = sorted(ids)
            if not isinstance(ids, (tuple, list)) or not all(_is_token_id(i) for i in ids):
                fail(name, "a list of token ids of at least 0")
            if name == "allowed_token_ids" and not ids:
                fail(name, "a list of at least one token id, or None for all")
            object.__setattr__(self, name, tuple(int(i) for i in ids))
        if self.structured is not None and not isinstance(self.structured, Structured):
            fail("structured", "a Structured or None")
        if self.logits_processor is not None and not callable(self.logits_processor):
            fail("logits_processor", "a function or None")
        if self.structured is not None and self.allowed_token_ids is not None:
            raise ValueError("structured says what may be drawn, and so does allowed_token_ids: give one of them")
        if self.structured is not None and self.ignore_eos:
            raise ValueError("structured ends with the model's end-of-sequence token: it contradicts ignore_eos=True")
        whole("num_beams", 1, MAX_BEAMS, f"a whole number from 1 (no beam search) to {MAX_BEAMS}")
        real("length_penalty", -MAX_PENALTY, MAX_PENALTY, f"a number from -{MAX_PENALTY} to {MAX_PENALTY}")
        if not isinstance(self.early_stopping, bool | str) or self.early_stopping not in (True, False, "never"):
            fail("early_stopping", "True, False or 'never'")
        if self.num_beams > 1:
            self._check_beams()
        for name, off in {"length_penalty": 1.0, "early_stopping": False}.items():
            if self.num_beams == 1 and getattr(self, name) != off:
                raise ValueError(f"{name}={getattr(self, name)!r} is of a beam search: set num_beams above 1")
        # Very small temperatures overflow logits / temperature; the draw is the greedy one long before that.
        if self.temperature < 1e-4:
            object.__setattr__(self, "temperature", 0.0)

    def __hash__(self) -> int:
        bias = frozenset((self.logit_bias or {}).items())  # the one field that has no hash of its own
        return hash((bias, *(getattr(self, field.name) for field in fields(self) if field.name != "logit_bias")))

    def _check_beams(self) -> None:
        """Raise ValueError for what contradicts a beam search."""
        if self.n > self.num_beams:
            raise ValueError(f"n ({self.n}) must not exceed num_beams ({self.num_beams}): a beam ends as one sequence")
        off: dict[str, Any] = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "best_of": None, "stop": ()}
        off |= {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None}
        off |= {"allowed_token_ids": None, "bad_words": (), "structured": None, "logprobs_mode": "raw"}
        off |= {"logits_processor": None, "prompt_logprobs": None}
        for name, value in off.items():
            if getattr(self, name) != value and not (name == "top_k" and self.top_k == -1):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} contradicts num_beams={self.num_beams}: a beam search draws "
                    f"nothing and ends at token ids, so set {name}={value!r}"
                )
        if self.num_top_logprobs:
            raise ValueError(f"logprobs={self.logprobs} contradicts num_beams={self.num_beams}: set it to 0 or None")

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        rule = f"a mapping of at most {MAX_BIASED_IDS} token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}"
        if not isinstance(bias, Mapping) or len(bias) > MAX_BIASED_IDS:
            raise ValueError(f"logit_bias must be {rule}, got {_shown(bias)}")
        checked: dict[int, float] = {}
        for token_id, value in bias.items():
            # Of JSON, where all keys are text.
            if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit():
                token_id = int(token_id)
            if not _is_token_id(token_id) or isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise ValueError(f"logit_bias must be {rule}, got {token_id!r}: {value!r}")
            if not -MAX_BIAS <= value <= MAX_BIAS:
                raise ValueError(f"logit_bias must be {rule}, got {token_id!r}: {value!r}")
            checked[int(token_id)] = float(value)
        object.__setattr__(self, "logit_bias", checked or None)

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens are wanted beside the drawn one; -1: all of the vocabulary."""
        return self.logprobs or 0

    @property
    def returns_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def has_masks(self) -> bool:
        """Whether it is said id by id what may be drawn."""
        return self.allowed_token_ids is not None or bool(self.bad_words) or self.structured is not None

    @property
    def is_processed(self) -> bool:
        return self.logprobs_mode == "processed"

    @property
    def follows_tokens(self) -> bool:
        """Whether a draw depends on the tokens before, in a way that the host alone knows."""
        return bool(self.bad_words) or self.structured is not None or self.logits_processor is not None


def _is_token_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{type(value).__name__} of {len(value)}"
