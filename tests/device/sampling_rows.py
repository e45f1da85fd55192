"""Rows of a batch as dicts, made into what the samplers take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged.host.adjustments import Adjustments
from jpaged.host.batch import SamplingBatch
from jpaged.host.sampling_params import MAX_BANNED_IDS

KINDS = ("repetition", "frequency", "presence")


def batch_of(rows: Sequence[dict[str, Any]], vocab: int) -> SamplingBatch:
    """One row a dict: temperature, top_k, top_p, min_p, seed, banned_ids; what is missing is off."""
    banned = np.full((len(rows), MAX_BANNED_IDS), vocab, np.int32)
    for i, row in enumerate(rows):
        ids = row.get("banned_ids", ())
        banned[i, : len(ids)] = ids
    seeds = np.array([row.get("seed", 0) for row in rows], np.uint64)
    return SamplingBatch(
        np.array([row.get("temperature", 1.0) for row in rows], np.float32),
        np.array([row.get("top_k", 0) for row in rows], np.int32),
        np.array([row.get("top_p", 1.0) for row in rows], np.float32),
        np.array([row.get("min_p", 0.0) for row in rows], np.float32),
        np.stack([seeds >> 32, seeds & 0xFFFFFFFF], 1).astype(np.uint32),
        banned,
    )


def adjustments_of(
    rows: Sequence[dict[str, Any]], masks: Sequence[set[int] | None], vocab: int, history_len: int, num_biased: int
) -> Adjustments:
    """One row a dict: prompt and output (ids), penalties, logit_bias, logprobs_mode. `masks`: the ids that each row may
    draw; None: all."""
    history = np.full((len(rows), history_len), vocab, np.int32)
    bias_ids = np.full((len(rows), num_biased), vocab, np.int32)
    bias = np.zeros((len(rows), num_biased), np.float32)
    words = np.full((len(rows), (vocab + 31) // 32), 2**32 - 1, np.uint32)
    penalties = []
    for i, (row, ids) in enumerate(zip(rows, masks, strict=True)):
        penalties.append([row.get(f"{kind}_penalty", kind == "repetition") for kind in KINDS])
        if penalties[-1] != [1, 0, 0]:
            before = [*row["prompt"], *row["output"]][:-1]
            history[i, : len(before)] = before
        for column, (biased, number) in enumerate((row.get("logit_bias") or {}).items()):
            bias_ids[i, column], bias[i, column] = int(biased), number
        if ids is not None:
            words[i] = [sum((32 * word + bit in ids) << bit for bit in range(32)) for word in range(words.shape[1])]
    return Adjustments(
        history=history,
        prompt_lens=np.array([len(row["prompt"]) for row in rows], np.int32),
        last_ids=np.array([[*row["prompt"], *row["output"]][-1] for row in rows], np.int32),
        penalties=np.array(penalties, np.float32),
        bias_ids=bias_ids,
        bias=bias,
        masks=words,
        asks=np.ones(len(rows), bool),
        processed=np.array([row.get("logprobs_mode") == "processed" for row in rows]),
    )
