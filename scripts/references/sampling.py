"""References of sampling: logits after the processors and warpers of transformers, in the order of `SamplingParams`.

What transformers has no processor for (frequency and presence penalties) is not here.
"""

import json
import pathlib

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 301  # no multiple of the 32 bits of a mask's words
NUM_ROWS = 8
EDGE = 1e-4  # sets of kept ids must not depend on numbers closer than this
ALONE = (
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"logit_bias": {0: 7.5, 17: -100.0, 150: 3.25, 300: 12.0}},
    {"allowed_token_ids": [0, 5, 31, 32, 33, 64, 150, 299, 300]},
    {"bad_words": [[3], [300], [8, 9], [7, 8, 10], [7, 9, 11], [9, 8, 12]]},  # the output ends with 7 and 8
    {"ending_ids": [2, 40, 300], "min_tokens": 7},  # the output has six tokens
    {"ending_ids": [2, 40, 300], "min_tokens": 6},
    {"temperature": 0.35},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.3},
    {"top_p": 0.92},
    {"min_p": 0.02},
    {"min_p": 0.4},
)
NUM_TOGETHER = 15


def write(out: pathlib.Path) -> None:
    """`sampling.npz`. Of case i: `settings[i]`, JSON under the names of `SamplingParams` (bad words as ids;
    `ending_ids`: what `min_tokens` holds back), `prompts[i]` and `outputs[i]` (ids), `logits[rows[i]]`, and what comes
    of them: `adjusted[i]`, the logits before temperature and filters, and `processed[i]`, the log-probabilities after
    them."""
    rng = np.random.default_rng(20)
    logits = (3 * rng.standard_normal((NUM_ROWS, VOCAB))).astype(np.float32)
    cases = [*ALONE, *(together(rng) for _ in range(NUM_TOGETHER))]
    rows = np.arange(len(cases)) % NUM_ROWS
    prompts = rng.integers(0, VOCAB, (len(cases), 10))
    outputs = rng.integers(0, VOCAB, (len(cases), 6))
    outputs[:, 1], outputs[:, -2:] = prompts[:, 0], (7, 8)  # an id of both
    adjusted, processed = [], []
    for case, row, prompt, output in zip(cases, rows, prompts, outputs, strict=True):
        one = torch.from_numpy(logits[row])[None]
        before, after = apply(case, one, prompt.tolist(), output.tolist())
        kept = {name: value for name, value in case.items() if name in ("top_k", "top_p", "min_p")}
        for factor in (1 - EDGE, 1 + EDGE):
            moved = {name: min(value * factor, 1.0) for name, value in kept.items() if name != "top_k"}
            other = apply(case | moved, one, prompt.tolist(), output.tolist())[1]
            assert torch.equal(other.isfinite(), after.isfinite()), case
        adjusted.append(before[0].numpy())
        processed.append(after.log_softmax(-1)[0].numpy())
    np.savez_compressed(
        out / "sampling.npz",
        settings=np.array([json.dumps(case) for case in cases]),
        rows=rows,
        prompts=prompts.astype(np.int32),
        outputs=outputs.astype(np.int32),
        logits=logits,
        adjusted=np.stack(adjusted),
        processed=np.stack(processed),
    )
    print(f"sampling: {len(cases)} cases, of which {sum(np.isfinite(p).sum() < VOCAB for p in processed)} lose ids")


def together(rng: np.random.Generator) -> dict:
    """Some of all settings at once."""
    ids = rng.permutation(VOCAB).tolist()
    every = {
        "repetition_penalty": float(rng.choice([0.8, 1.2, 1.7])),
        "logit_bias": {i: float(rng.normal() * 4) for i in ids[:12]},
        "allowed_token_ids": sorted(ids[:150]),
        "bad_words": [[ids[0]], [ids[1]], [8, ids[2]], [7, 8, ids[3]], [8, 8, ids[4]]],
        "temperature": float(rng.uniform(0.5, 1.8)),
        "top_k": int(rng.integers(5, 120)),
        "top_p": float(rng.uniform(0.5, 0.98)),
        "min_p": float(rng.uniform(0.001, 0.1)),
    }
    chosen = {name: value for name, value in every.items() if rng.random() < 0.65}
    if rng.random() < 0.5:
        chosen |= {"ending_ids": ids[5:9], "min_tokens": int(rng.integers(5, 9))}
    return chosen


def apply(case: dict, logits: torch.Tensor, prompt: list[int], output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits before temperature and filters, and after them."""
    processors: list[tuple[LogitsProcessor, list[int]]] = []
    if "repetition_penalty" in case:
        processors.append((RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]), prompt + output))
    if "logit_bias" in case:
        bias = {(i,): value for i, value in case["logit_bias"].items()}
        processors.append((SequenceBiasLogitsProcessor(bias), prompt + output))
    if "allowed_token_ids" in case:
        others = sorted(set(range(VOCAB)) - set(case["allowed_token_ids"]))
        processors.append((SuppressTokensLogitsProcessor(others, device="cpu"), prompt + output))
    if "bad_words" in case:  # it would look at the prompt too
        processors.append((NoBadWordsLogitsProcessor(case["bad_words"]), output))
    if "min_tokens" in case:
        ending = torch.tensor(case["ending_ids"])
        held = MinNewTokensLengthLogitsProcessor(len(prompt), case["min_tokens"], ending, device="cpu")
        processors.append((held, prompt + output))
    for processor, ids in processors:
        logits = processor(torch.tensor([ids]), logits)
    warped = logits
    for name, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in case:
            warped = warper(case[name])(None, warped)
    return logits, warped
