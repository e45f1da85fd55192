"""Owns how what a caller asks for becomes `Request`s: samples, those that branch off, and the texts of each."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from jpaged.host.constraint import Constraint
from jpaged.host.detokenizer import Detokenizer
from jpaged.host.limits import Limits
from jpaged.host.request import Request
from jpaged.host.sampling_params import MAX_N, SamplingParams
from jpaged.host.tokenizer import Tokenizer


def samples_of(
    request_id: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    limits: Limits,
    priority: int = 0,
    salt: bytes = b"",
    constraint: Constraint | None = None,
) -> list[Request]:
    """The samples of one request, or the first of its beams."""
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64
    requests: list[Request] = []
    for index in range(1 if sampling.num_beams > 1 else sampling.best_of or sampling.n):
        requests.append(
            Request(
                request_id=f"{request_id}/{index}",  # with an index each, no two samples have one name
                prompt_token_ids=list(token_ids),
                sampling=sampling,
                seed=seed_of_sample(seed, index),
                eos_token_ids=limits.eos_token_ids,
                max_tokens=limits.max_tokens(token_ids, sampling),
                is_beam=sampling.num_beams > 1,
                cache_salt=salt,
                parent=requests[0] if index else None,  # the prompt is computed once
                priority=priority,
                family=request_id,
                constraint=constraint and constraint.fork(),
                # Of the first sample: the others begin with what it has computed.
                score_from=None if index or sampling.prompt_logprobs is None or len(token_ids) < 2 else 1,
                generates=True,
            )
        )
    return requests


def fork_of(parent: Request, name: str) -> Request:
    """A request of this name that begins with all that another one has, and goes on with draws of its own."""
    parent.num_forks += 1
    return parent.like(
        f"{name}/0",
        family=name,
        sampling=replace(parent.sampling, n=1, best_of=None),
        seed=seed_of_sample(parent.seed, MAX_N * parent.num_forks),  # no sample has this one
        parent=parent,
        output_token_ids=list(parent.output_token_ids),
        output_logprobs=list(parent.output_logprobs),
        token_times=list(parent.token_times),
        output_tops=list(parent.output_tops),
        constraint=parent.constraint and parent.constraint.fork(),
    )


def seed_of_sample(seed: int, index: int) -> int:
    """The seed of one of `n` samples: the given one for the first, an unrelated one for each other (SplitMix64, Steele
    et al. 2014)."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def detokenizer_of(tokenizer: Tokenizer | None, request: Request) -> Detokenizer | None:
    """The text of a request's output so far; None if it is to have none."""
    sampling = request.sampling
    if tokenizer is None or request.only_scores or not sampling.detokenize:
        return None
    detokenizer = Detokenizer(
        tokenizer,
        stop=sampling.stop or (),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        prompt_tail=request.prompt_token_ids,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
    )
    for token_id in request.output_token_ids:
        detokenizer.append(token_id)
    return detokenizer
