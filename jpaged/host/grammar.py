"""Owns `Grammars`: structured texts as `llguidance` follows them, for one tokenizer."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence

import llguidance
import numpy as np

from .structured import Structured
from .tokenizer import Tokenizer

MAX_GRAMMARS = 128  # compiled ones that are kept


class Grammars:
    """Compiles what a text is to look like, once for equal ones. From several threads at once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(MAX_GRAMMARS)(self._compile)

    def matcher(self, structured: Structured) -> GrammarMatcher:
        """One for a new text. Raises ValueError for what is no grammar, or can't be met by any text."""
        if not self._eos_token_ids:
            raise ValueError("structured needs a model that has an end-of-sequence token, and this one has none")
        compiled = self._compiled(structured)  # not under the lock: others may take long
        with self._lock:
            return compiled.fork()

    @functools.cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(self._source, self._vocab_size, self._eos_token_ids)),
            n_vocab=self._vocab_size,
            eos_token=self._eos_token_ids,
        )

    def _compile(self, structured: Structured) -> GrammarMatcher:
        name, source = _grammar_of(structured)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        found = GrammarMatcher(matcher, name)
        if matcher.is_error():
            raise ValueError(f"{name} cannot be followed: {_first_lines(matcher.get_error())}")
        mask = np.zeros(-(-self._vocab_size // 32), np.uint32)
        try:
            found.fill(mask)
        except ValueError:
            mask[:] = 0
        if not mask.any():
            raise ValueError(f"{name} cannot be met by any text of this model: {_shown(structured)}")
        return found


class GrammarMatcher:
    """Follows one text."""

    def __init__(self, matcher: llguidance.LLMatcher, name: str, num_tokens: int = 0):
        self._matcher = matcher
        self._name = name
        self._num_tokens = num_tokens

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._name, self._num_tokens)

    def follow(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) < self._num_tokens:  # an interruption took some back
            self._matcher.reset()
            self._num_tokens = 0
        for token_id in token_ids[self._num_tokens :]:
            self._matcher.consume_token(token_id)
            self._num_tokens += 1

    def fill(self, mask: np.ndarray) -> None:
        """Raises ValueError if the grammar has grown too large to be followed: that shows in the middle of a text."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise ValueError(
                f"{self._name} cannot be followed beyond {self._num_tokens} tokens: "
                f"{_first_lines(self._matcher.get_error())}"
            )


class _Vocabulary:
    """A tokenizer as `llguidance` asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.piece(token_id, skip_special_tokens=False) or b"" for token_id in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(eos_token_ids))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_continuation(text)


def _grammar_of(structured: Structured) -> tuple[str, str]:
    """The name of what was given, and its grammar."""
    of = llguidance.LLMatcher
    if structured.json is not None:
        try:
            return "json", of.grammar_from_json_schema(str(structured.json))
        except ValueError as error:
            raise ValueError(f"json cannot be followed: {_first_lines(str(error))}") from error
    if structured.json_object:
        return "json_object", of.grammar_from_json_schema(json.dumps({"type": "object"}))
    if structured.regex is not None:
        return "regex", of.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return "choice", of.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choice)))
    assert structured.grammar is not None
    return "grammar", of.grammar_from_lark(structured.grammar)


def _shown(structured: Structured) -> str:
    text = repr(structured.regex or structured.grammar or structured.json or structured.choice)
    return text if len(text) <= 200 else text[:200] + " ..."


def _first_lines(message: str) -> str:
    message, _, _ = message.partition("<state>")  # of no use to who asked, and it quotes the text
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:4])[:400] or "no reason was given"
