"""Owns `Limits`: what an engine can serve, and the checks of what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .sampling_params import SamplingParams


class Limits(NamedTuple):
    """What a request must keep within, each known when an engine is built."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    has_tokenizer: bool
    max_model_len: int
    max_num_seqs: int
    max_num_beams: int
    num_candidates: int  # of each row's next token, for beams
    num_pages: int  # that requests can hold
    page_size: int
    prefix_caching: bool
    prompt_logprobs: bool
    with_rope_lens: bool  # rotations depend on the length of the prompt

    def max_tokens(self, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """How many tokens may follow a prompt."""
        fit = self.max_model_len - len(token_ids)
        return min(sampling.max_tokens or fit, fit)

    def cache_salt(self, token_ids: Sequence[int], sampling: SamplingParams) -> bytes:
        """What must be equal, beside the tokens, for requests to share pages."""
        # Rotations by the length of the prompt are those of prompts of this length alone.
        length = len(token_ids) if self.with_rope_lens else 0
        return f"{length} {sampling.cache_salt or ''}".encode()

    def check(self, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise ValueError for a prompt or sampling that cannot be served."""
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self.max_model_len}, which must also "
                "hold what is generated: shorten the prompt or raise max_model_len"
            )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(sampling, name) or ():
                if token_id >= self.vocab_size:
                    raise ValueError(f"{name} has {token_id}, but the vocabulary ends at {self.vocab_size - 1}")
        if sampling.num_top_logprobs > self.vocab_size:
            raise ValueError(
                f"logprobs must be at most the size of the vocabulary, {self.vocab_size}, got {sampling.logprobs}: "
                "-1 asks for all"
            )
        if sampling.prompt_logprobs is not None and not self.prompt_logprobs:
            raise ValueError(
                f"prompt_logprobs={sampling.prompt_logprobs} needs an engine with prompt_logprobs=True, and this one "
                "has prompt_logprobs=False"
            )
        for name in ("bad_words", "structured"):
            if getattr(sampling, name) and not self.has_tokenizer:
                raise ValueError(f"{name} needs a tokenizer, and these params have none")
        if sampling.stop and not self.has_tokenizer:
            raise ValueError("stop strings need a tokenizer, and these params have none: use stop_token_ids")
        if sampling.num_beams > 1:
            self._check_beams(token_ids, sampling)

    def check_session(self, num_tokens: int) -> None:
        """Raise ValueError unless a session can have so many tokens."""
        if not self.prefix_caching:
            raise ValueError(
                "a session keeps its KV in the prefix cache, and this engine has prefix_caching=False: build it with "
                "prefix_caching=True"
            )
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"the session would have {num_tokens} tokens, but max_model_len is {self.max_model_len}: give it fewer "
                "or raise max_model_len"
            )

    def check_score(self, num_tokens: int) -> None:
        """Raise ValueError unless tokens of a sequence of `num_tokens` can be scored."""
        if not self.prompt_logprobs:
            raise ValueError("score needs an engine with prompt_logprobs=True, and this one has prompt_logprobs=False")
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"session and continuation have {num_tokens} tokens together, but max_model_len is "
                f"{self.max_model_len}: shorten the continuation or raise max_model_len"
            )

    def _check_beams(self, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        width = sampling.num_beams
        if width > self.max_num_beams:
            raise ValueError(
                f"num_beams is {width}, but this engine was built for at most {self.max_num_beams}: give it "
                f"max_num_beams={width}" + (f" and max_num_seqs={width}" if width > self.max_num_seqs else "")
            )
        num_ending = len(sampling.stop_token_ids or ()) + (0 if sampling.ignore_eos else len(self.eos_token_ids))
        if width + num_ending > self.num_candidates:
            raise ValueError(
                f"num_beams ({width}) and {num_ending} ids that end a text are more than the {self.num_candidates} "
                "candidates of this engine: give fewer stop_token_ids or build it with more max_num_beams"
            )
        # If all beams differ from the start, and while one is computed again the others wait: all must fit.
        num_tokens = len(token_ids) + self.max_tokens(token_ids, sampling)
        num_pages = width * -(-num_tokens // self.page_size)
        if num_pages > self.num_pages:
            raise ValueError(
                f"{width} beams of up to {num_tokens} tokens may take {num_pages} pages, but the KV cache has "
                f"{self.num_pages}: lower max_tokens or num_beams, or give the KV cache more memory"
            )
