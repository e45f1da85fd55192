"""Owns `RowTable`: what packing reads of the running requests, in arrays of which each has a row."""

from __future__ import annotations

import numpy as np

from .request import Request

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed")
SAMPLING_ROW = np.dtype(list(zip(SAMPLING_FIELDS, ("<f4", "<i4", "<f4", "<f4", "2<u4"), strict=True)))
FLOAT32 = np.finfo(np.float32)
# What a row asks for beside its draw: bits of `RowTable.kinds`.
# TOLD: of the likeliest tokens, or of processed log-probabilities. PROCESSED: by a function on the host.
PENALIZED, BIASED, MASKED, TOLD, PROCESSED = 1, 2, 4, 8, 16
ADJUSTED = PENALIZED | BIASED | MASKED | TOLD | PROCESSED


class RowTable:
    """A step's arrays are gathered from these at once, however many requests there are: to go from object to object
    takes longer than anything else that the host does. A request keeps its row for as long as it runs."""

    def __init__(self, num_rows: int, pages_per_seq: int):
        self.block_tables = np.zeros((num_rows, pages_per_seq), np.int32)  # page ids, padded with the null page
        self.sampling = np.zeros(num_rows, SAMPLING_ROW)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.kinds = np.zeros(num_rows, np.uint8)
        self._histories: dict[int, np.ndarray] = {}  # of rows with penalties: their tokens, as far as anybody asked
        self._num_known: dict[int, int] = {}
        self.clear()

    def clear(self) -> None:
        """Takes all rows back, whoever has them."""
        self.block_tables[:] = 0
        self._free = list(range(len(self.block_tables)))
        self._num_known.clear()
        self.kinds[:] = 0

    def take(self, request: Request) -> None:
        """Gives a request a row. What 32 bits can't tell of its sampling is clamped, not rounded to a value with
        another meaning (a tiny top_p to 0, a huge temperature to infinity)."""
        row = request.row = self._free.pop()
        request.block_table = self.block_tables[row]
        sampling = request.sampling
        self.sampling[row] = (
            min(sampling.temperature, float(FLOAT32.max)),
            min(max(sampling.top_k, 0), 2**31 - 1),
            max(sampling.top_p, float(FLOAT32.tiny)),
            sampling.min_p,
            (request.seed >> 32 & 0xFFFFFFFF, request.seed & 0xFFFFFFFF),
        )
        # Where masks say what may be drawn, they say it of the ids that end the text, too.
        self.min_tokens[row] = 0 if request.constraint is not None else min(sampling.min_tokens, 2**63 - 1)
        self.kinds[row] = (
            PENALIZED * sampling.has_penalties
            | BIASED * (sampling.logit_bias is not None)
            | MASKED * (request.constraint is not None)
            | PROCESSED * (sampling.logits_processor is not None)
            | TOLD * (sampling.num_top_logprobs != 0 or sampling.is_processed)
        )

    def give_back(self, request: Request) -> None:
        """Takes a request's row from it, if it has one, for the next."""
        if request.block_table is not None:
            request.block_table[:] = 0
            self._free.append(request.row)
            self._num_known.pop(request.row, None)
            self.kinds[request.row] = 0
            request.block_table = None

    def history(self, request: Request, num_tokens: int) -> np.ndarray:
        """The first tokens of a request that has a row: int32 [num_tokens]."""
        row = request.row
        known = self._num_known.get(row, 0)
        tokens = self._histories.get(row)
        if tokens is None or len(tokens) < num_tokens:
            grown = np.zeros(2 * num_tokens, np.int32)
            if tokens is not None:
                grown[:known] = tokens[:known]
            tokens = self._histories[row] = grown
        if known < num_tokens:
            tokens[known:num_tokens] = request.tokens(known, num_tokens)
            self._num_known[row] = num_tokens
        return tokens[:num_tokens]
