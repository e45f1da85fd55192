"""Owns `Constraint`: which ids a request may draw next, where that is said id by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """How far the tokens of a structured text go along with its grammar."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Makes these all of its tokens."""

    def fill(self, mask: np.ndarray) -> None:
        """Sets the bits of the ids that may follow. Raises ValueError if that cannot be told."""

    def fork(self) -> Matcher:
        """Another one that has the same tokens."""


class Constraint:
    """Masks of ids as bits, uint32 [(vocab_size + 31) // 32], low bits first.

    allowed: the ids that may be drawn at all. bad_words: sequences of ids, of which none is completed. matcher: of a
    structured text. ending_ids: those that end the text; they wait for `min_tokens`. Where nothing else is left to
    draw, the ids that end the text don't wait, and then bad words don't count.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Sequence[int] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
        ending_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ):
        self._vocab_size = vocab_size
        self._allowed = mask_of(range(vocab_size) if allowed is None else allowed, vocab_size)
        self._bad_words = [tuple(word) for word in bad_words]
        self._matcher = matcher
        self._ending = mask_of(sorted(ending_ids), vocab_size)
        self._min_tokens = min_tokens

    def fork(self) -> Constraint:
        """Another one, for a request that goes on from the same tokens."""
        copy = object.__new__(Constraint)
        copy.__dict__ |= self.__dict__
        if self._matcher is not None:
            copy._matcher = self._matcher.fork()
        return copy

    def fill(self, mask: np.ndarray, token_ids: Sequence[int], ahead: bool = False) -> None:
        """Writes the mask for the token after the output so far. `ahead`: one more token is being drawn, and does not
        matter to this one. Raises ValueError if the matcher does."""
        assert not (ahead and (self._bad_words or self._matcher)), "the tokens before are not known yet"
        mask[:] = self._allowed
        if self._matcher is not None:
            self._matcher.follow(token_ids)
            self._matcher.fill(mask)
            mask &= self._allowed  # the bits behind the vocabulary
        self._remove(mask, self._completing(token_ids))
        if len(token_ids) + ahead < self._min_tokens:
            self._remove(mask, self._ending)

    def _completing(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = [
            word[-1]
            for word in self._bad_words
            if len(word) == 1 or (len(word) <= len(token_ids) + 1 and tuple(token_ids[1 - len(word) :]) == word[:-1])
        ]
        return mask_of(ids, self._vocab_size)

    @staticmethod
    def _remove(mask: np.ndarray, others: np.ndarray) -> None:
        left = mask & ~others
        if left.any():
            mask[:] = left


def mask_of(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The mask that has these ids."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
