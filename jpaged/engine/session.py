"""Owns `Session`: a sequence that a caller extends, branches and scores by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jpaged.engine.outputs import CompletionOutput, RequestOutput
from jpaged.engine.prompt import Prompt, continuation_ids, to_token_ids
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine


class Session:
    """A sequence of tokens to go on from, such as a node of a tree search. `Engine.session` begins one.

    It holds token ids and nothing else: between calls, its KV is what the engine's prefix cache has of these tokens. So
    a fork costs nothing and computes nothing again; what memory pressure took is computed again, and so is the page
    that is not full yet, at most `page_size - 1` tokens. Other weights find nothing of the earlier ones. Where rotary
    embeddings depend on the length of a sequence (dynamic scaling), KV is found by sequences of the same length alone.

    Other requests of the engine go on in the steps of `generate` and `score`; the next `Engine.step` returns what they
    gained.

    A call that raises, Ctrl-C included, leaves the session as it was and no request behind. Not for use from several
    threads at once.
    """

    __slots__ = ("_engine", "_token_ids", "_cache_salt")

    def __init__(self, engine: Engine, token_ids: list[int], cache_salt: str | None):
        self._engine = engine
        self._token_ids = token_ids
        self._cache_salt = cache_salt

    @classmethod
    def begin(cls, engine: Engine, prompt: Prompt, cache_salt: str | None) -> Session:
        """As `Engine.session`."""
        SamplingParams(cache_salt=cache_salt)  # raises for what is no salt
        _, token_ids = to_token_ids(prompt, engine.tokenizer, engine.model_config.vocab_size)
        engine._limits.check_session(len(token_ids))
        return cls(engine, token_ids, cache_salt)

    @property
    def token_ids(self) -> list[int]:
        """All its tokens, the prompt's first."""
        return list(self._token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def text(self) -> str:
        """All its tokens as text, without special ones. Raises ValueError if the params have no tokenizer."""
        if self._engine.tokenizer is None:
            raise ValueError("these params have no tokenizer: read token_ids instead of text")
        return self._engine.tokenizer.decode(self._token_ids)

    def __repr__(self) -> str:
        return f"Session({len(self)} tokens)"

    def fork(self) -> Session:
        """Another session that begins with these tokens, and with their KV."""
        return Session(self._engine, self.token_ids, self._cache_salt)

    def append(self, continuation: str | Sequence[int]) -> None:
        """Add tokens to the end: text, which gets no special tokens around it, or token ids.

        Computes nothing. Raises ValueError for what is empty, no token of the model, or too long for `max_model_len`.
        """
        token_ids = self._token_ids + self._encode(continuation)
        self._engine._limits.check_session(len(token_ids))
        self._token_ids = token_ids

    def generate(self, sampling: SamplingParams | None = None) -> CompletionOutput:
        """Continue the sequence by one sample, whose tokens are appended, the one that ended the text included.

        Steps the engine until it has ended. Raises ValueError for sampling of several sequences (fork the session
        instead) or with another `cache_salt` than the session's, and where no token fits into `max_model_len`.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
        for name, value in (("num_beams", sampling.num_beams), ("n", sampling.n), ("best_of", sampling.best_of or 1)):
            if value > 1:
                raise ValueError(f"a session is one sequence, got {name}={value}: fork it for others")
        if sampling.cache_salt not in (None, self._cache_salt):
            raise ValueError(
                f"the session has cache_salt={self._cache_salt!r} and sampling {sampling.cache_salt!r}: give it to "
                "Engine.session alone"
            )
        salted = replace(sampling, cache_salt=self._cache_salt)
        name = self._engine._new_name()
        output = self._run(name, lambda: self._engine.add_request(self._token_ids, salted, request_id=name))
        sample = output.outputs[0]
        self._token_ids = self._token_ids + sample.token_ids
        return sample

    def score(self, continuation: str | Sequence[int]) -> list[float]:
        """The log-probability of each token of a continuation, given all tokens before it, under the unmodified logits
        (no temperature, no filters). The session stays as it is; the KV of the continuation is kept as of its own.

        continuation: as for `append`, whose errors it has. Steps the engine until the scores are there. Raises
        ValueError if the engine was not built with `prompt_logprobs=True`.
        """
        engine = self._engine
        token_ids = self._token_ids + self._encode(continuation)
        engine._limits.check_score(len(token_ids))
        sampling = SamplingParams(max_tokens=1, cache_salt=self._cache_salt)
        name = engine._new_name()
        request = Request(
            request_id=f"{name}/0",
            prompt_token_ids=token_ids,
            sampling=sampling,
            seed=0,  # nothing is drawn
            eos_token_ids=frozenset(),
            max_tokens=1,
            cache_salt=engine._limits.cache_salt(token_ids, sampling),
            score_from=len(self),
        )
        self._run(name, lambda: engine._add(name, None, [request]))
        return request.prompt_logprobs

    def _encode(self, continuation: str | Sequence[int]) -> list[int]:
        return continuation_ids(continuation, self._engine.tokenizer, self._engine.model_config.vocab_size)

    def _run(self, name: str, add: Callable[[], object]) -> RequestOutput:
        """The final output of the request of this name, which `add` queues."""
        try:
            add()
            output = None
            while name in self._engine._groups:
                output = self._engine._advance(name)
            assert output is not None and output.finished, f"somebody else ended {name}, the request of a session"
            return output
        except BaseException:
            self._engine.abort(name)
            raise
