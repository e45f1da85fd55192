"""Owns the beam searches of the memory study: the engine's own machinery on drawn log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jpaged.host.beam_search import BeamSearch
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler

from .paged import PAGE_SIZE, VOCAB_SIZE, make_scheduler
from .trace import Lengths

NUM_DRAWN = 32  # candidates of a beam; those behind count with their mean


class Likelihoods(NamedTuple):
    """How likely a beam's next tokens are: which of the beams' continuations win decides how much the beams share.

    The k-th likeliest token has a probability in proportion to G_k ** -exponent, where G_k is the k-th arrival of a
    Poisson process of rate 1: Zipf's law, with the chance in it that leaves one step open and makes another one certain
    (Pitman and Yor 1997, Annals of Probability 25(2), the Poisson-Dirichlet distribution). The likeliest token is
    `exponent` nats ahead of the second, on average. Steps are independent.

    Beams are independent too, but for `alike`: the probability that a beam which leaves another one, by a token that is
    not the likeliest, has the same probabilities as that one from then on, as where two words mean the same. The one of
    them that is behind stays behind.
    """

    exponent: float
    alike: float

    def draw(self, rng: np.random.Generator, num_rows: int, num_candidates: int) -> np.ndarray:
        """Independent log-probabilities [num_rows, num_candidates], the likeliest first."""
        arrivals = rng.standard_exponential((num_rows, NUM_DRAWN)).cumsum(axis=1)
        weights = arrivals**-self.exponent
        behind = arrivals[:, -1] ** (1 - self.exponent) / (self.exponent - 1)
        return np.log(weights[:, :num_candidates] / (weights.sum(axis=1) + behind)[:, None])


# As SmolLM2-135M was in beam searches of width 4: `jpaged bench memory --run` measures it.
MEASURED = Likelihoods(exponent=2.7, alike=0.3)


class Search:
    """A request's beams, driven as the engine's `Group` drives them. Their candidates are `width` token ids, a token's
    rank being its id."""

    def __init__(self, request: Request, likelihoods: Likelihoods, rng: np.random.Generator):
        self.beams = [request]
        self.kinds = [0]  # of each beam: those of one kind are alike
        self._num_kinds = 1
        self._likelihoods = likelihoods
        self._rng = rng
        self._search = BeamSearch(request.sampling, request.ending_ids, request.max_tokens)
        self._drawn: dict[
            int, np.ndarray
        ] = {}  # the next log-probabilities of each kind, until the beams have branched

    def logprobs(self, beam: Request) -> np.ndarray:
        """Of the candidates for a beam's next token, the same whenever the beams of its kind compute it."""
        if not self._drawn:
            kinds = list(dict.fromkeys(self.kinds))
            self._drawn = dict(zip(kinds, self._likelihoods.draw(self._rng, len(kinds), self._search.width)))
        return self._drawn[self.kinds[self.beams.index(beam)]]

    @property
    def has_ended(self) -> bool:
        return not self.beams

    def branch(self, scheduler: Scheduler) -> list[Request]:
        """Has the beams go on, if all have candidates; returns the beams that have come to be."""
        candidates = [beam.candidates for beam in self.beams if beam.candidates is not None]
        if len(candidates) < len(self.beams):
            return []
        self._drawn = {}
        outputs = [(beam.output_token_ids, beam.output_logprobs) for beam in self.beams]
        branches = self._search.advance(outputs, *map(np.stack, zip(*candidates)))
        first, new = self.beams[0], []
        for place in range(len(self.beams), len(branches)):
            new.append(first.like(f"{first.request_id}/{place}", parent=first))
            scheduler.add(new[-1], order=first.order + place)
        self.beams = scheduler.branch([*self.beams, *new], branches)
        self.kinds = [self._kind(self.kinds[branch.parent], branch.token_id) for branch in branches]
        return new

    def _kind(self, kind: int, token_id: int) -> int:
        if token_id == 0 or self._rng.random() < self._likelihoods.alike:
            return kind
        self._num_kinds += 1
        return self._num_kinds - 1


def serve_beams(
    trace: Sequence[Lengths],
    *,
    width: int,
    likelihoods: Likelihoods,
    num_slots: int,
    max_searches: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> Iterator[tuple[Scheduler, int]]:
    """Serves a trace, each request a beam search over its whole length: no beam ends early. All requests are there at
    the start, or with `max_searches` so many, and one more whenever one has ended. Those whose beams would not all fit
    into the memory if they shared nothing are left out, as the engine refuses them.

    Yields each step while it runs, as `serve` does, and how many beams are still to begin.
    """
    scheduler = make_scheduler(num_slots, PAGE_SIZE, len(trace) * width, True, max_num_batched_tokens)
    sampling = SamplingParams(num_beams=width, temperature=0.0, max_tokens=None, ignore_eos=True)
    rng = np.random.default_rng(0)
    coming: deque[Request] = deque()
    for index, lengths in enumerate(trace):
        prompt = rng.integers(0, VOCAB_SIZE, lengths.prompt).tolist()
        if width * scheduler.pool.pages_for(lengths.prompt + lengths.output) < scheduler.pool.num_pages:
            coming.append(Request(str(index), prompt, sampling, 0, frozenset(), lengths.output, is_beam=True))
    searches: dict[Request, Search] = {}
    num_unfinished, num_searching = len(coming), 0
    while True:
        while coming and (max_searches is None or num_searching < max_searches):
            request = coming.popleft()
            searches[request] = Search(request, likelihoods, rng)
            scheduler.add(request)
            num_searching += 1
        plan = scheduler.schedule()
        if plan is None:
            return
        yield scheduler, num_unfinished * width - scheduler.num_running
        num_rows = len(plan.rows)
        ids = np.broadcast_to(np.arange(width), (num_rows, width))
        logprobs = np.zeros((num_rows, width))
        for at, (request, start, num_tokens) in enumerate(plan.rows):
            if start + num_tokens == request.num_tokens:
                logprobs[at] = searches[request].logprobs(request)
        nothing = np.zeros(num_rows, int)
        gained = scheduler.update(plan, nothing, nothing, (ids, logprobs))  # type: ignore[arg-type]  # arrays
        for search in dict.fromkeys(searches[request] for request in gained):
            searches |= dict.fromkeys(search.branch(scheduler), search)
            num_unfinished -= search.has_ended
            num_searching -= search.has_ended
