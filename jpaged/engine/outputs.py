"""Owns `RequestOutput`: what the engine tells a caller about a request, after a step or at its end, and parts of it."""

from __future__ import annotations

from dataclasses import dataclass

from jpaged.host.detokenizer import Detokenizer
from jpaged.host.metrics import Latencies
from jpaged.host.request import Request


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a sample, and how the sample stood at its end; the fields are those of `CompletionOutput`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: int | str | None

    def then(self, other: Part) -> Part:
        """Both, one after the other."""

        def joined(mine: list | None, others: list | None) -> list | None:
            return None if mine is None else mine + (others or [])

        return Part(
            self.index,
            self.text + other.text,
            self.token_ids + other.token_ids,
            joined(self.logprobs, other.logprobs),
            joined(self.top_logprobs, other.top_logprobs),
            other.finish_reason,
            other.stop_reason,
        )


class CompletionOutput:
    """One sample of a request, as it stood when this was made: later tokens do not show in it.

    index: which of the `n` samples, from 0. finish_reason: None while it goes on, then "stop" (an end-of-sequence
    token, or what `stop_reason` says) or "length" (`max_tokens`, or the model's length is used up).
    stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence token.
    """

    __slots__ = ("index", "finish_reason", "stop_reason", "_request", "_detokenizer", "_num_tokens", "_num_chars")

    def __init__(self, index: int, request: Request, detokenizer: Detokenizer | None):
        self.index = index
        self.finish_reason = request.finish_reason
        self.stop_reason = request.stop_reason
        # Token lists and texts only grow, so their lengths are enough to come back to this moment, and a step that
        # nobody looks at copies nothing.
        self._request = request
        self._detokenizer = detokenizer
        self._num_tokens = len(request.output_token_ids)
        self._num_chars = 0 if detokenizer is None else detokenizer.num_chars

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, the one that ended the text included."""
        return self._request.output_token_ids[: self._num_tokens]

    @property
    def text(self) -> str:
        """The generated text; empty if the model has no tokenizer."""
        return self._text(0)

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each token of `token_ids`, if `SamplingParams.logprobs` asked for it."""
        return self._logprobs(0)

    @property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """For each token of `token_ids` the likeliest ids in its place and their log-probabilities, best first, as many
        as `SamplingParams.logprobs` says; None if it says 0 or less than that."""
        return self._top_logprobs(0)

    def part(self, num_tokens: int, num_chars: int) -> Part:
        """What it has beyond its first tokens and characters. Costs what that is, however long the whole has grown."""
        return Part(
            self.index,
            self._text(num_chars),
            self._request.output_token_ids[num_tokens : self._num_tokens],
            self._logprobs(num_tokens),
            self._top_logprobs(num_tokens),
            self.finish_reason,
            self.stop_reason,
        )

    def _text(self, start: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.text_between(start, self._num_chars)

    def _logprobs(self, start: int) -> list[float] | None:
        request = self._request
        return request.output_logprobs[start : self._num_tokens] if request.sampling.returns_logprobs else None

    def _top_logprobs(self, start: int) -> list[dict[int, float]] | None:
        if not self._request.sampling.num_top_logprobs:
            return None
        tops = self._request.output_tops[start : self._num_tokens]
        return [dict(zip(ids.tolist(), logprobs.tolist(), strict=True)) for ids, logprobs in tops]

    @property
    def score(self) -> float | None:
        """Of a sequence that a beam search found: what it was ranked by."""
        return self._request.score

    @property
    def cumulative_logprob(self) -> float:
        """The log-probability of the whole sample, the sum over its tokens; it does not need `logprobs`."""
        return sum(self._request.output_logprobs[: self._num_tokens])

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, token_ids={self.token_ids}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request. `outputs` has one entry for each of its `n` samples, in their order. A request that was
    aborted has no further outputs.

    prompt: the text that was given, or that the chat template made; None for token ids. num_preemptions: how often it
    had to give way, all samples together. num_cached_tokens: tokens of the prompt whose KV was found in the prefix
    cache. num_swapped_pages: pages that were brought back for it from swap space; num_page_copies: pages that were
    copied as its samples went on differently in them; both all samples together. prompt_logprobs: the log-probability
    of each token of the prompt, None for the first, if `SamplingParams.prompt_logprobs` asked for it;
    prompt_top_logprobs: the likeliest ids in its place and theirs, best first, if it asked for any.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_preemptions: int
    num_cached_tokens: int
    num_swapped_pages: int = 0
    num_page_copies: int = 0
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None

    @property
    def latencies(self) -> list[Latencies]:
        """For each sample: ttft (arrival to first token), tpot (mean time per later token), itl (each gap between two
        tokens), e2e_latency (arrival to end) and queue_time (arrival to the first step with any of it), in seconds."""
        return [Latencies.of(output._request, output._num_tokens) for output in self.outputs]
