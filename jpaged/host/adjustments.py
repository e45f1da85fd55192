"""Owns `Adjustments`: what is changed in the logits of each row before it draws, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .decode_rows import Row
from .request import RequestFailed
from .row_table import ADJUSTED, BIASED, MASKED, PENALIZED, RowTable
from .sampling_params import MAX_BIASED_IDS


class Adjustments(NamedTuple):
    """For B rows of a batch; V is the vocabulary size. Ids that are V are padding. A field that is None is as if no row
    asked for it."""

    # int32 [B, L]: the tokens of the sequence but the last, of rows that ask for it; padded with V.
    history: np.ndarray | None
    prompt_lens: np.ndarray  # int32 [B]
    last_ids: np.ndarray  # int32 [B]: the last tokens
    penalties: np.ndarray  # float32 [B, 3]: repetition, frequency, presence
    bias_ids: np.ndarray | None  # int32 [B, MAX_BIASED_IDS]
    bias: np.ndarray | None  # float32 [B, MAX_BIASED_IDS]
    masks: np.ndarray | None  # uint32 [B, (V + 31) // 32]: a bit for each id, low bits first: whether it may be drawn
    asks: np.ndarray  # bool [B]: whether the row asks for anything
    processed: np.ndarray  # bool [B]: log-probabilities are those of what the row draws from


def none_of(batch_rows: int, history_len: int, vocab_size: int) -> Adjustments:
    """Adjustments that change nothing."""
    return Adjustments(
        history=np.full((batch_rows, history_len), vocab_size, np.int32),
        prompt_lens=np.zeros(batch_rows, np.int32),
        last_ids=np.zeros(batch_rows, np.int32),
        penalties=np.tile(np.array([1, 0, 0], np.float32), (batch_rows, 1)),
        bias_ids=np.full((batch_rows, MAX_BIASED_IDS), vocab_size, np.int32),
        bias=np.zeros((batch_rows, MAX_BIASED_IDS), np.float32),
        masks=np.full((batch_rows, -(-vocab_size // 32)), 2**32 - 1, np.uint32),
        asks=np.zeros(batch_rows, bool),
        processed=np.zeros(batch_rows, bool),
    )


def pack_adjustments(
    rows: Sequence[Row],
    table: RowTable,
    batch_rows: int,
    history_len: int,
    vocab_size: int,
    *,
    ahead: bool = False,
    with_histories: bool = False,
    failures: list[RequestFailed],
) -> Adjustments | None:
    """The adjustments of a batch's rows, in its order; None if no row asks for anything.

    `ahead`: as for `pack`; the caller puts in `last_ids`. `with_histories`: all rows ask for their tokens. `failures`
    gets what is found of requests that cannot go on; what is drawn for them means nothing.
    """
    if not with_histories and not table.kinds.any():
        return None  # as in most steps, of which this must not cost anything
    kinds = table.kinds[np.array([request.row for request, _, _ in rows], np.intp)]
    if with_histories:
        kinds |= np.uint8(PENALIZED)
    adjusted = (kinds & ADJUSTED).nonzero()[0].tolist()
    if not adjusted:
        return None
    packed = none_of(batch_rows, 0, vocab_size)
    history = np.full((batch_rows, history_len), vocab_size, np.int32) if (kinds & PENALIZED).any() else None
    biased, masked = bool((kinds & BIASED).any()), bool((kinds & MASKED).any())
    for index in adjusted:
        request, start, num_tokens = rows[index]
        sampling, kind, end = request.sampling, kinds[index], start + num_tokens
        packed.asks[index] = True
        packed.processed[index] = sampling.logprobs_mode == "processed"
        if kind & PENALIZED:
            assert history is not None
            history[index, : end - 1] = table.history(request, end - 1)
            packed.prompt_lens[index] = request.num_prompt_tokens
            packed.penalties[index] = (
                min(max(sampling.repetition_penalty, 1e-30), 1e30),  # beyond, products with logits have no 32 bits
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
            if not ahead:
                packed.last_ids[index] = request.token_at(end - 1)
        if kind & BIASED:
            assert sampling.logit_bias is not None and packed.bias_ids is not None and packed.bias is not None
            num_biased = len(sampling.logit_bias)
            packed.bias_ids[index, :num_biased] = list(sampling.logit_bias)
            packed.bias[index, :num_biased] = list(sampling.logit_bias.values())
        if kind & MASKED and end >= request.num_tokens:  # else nothing is drawn yet
            assert request.constraint is not None and packed.masks is not None
            try:
                request.constraint.fill(packed.masks[index], request.output_token_ids, ahead)
            except ValueError as error:
                packed.masks[index] = 2**32 - 1
                failures.append(RequestFailed(request.request_id, str(error)))
    return packed._replace(
        history=history,
        bias_ids=packed.bias_ids if biased else None,
        bias=packed.bias if biased else None,
        masks=packed.masks if masked else None,
    )
