"""Owns `BeamSearch`: the sequences that a request follows at a time, and the best of those that it has seen end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .sampling_params import SamplingParams


class Branch(NamedTuple):
    """How a beam goes on: one token behind those of the beam with the number `parent`."""

    parent: int
    token_id: int
    logprob: float


class Found(NamedTuple):
    """A sequence that has ended."""

    score: float  # its log-probability over its length to the power of the length penalty
    token_ids: list[int]
    logprobs: list[float]
    reason: str  # "stop", or "length" where there was no room for more
    stop_reason: int | None


class BeamSearch:
    """The search of transformers' `generate(num_beams=...)`, after Wiseman and Rush 2016 (arXiv:1606.02960), section 2.

    Of all beams' continuations the `num_beams` best that don't end go on. An ending one counts if it is among the
    `num_beams` best of all continuations, and the best `num_beams` of those seen so far are kept. Sums are float32, of
    log-probabilities under the unmodified logits; of equal ones that of the earlier beam and the lower id comes first.
    """

    def __init__(self, sampling: SamplingParams, ending_ids: frozenset[int], max_tokens: int):
        self.width = sampling.num_beams
        self.scores = np.zeros(1, np.float32)  # of the beams: first there is one, the prompt
        self.found: list[Found] = []  # best first
        self._sampling = sampling
        self._penalty = float(sampling.length_penalty)
        self._ending_ids = ending_ids
        self._max_tokens = max_tokens

    def advance(
        self,
        outputs: Sequence[tuple[list[int], list[float]]],
        candidate_ids: np.ndarray,
        candidate_logprobs: np.ndarray,
    ) -> list[Branch]:
        """The next beams, best first; none when the search is over, with its results in `found`.

        outputs: each beam's tokens so far and their log-probabilities. candidates [beams, K]: how each may go on, best
        first; K must be at least the number of beams and of ending ids together.
        """
        length = len(outputs[0][0]) + 1
        sums = self.scores[:, None] + candidate_logprobs.astype(np.float32)
        branches: list[Branch] = []
        kept: list[float] = []
        for rank, at in enumerate(np.argsort(-sums, axis=None, kind="stable")):
            beam, place = divmod(int(at), sums.shape[1])
            total = sums[beam, place]
            if total == -np.inf or (rank >= self.width and len(branches) == self.width):
                break
            branch = Branch(beam, int(candidate_ids[beam, place]), float(candidate_logprobs[beam, place]))
            if branch.token_id in self._ending_ids or length == self._max_tokens:
                if rank < self.width:
                    self._finish(branch, outputs[beam], float(total))
            elif len(branches) < self.width:
                branches.append(branch)
                kept.append(total)
        if not branches and not self.found:  # nothing may follow: the beams are what there is
            for (token_ids, logprobs), total in zip(outputs, self.scores.tolist(), strict=True):
                score = total / (length - 1 or 1) ** self._penalty
                self.found.append(Found(score, list(token_ids), list(logprobs), "length", None))
        self.scores = np.array(kept, np.float32)
        return branches if branches and self._may_improve(length) else []

    def _finish(self, branch: Branch, output: tuple[list[int], list[float]], total: float) -> None:
        token_ids, logprobs = [*output[0], branch.token_id], [*output[1], branch.logprob]
        ends = branch.token_id in self._ending_ids
        stop = branch.token_id if branch.token_id in (self._sampling.stop_token_ids or ()) else None
        score = total / len(token_ids) ** self._penalty
        self.found.append(Found(score, token_ids, logprobs, "stop" if ends else "length", stop if ends else None))
        self.found.sort(key=lambda found: -found.score)
        del self.found[self.width :]

    def _may_improve(self, length: int) -> bool:
        """Whether to go on after `length` tokens."""
        early, penalty = self._sampling.early_stopping, self._penalty
        if len(self.found) < self.width:
            return True
        if early is True:
            return False
        best_length = self._max_tokens if early == "never" and penalty > 0 else length
        return bool(self.scores[0] / best_length**penalty > self.found[-1].score)
