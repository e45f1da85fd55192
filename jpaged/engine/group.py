"""Owns `Group`: what a caller knows as one request: its samples, each scheduled on its own, or its beam search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from jpaged.engine.outputs import CompletionOutput, RequestOutput
from jpaged.host.beam_search import BeamSearch, Found
from jpaged.host.detokenizer import Detokenizer
from jpaged.host.request import Request, RequestStatus
from jpaged.host.sampling_params import MAX_N
from jpaged.host.scheduler import Scheduler


@dataclass(slots=True)
class Sample:
    """One sequence of a request."""

    request: Request
    detokenizer: Detokenizer | None
    index: int
    group: Group


@dataclass(slots=True)
class Group:
    """The samples of one request, of which `num_unfinished` go on. With `beams` they are the beams of a search, and
    what it has found when it has ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Sample]
    num_unfinished: int
    beams: BeamSearch | None = None
    first_order: int | None = None  # of the search's places in the scheduler's order
    # What was asked about the tokens of the prompt, when it is known: not to be put together again with each token.
    prompt_scores: tuple[list[float | None], list[dict[int, float] | None] | None] | None = None

    @property
    def num_returned(self) -> int:
        return self.samples[0].request.sampling.n

    @property
    def shows_progress(self) -> bool:
        """Whether its outputs are of use before all have ended: which samples are returned is known from the start."""
        return self.beams is None and len(self.samples) == self.num_returned

    @property
    def was_aborted(self) -> bool:
        return any(sample.request.finish_reason == "abort" for sample in self.samples)

    def to_fork(self, n: int, index: int) -> Request:
        """The sample of this index, if it can be forked into `n`; or raises ValueError."""
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 1 <= n <= MAX_N:
            raise ValueError(f"n must be a whole number from 1 to {MAX_N}, got {n!r}")
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)) or not 0 <= index < len(self.samples):
            raise ValueError(f"index must be that of one of the {len(self.samples)} samples, got {index!r}")
        parent = self.samples[index].request
        if parent.is_beam:
            raise ValueError(
                f"request {self.request_id!r} is a beam search, which branches by itself, and cannot be forked"
            )
        if parent.finish_reason is not None:
            raise ValueError(f"sample {index} of request {self.request_id!r} has ended and cannot be forked")
        return parent

    def output(self) -> RequestOutput:
        outputs = [CompletionOutput(s.index, s.request, s.detokenizer) for s in self.samples]
        first = self.samples[0].request
        if len(outputs) > 1:
            if self.beams is None and len(outputs) > self.num_returned:  # the best of them
                outputs.sort(key=attrgetter("cumulative_logprob"), reverse=True)
            outputs = outputs[: self.num_returned]
            for index, output in enumerate(outputs):
                output.index = index
        if self.prompt_scores is None and first.sampling.prompt_logprobs is not None and not first.lacks_scores:
            self.prompt_scores = self._prompt_scores(first)
        scores, tops = self.prompt_scores or (None, None)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=not self.num_unfinished,
            num_preemptions=sum(s.request.num_preemptions for s in self.samples),
            num_cached_tokens=min(first.num_cached_tokens or 0, first.num_prompt_tokens),
            num_swapped_pages=sum(s.request.num_swapped_pages for s in self.samples),
            num_page_copies=sum(s.request.num_page_copies for s in self.samples),
            prompt_logprobs=scores,
            prompt_top_logprobs=tops,
        )

    @staticmethod
    def _prompt_scores(first: Request) -> tuple[list[float | None], list[dict[int, float] | None] | None]:
        tops = [dict(zip(ids.tolist(), scores.tolist(), strict=True)) for ids, scores in first.prompt_tops]
        return [None, *first.prompt_logprobs], [None, *tops] if first.sampling.prompt_logprobs else None

    def branch(self, scheduler: Scheduler, detokenizer_of: Callable[[Request], Detokenizer | None]) -> bool:
        """Has the beams go on, if all know how they may; True when the search has ended."""
        search, beams = self.beams, [sample.request for sample in self.samples]
        assert search is not None
        candidates = [beam.candidates for beam in beams if beam.candidates is not None]
        if len(candidates) < len(beams):
            return False
        if self.first_order is None:
            self.first_order = beams[0].order
        outputs = [(beam.output_token_ids, beam.output_logprobs) for beam in beams]
        branches = search.advance(outputs, *map(np.stack, zip(*candidates, strict=True)))
        if not branches:
            scheduler.branch(beams, [])
            self.samples = [self._found(beams[0], found, detokenizer_of) for found in search.found]
            for name in ("num_preemptions", "num_swapped_pages", "num_page_copies"):
                setattr(self.samples[0].request, name, sum(getattr(beam, name) for beam in beams))
            self.num_unfinished = 0
            return True
        places = {self.first_order + i for i in range(search.width)} - {beam.order for beam in beams}
        while len(beams) < len(branches):
            order = min(places)
            places.remove(order)
            beam = beams[0].like(f"{self.request_id}/{order - self.first_order}", parent=beams[0])
            self.samples.append(Sample(beam, None, len(beams), self))  # first, so that an abort finds it
            scheduler.add(beam, order=order)
            beams.append(beam)
        beams = scheduler.branch(beams, branches)
        self.samples = [Sample(beam, None, index, self) for index, beam in enumerate(beams)]
        return False

    def start_over(self, scheduler: Scheduler, detokenizer_of: Callable[[Request], Detokenizer | None]) -> None:
        """Goes on after an interruption, which may have left anything here half written: samples from the tokens that
        they have, a search from its prompt."""
        if self.beams is not None:
            first = self.samples[0].request
            if self.first_order is None:
                self.first_order = first.order
            scheduler.end_family(first.family)
            beam = first.like(f"{self.request_id}/0", num_preemptions=first.num_preemptions)
            self.beams = BeamSearch(beam.sampling, beam.ending_ids, beam.max_tokens)
            self.samples = [Sample(beam, detokenizer_of(beam), 0, self)]
            scheduler.add(beam, order=self.first_order)
            self.num_unfinished = 1
            return
        for sample in self.samples:
            request, detokenizer = sample.request, detokenizer_of(sample.request)
            sample.detokenizer = detokenizer
            if detokenizer is not None:
                if detokenizer.stop_hit is not None:
                    scheduler.finish(request, "stop", detokenizer.stop_hit)
                elif request.finish_reason is not None:
                    detokenizer.finish()
        self.num_unfinished = sum(sample.request.finish_reason is None for sample in self.samples)

    def _found(self, first: Request, found: Found, detokenizer_of: Callable) -> Sample:
        """What the search has found, as a sample that has ended."""
        request = first.like(
            self.request_id,
            output_token_ids=found.token_ids,
            output_logprobs=found.logprobs,
            token_times=first.token_times[: len(found.token_ids)],
            status=RequestStatus.FINISHED,
            finish_reason=found.reason,
            stop_reason=found.stop_reason,
            finish_time=time.perf_counter(),
            num_cached_tokens=first.num_cached_tokens,
            score=found.score,
        )
        detokenizer = detokenizer_of(request)
        if detokenizer is not None:
            detokenizer.finish()
        return Sample(request, detokenizer, 0, self)
