"""Owns `Constraints`: how what a caller allows and forbids becomes the `Constraint` of a request."""

from __future__ import annotations

import functools

from jpaged.host.constraint import Constraint
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.tokenizer import Tokenizer


class Constraints:
    """For one model and its tokenizer, if it has one."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def of(self, sampling: SamplingParams) -> Constraint | None:
        """None if nothing is said id by id. Raises ValueError for a structure that no text can have."""
        if not sampling.has_masks:
            return None
        bad_words = [ids for word in sampling.bad_words or () for ids in self._spellings(word)]
        never = {ids[0] for ids in bad_words if len(ids) == 1}
        if sampling.allowed_token_ids is not None and never.issuperset(sampling.allowed_token_ids):
            raise ValueError(f"bad_words leave none of allowed_token_ids: {list(sampling.bad_words or ())!r}")
        return Constraint(
            self._vocab_size,
            allowed=sampling.allowed_token_ids,
            bad_words=bad_words,
            matcher=None if sampling.structured is None else self._grammars.matcher(sampling.structured),
            ending_ids=(frozenset() if sampling.ignore_eos else self._eos_token_ids)
            | frozenset(sampling.stop_token_ids or ()),
            min_tokens=sampling.min_tokens,
        )

    def _spellings(self, word: str) -> list[list[int]]:
        """The ids of a word at the start of a text, and after a space."""
        assert self._tokenizer is not None
        spelled = [self._tokenizer.encode_continuation(text) for text in (word, " " + word)]
        return [ids for ids in spelled if ids]

    @functools.cached_property
    def _grammars(self):
        from jpaged.host.grammar import Grammars  # not before it is needed: it takes a while to load

        assert self._tokenizer is not None
        return Grammars(self._tokenizer, self._vocab_size, self._eos_token_ids)
