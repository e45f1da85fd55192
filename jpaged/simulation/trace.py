"""Owns the traces of the memory study: how long prompts and outputs are, from published statistics and a seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_LEN = 2048  # tokens, prompt and output together


class Lengths(NamedTuple):
    """One request."""

    prompt: int
    output: int

    @property
    def num_slots(self) -> int:
        """Slots that it has filled when it ends: the token drawn last is never written."""
        return self.prompt + self.output - 1


class TraceSpec(NamedTuple):
    """Mean tokens of prompts and outputs, and the sigma of the log-normal distribution that each is drawn from."""

    name: str
    prompt_mean: float
    output_mean: float
    prompt_sigma: float
    output_sigma: float


# The means are those of Kwon et al. 2023, figure 11 (arXiv:2309.06180). The paper does not publish the spreads:
# - ShareGPT's outputs: by its figure 2, a slot of 2048 tokens under Orca (Max) has 20.4 : 13.3 : 57.3 shares of tokens,
#   of room for tokens to come, and of room never used: 459, 299 and 1290 slots. At a random moment the tokens to come
#   are E[output^2] / (2 E[output]); with 299 and the mean, that is a sigma of 0.8 with the cut at 2048.
# - All others are assumed: heavy tails for ShareGPT's prompts, which are chats and pasted texts, and for Alpaca's
#   outputs; a narrow one for Alpaca's one-line instructions.
SHAREGPT = TraceSpec("ShareGPT", 161.31, 337.99, 1.2, 0.8)
ALPACA = TraceSpec("Alpaca", 19.31, 58.45, 0.5, 1.0)


def draw_trace(spec: TraceSpec, num_tokens: int, seed: int) -> list[Lengths]:
    """Requests of about `num_tokens` tokens together, prompts and outputs log-normal and independent.

    What is longer than half of MAX_LEN of a prompt, and than MAX_LEN of both together, is cut off. The location of the
    distributions is set so that the trace itself has the published means.
    """
    num_requests = max(round(num_tokens / (spec.prompt_mean + spec.output_mean)), 1)
    normal = np.random.default_rng(seed).standard_normal((2, num_requests))
    prompts = _log_normal(normal[0], spec.prompt_mean, spec.prompt_sigma, np.full(num_requests, MAX_LEN // 2))
    outputs = _log_normal(normal[1], spec.output_mean, spec.output_sigma, MAX_LEN - prompts)
    return [Lengths(*pair) for pair in zip(prompts.tolist(), outputs.tolist())]


def mixed_trace(num_requests: int, seed: int) -> list[Lengths]:
    """Prompts of 16 to 256 tokens; half of the outputs are short (16 to 64 tokens), half are long (256 to 512)."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(16, 257, num_requests)
    short, long = rng.integers(16, 65, num_requests), rng.integers(256, 513, num_requests)
    outputs = np.where(rng.permutation(num_requests) % 2, short, long)
    return [Lengths(*pair) for pair in zip(prompts.tolist(), outputs.tolist())]


def _log_normal(normal: np.ndarray, mean: float, sigma: float, highest: np.ndarray) -> np.ndarray:
    """Whole numbers from 1 to `highest`, log-normal with this sigma, of this mean after rounding and cutting."""
    location = np.log(mean) - sigma**2 / 2
    for _ in range(20):
        values = np.clip(np.rint(np.exp(location + sigma * normal)), 1, highest).astype(int)
        location += np.log(mean / values.mean())
    return values
