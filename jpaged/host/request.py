"""Owns `Request`: one sequence of tokens to be continued, from its arrival to its end."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from time import perf_counter
from typing import Any

import numpy as np

from .constraint import Constraint
from .sampling_params import MAX_BANNED_IDS, SamplingParams

ASKED = (
    "prompt_token_ids",
    "sampling",
    "seed",
    "eos_token_ids",
    "max_tokens",
    "arrival",
    "cache_salt",
    "is_beam",
    "priority",
    "family",
)


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # holds no pages
    RUNNING = "running"
    FINISHED = "finished"


class RequestFailed(ValueError):
    """What a request asked for cannot be gone on with: it has ended, and others go on."""

    def __init__(self, request_id: str, message: str):
        super().__init__(message)
        self.request_id = request_id


@dataclass(eq=False, slots=True)
class Request:
    """What was asked, what has been generated, and what of it lies in KV memory.

    A fork begins with the tokens of its `parent`, and with its pages where it finds it running. The engine resolves
    `seed` (64 bits), `eos_token_ids` (the model's) and `max_tokens` (None means as many as fit). The scheduler alone
    moves a request on; it calls the methods below. Times are `time.perf_counter()` seconds.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    max_tokens: int
    arrival: float = field(default_factory=perf_counter)
    priority: int = 0  # the lower, the sooner it is served
    family: str | None = None  # the request that a caller knows: its samples, or beams, are of one. None: its own
    cache_salt: bytes = b""  # pages are shared only with requests of the same salt
    parent: Request | None = None  # until the fork is started
    is_beam: bool = False  # its next token is chosen by a `BeamSearch`
    num_inherited_tokens: int = 0  # those at the front that it has in common with its parent
    # The first position of the prompt whose token is scored. Such a request ends with the scores, unless it generates.
    score_from: int | None = None
    generates: bool = False  # after its scores
    constraint: Constraint | None = None  # which ids may be drawn

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    # Ids and log-probabilities of the likeliest tokens in the place of each, best first, if any are wanted.
    output_tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)  # when each output token reached the host
    num_computed_tokens: int = 0  # tokens whose KV lies in `page_ids`
    page_ids: list[int] = field(default_factory=list)
    num_shared_tokens: int = 0  # tokens at the front whose KV was there already: it is not to be written again
    shares_tail: bool = False  # a fork began in the page that it writes next
    num_published_pages: int = 0
    num_dropped_pages: int = 0  # at the front, given back as no token to come sees them
    is_stale: bool = False  # some of its KV is of other weights than the engine has now: nobody else may find it
    num_cached_tokens: int | None = None  # found in the prefix cache when it was first started
    num_preemptions: int = 0
    num_swapped_pages: int = 0  # brought back from swap space
    num_page_copies: int = 0  # as it went on in a page that others hold
    num_forks: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)  # of the tokens from `score_from` on, as far as computed
    # The likeliest tokens in the place of each of them, if any are wanted: as `output_tops`.
    prompt_tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    score: float | None = None  # of a sequence that a beam search has found
    candidates: tuple[np.ndarray, np.ndarray] | None = None  # of a beam: ids and log-probabilities of its next token
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None  # the stop id or stop string; None where an end-of-sequence id ended the text
    start_time: float | None = None  # when its first tokens were scheduled
    finish_time: float | None = None

    ending_ids: frozenset[int] = field(init=False)  # ids that end the text, once min_tokens came before them
    num_prompt_tokens: int = field(init=False)
    most_outputs: int = 0  # that there is room for, which the scheduler knows
    order: int = -1  # of arrival, which the scheduler counts
    forks: list[Request] = field(default_factory=list)  # those that wait for its prompt to be computed
    page_keys: list[bytes] = field(default_factory=list)  # of its full pages, as far as anybody asked
    decodes: bool = False  # it is one of the `DecodeRows`
    row: int = -1  # of `RowTable`, while it runs
    block_table: np.ndarray | None = None  # that row of the block tables: `page_ids`, padded

    def __post_init__(self):
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids is empty: give at least one token, such as the model's bos_token_id")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.family is None:
            self.family = self.request_id
        self.num_prompt_tokens = len(self.prompt_token_ids)
        assert self.score_from is None or 0 < self.score_from < self.num_prompt_tokens, "nothing to score"
        if self.parent is not None and not self.num_inherited_tokens:
            self.num_inherited_tokens = self.num_tokens  # a fork begins as its parent is
        eos_token_ids = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self.ending_ids = eos_token_ids | frozenset(self.sampling.stop_token_ids)
        if self.sampling.min_tokens and len(self.ending_ids) > MAX_BANNED_IDS and self.constraint is None:
            raise ValueError(
                f"min_tokens keeps at most {MAX_BANNED_IDS} end-of-sequence and stop ids from being drawn, but there "
                f"are {len(self.ending_ids)}: give fewer stop_token_ids, or min_tokens=0"
            )

    def like(self, request_id: str, **changes: Any) -> Request:
        """A request of which the same is asked, and nothing computed."""
        asked = {name: getattr(self, name) for name in ASKED}
        return Request(request_id, **asked | changes)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def has_computed_prompt(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def first_token_time(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def last_token_time(self) -> float | None:
        return self.token_times[-1] if self.token_times else None

    def token_at(self, position: int) -> int:
        """The token at a position of prompt and output together."""
        index = position - self.num_prompt_tokens
        return self.output_token_ids[index] if index >= 0 else self.prompt_token_ids[position]

    def tokens(self, start: int, stop: int) -> list[int]:
        """The tokens at positions start..stop-1 of prompt and output together."""
        shift = self.num_prompt_tokens
        outputs = self.output_token_ids[max(start - shift, 0) : max(stop - shift, 0)]
        return self.prompt_token_ids[start:stop] + outputs if start < shift else outputs

    def keys(self, start: int, page_size: int) -> Iterator[bytes]:
        """The keys of its full pages from number `start` on: hashes of all tokens up to the end of a page."""
        for page in range(start, self.num_tokens // page_size):
            yield self.key(page, page_size)

    def key(self, page: int, page_size: int) -> bytes:
        """The key of a page that is full of tokens."""
        keys = self.page_keys
        while len(keys) <= page:
            begin = len(keys) * page_size
            before = keys[-1] if keys else blake2b(self.cache_salt, digest_size=16).digest()
            tokens = array("i", self.tokens(begin, begin + page_size)).tobytes()
            keys.append(blake2b(before + tokens, digest_size=16).digest())
        return keys[page]

    def add_pages(self, page_ids: Sequence[int]) -> None:
        assert self.block_table is not None
        held = len(self.page_ids)
        self.block_table[held : held + len(page_ids)] = page_ids
        self.page_ids += page_ids

    def drop_pages(self) -> list[int]:
        """Forgets its pages and what was computed into them; returns them, for the pool."""
        page_ids, self.page_ids = self.page_ids, []
        if self.block_table is not None:
            self.block_table[: len(page_ids)] = 0
        self.num_computed_tokens = self.num_shared_tokens = self.num_published_pages = self.num_dropped_pages = 0
        self.is_stale = self.shares_tail = False
        return page_ids

    def replace_page(self, index: int, page_id: int) -> int:
        """Has `page_id` take the place of one of its pages; returns that one."""
        assert self.block_table is not None
        self.block_table[index] = page_id
        before, self.page_ids[index] = self.page_ids[index], page_id
        return before

    def scored(self, start: int, stop: int) -> range:
        """Of its positions start .. stop - 1 those whose logits score the token that follows."""
        if self.score_from is None:
            return range(0)
        return range(max(start, self.score_from - 1), min(stop, self.num_prompt_tokens - 1))

    @property
    def only_scores(self) -> bool:
        """Whether it ends with its scores."""
        return self.score_from is not None and not self.generates

    @property
    def lacks_scores(self) -> bool:
        return self.score_from is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - self.score_from

    def take_scores(self, start: int, logprobs: Sequence[float]) -> bool:
        """Takes in what its tokens from `start` on say about those that follow; whether all are scored now. After a
        preemption they come again, and replace the earlier ones."""
        assert self.score_from is not None
        scored = self.scored(start, start + len(logprobs))
        known = scored.start - (self.score_from - 1)
        assert known <= len(self.prompt_logprobs), f"{self.request_id} was never told the scores before token {start}"
        self.prompt_logprobs[known:] = logprobs[scored.start - start : scored.stop - start]
        return not self.lacks_scores

    def append(self, token_id: int, logprob: float, now: float) -> None:
        self.output_token_ids.append(token_id)
        self.output_logprobs.append(logprob)
        self.token_times.append(now)

    def drop_half_token(self) -> None:
        """Takes back a token that an interruption has left without its log-probability or its time."""
        each: list[list[Any]] = [self.output_token_ids, self.output_logprobs, self.token_times]
        if self.sampling.num_top_logprobs:
            each.append(self.output_tops)
        kept = min(map(len, each))
        for values in each:
            del values[kept:]

    def num_left(self, max_model_len: int) -> int:
        """Tokens that may still follow, if none ends the text."""
        num_outputs = len(self.output_token_ids)
        return min(self.max_tokens - num_outputs, max_model_len - self.num_prompt_tokens - num_outputs)

    def end(self, max_model_len: int) -> tuple[str, int | None] | None:
        """Whether its last token ended it: (finish_reason, stop_reason), or None to go on."""
        token_id, num_outputs = self.output_token_ids[-1], len(self.output_token_ids)
        # Where a constraint has let it be drawn before min_tokens, nothing else could be.
        may_end = num_outputs > self.sampling.min_tokens or self.constraint is not None
        if token_id in self.ending_ids and may_end:
            return "stop", token_id if token_id in (self.sampling.stop_token_ids or ()) else None
        if self.num_left(max_model_len) <= 0:
            return "length", None
        return None
