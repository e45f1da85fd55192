"""Owns `Batch`, the one value that crosses to the device; `Buckets`, the shapes it may have; and `pack`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .decode_rows import DecodeStep, Row
from .row_table import SAMPLING_FIELDS, SAMPLING_ROW, RowTable
from .sampling_params import MAX_BANNED_IDS

MIN_MIXED_TOKENS = 16
STEP_COST = 32  # in tokens: about the time in which a step reads the weights
FEW_SEQS, FEW_TOKENS = 8, 512  # where so few tokens are computed, scores over the vocabulary for all rows would show


class SamplingBatch(NamedTuple):
    """How each row draws. Padding rows are greedy."""

    temperature: np.ndarray  # float32 [B]; 0: greedy
    top_k: np.ndarray  # int32 [B]; 0: no limit
    top_p: np.ndarray  # float32 [B]
    min_p: np.ndarray  # float32 [B]
    seed: np.ndarray  # uint32 [B, 2]: the high and the low half
    banned_ids: np.ndarray  # int32 [B, MAX_BANNED_IDS]: not to be drawn (min_tokens); padded with the vocabulary size


class Batch(NamedTuple):
    """A step's input: T tokens of B rows, both padded to a shape of `Buckets`; P pages a row.

    Padding tokens are written to slot 0, in the null page; padding rows see no context. Without `query_starts` it is a
    decode batch: T == B, each row has one token and draws the next one.
    """

    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    slot_mapping: np.ndarray  # int32 [T]: page_id * page_size + offset, where a token's KV is written
    block_tables: np.ndarray  # int32 [B, P]: page ids, padded with the null page
    context_lens: np.ndarray  # int32 [B]: what the row's last token sees, this step's tokens included
    query_starts: np.ndarray | None  # int32 [B + 1]: row i's tokens are query_starts[i] : query_starts[i + 1]
    sampling: SamplingBatch
    # int32 [T]: tokens of the sequence when this one was first computed. Only rotary embeddings whose base follows the
    # length (dynamic scaling) ask for it; None otherwise.
    rope_lens: np.ndarray | None = None
    # int32 [T]: for each token, the one that follows it in its row and whose log-probability is wanted, or -1. None in
    # decode batches, and where the engine was built without `prompt_logprobs`.
    targets: np.ndarray | None = None


class Buckets(NamedTuple):
    """The shapes that a batch may have: few, as each is a compilation; close, as padding is wasted work."""

    decode: tuple[int, ...]  # numbers of rows, ascending
    mixed: tuple[tuple[int, int], ...]  # (tokens, rows), ascending
    mixed_tokens: tuple[int, ...]  # the numbers of tokens in `mixed`
    pages_per_seq: int
    page_size: int

    @classmethod
    def make(cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int) -> Buckets:
        """Shapes for everything that a scheduler with these limits can plan.

        Decode rows are padded by at most a quarter from 64 rows on. Numbers of mixed tokens double: `step_size` keeps
        their padding low.
        """
        max_rows = min(max_num_seqs, max_num_batched_tokens)
        decode = [1, 2, 4, 8, 12, 16]
        while decode[-1] < max_rows:
            decode.append(decode[-1] + max(8, _power_of_two_below(decode[-1]) // 4))
        max_tokens = -(-max_num_batched_tokens // MIN_MIXED_TOKENS) * MIN_MIXED_TOKENS
        mixed_tokens = _capped([MIN_MIXED_TOKENS << i for i in range(max_tokens.bit_length())], max_tokens)
        return cls(
            decode=_capped(decode, max_rows),
            mixed=tuple(
                (num_tokens, num_seqs)
                for num_tokens in mixed_tokens
                for num_seqs in sorted({min(FEW_SEQS, max_rows), min(num_tokens, max_rows)})
                if num_seqs > FEW_SEQS or num_tokens <= FEW_TOKENS or max_rows <= FEW_SEQS
            ),
            mixed_tokens=mixed_tokens,
            pages_per_seq=-(-max_model_len // page_size),
            page_size=page_size,
        )

    def decode_rows(self, num_seqs: int) -> int:
        """The least number of rows of a decode batch that holds `num_seqs`."""
        return self.decode[bisect_left(self.decode, num_seqs)]

    def mixed_shape(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """The least (tokens, rows) of a mixed batch that holds `num_seqs` rows of `num_tokens` tokens together."""
        return next(shape for shape in self.mixed if shape[0] >= num_tokens and shape[1] >= num_seqs)

    def step_size(self, num_tokens: int) -> int:
        """How many of a mixed batch's tokens to compute in this step: fewer than all where this step and the next one
        waste less padding than one step of the next larger shape, and the cost of a step of its own too."""
        sizes = self.mixed_tokens
        larger = bisect_left(sizes, num_tokens)
        if larger == 0:
            return num_tokens
        filled = sizes[larger - 1]
        rest = sizes[bisect_left(sizes, num_tokens - filled)]
        return filled if filled + rest + STEP_COST < sizes[larger] else num_tokens

    @property
    def copies(self) -> tuple[int, ...]:
        """Numbers of pages that may be copied before a step, at most one a row."""
        return _capped([4**i for i in range(1, self.decode[-1].bit_length())], self.decode[-1])

    def all_shapes(self) -> list[tuple[int, int, bool]]:
        """Every (tokens, rows, whether a decode batch), for warm-up; the most used first."""
        return [(rows, rows, True) for rows in self.decode] + [(*shape, False) for shape in self.mixed]

    def largest_shapes(self) -> list[tuple[int, int, bool]]:
        """Those of `all_shapes` that can take the most memory."""
        return [(self.decode[-1], self.decode[-1], True), (*self.mixed[-1], False)]


def pack(
    rows: Sequence[Row],
    table: RowTable,
    buckets: Buckets,
    vocab_size: int,
    *,
    decoding: DecodeStep | None = None,
    with_rope_lens: bool = False,
    with_targets: bool = False,
    ahead: bool = False,
) -> tuple[Batch, list[Row]]:
    """The step's arrays, and the rows in their order: those with one token come first.

    `ahead`: a decode step whose tokens the step before has not delivered yet; the caller puts them in.
    The arrays are fresh: the device may still read those of earlier steps.
    """
    num_known = 0 if decoding is None else len(decoding.starts)
    others = sorted(rows[num_known:], key=_has_more_than_one_token)
    rows = [*rows[:num_known], *others]
    in_table = np.array([request.row for request, _, _ in others], np.intp)
    starts = np.array([start for _, start, _ in others], np.int32)
    lens = np.array([num_tokens for _, _, num_tokens in others], np.int32)
    reach = np.array([request.num_tokens for request, _, _ in others], np.int32)
    shared = np.array([request.num_shared_tokens for request, _, _ in others], np.int32)
    decodes = ahead or bool(np.all(lens == 1) and np.all(starts + 1 == reach))
    if decoding is not None:
        in_table = np.concatenate([decoding.in_table, in_table])
        starts = np.concatenate([decoding.starts, starts])
        lens = np.concatenate([np.ones(num_known, np.int32), lens])
    num_seqs, num_tokens, ends = len(rows), int(lens.sum()), starts + lens
    if decodes:
        batch_tokens = batch_rows = buckets.decode_rows(num_seqs)
    else:
        batch_tokens, batch_rows = buckets.mixed_shape(num_tokens, num_seqs)

    block_tables = np.zeros((batch_rows, buckets.pages_per_seq), np.int32)
    most_pages = -(-int(ends.max()) // buckets.page_size)
    if 2 * most_pages > buckets.pages_per_seq:
        np.take(table.block_tables, in_table, axis=0, out=block_tables[:num_seqs], mode="clip")
    else:  # what takes the time is to write memory that was not there before
        block_tables[:num_seqs, :most_pages] = table.block_tables[in_table, :most_pages]
    context_lens = np.zeros(batch_rows, np.int32)
    context_lens[:num_seqs] = ends
    query_starts = np.full(batch_rows + 1, num_tokens, np.int32)
    query_starts[0] = 0
    np.cumsum(lens, out=query_starts[1 : num_seqs + 1])

    token_ids, positions, slot_mapping = np.zeros((3, batch_tokens), np.int32)
    if not ahead:
        if decoding is not None:
            assert decoding.token_ids is not None
            token_ids[:num_known] = decoding.token_ids
        token_ids[num_known:num_tokens] = _token_ids(others)
    row_of_token = np.repeat(np.arange(num_seqs), lens)
    position = np.arange(num_tokens, dtype=np.int32) + (starts - query_starts[:num_seqs])[row_of_token]
    page, offset = np.divmod(position, buckets.page_size)
    positions[:num_tokens] = position
    slot_mapping[:num_tokens] = block_tables[row_of_token, page] * buckets.page_size + offset
    # The KV of a token that is computed once more is there, maybe in a page of others.
    if np.any(shared > starts[num_known:]):
        shared = np.concatenate([np.zeros(num_known, np.int32), shared])
        slot_mapping[:num_tokens][position < shared[row_of_token]] = 0

    rope_lens = None
    if with_rope_lens:
        # A prompt is computed as a whole, whatever chunks it comes in, and its output token by token.
        rope_lens = np.zeros(batch_tokens, np.int32)
        prompt_lens = np.array([request.num_prompt_tokens for request, _, _ in rows], np.int32)
        rope_lens[:num_tokens] = np.maximum(position + 1, prompt_lens[row_of_token])
    return (
        Batch(
            token_ids,
            positions,
            slot_mapping,
            block_tables,
            context_lens,
            None if decodes else query_starts,
            _pack_sampling(rows, in_table, table, batch_rows, vocab_size, ahead),
            rope_lens,
            _targets(rows, query_starts, batch_tokens) if with_targets and not decodes else None,
        ),
        rows,
    )


def pack_copies(page_copies: Sequence[tuple[int, int]], buckets: Buckets) -> np.ndarray:
    """The pages to copy as int32 [C, 2], padded with copies of the null page to itself."""
    packed = np.zeros((buckets.copies[bisect_left(buckets.copies, len(page_copies))], 2), np.int32)
    packed[: len(page_copies)] = page_copies
    return packed


def _token_ids(rows: list[Row]) -> list[int]:
    token_ids = []
    for request, start, length in rows:
        token_ids += request.tokens(start, start + length)
    return token_ids


def _targets(rows: list[Row], query_starts: np.ndarray, batch_tokens: int) -> np.ndarray:
    targets = np.full(batch_tokens, -1, np.int32)
    for (request, start, length), first in zip(rows, query_starts.tolist(), strict=False):
        scored = request.scored(start, start + length)
        if scored:
            at = first + scored.start - start
            targets[at : at + len(scored)] = request.prompt_token_ids[scored.start + 1 : scored.stop + 1]
    return targets


def _pack_sampling(
    rows: list[Row], in_table: np.ndarray, table: RowTable, batch_rows: int, vocab_size: int, ahead: bool
) -> SamplingBatch:
    sampling = np.zeros(batch_rows, SAMPLING_ROW)
    sampling["top_p"] = 1
    sampling[: len(rows)] = table.sampling[in_table]
    banned_ids = np.full((batch_rows, MAX_BANNED_IDS), vocab_size, np.int32)
    for row in table.min_tokens[in_table].nonzero()[0].tolist():
        request = rows[row][0]
        if len(request.output_token_ids) + ahead < request.sampling.min_tokens:
            banned_ids[row, : len(request.ending_ids)] = sorted(request.ending_ids)
    temperature, top_k, top_p, min_p, seed = (np.ascontiguousarray(sampling[name]) for name in SAMPLING_FIELDS)
    return SamplingBatch(temperature, top_k, top_p, min_p, seed, banned_ids)


def _has_more_than_one_token(row: Row) -> bool:
    return row[2] > 1


def _power_of_two_below(n: int) -> int:
    return 1 << n.bit_length() - 1


def _capped(sizes: list[int], most: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)
