"""Attention written from its definition, in float64: what the kernels are held to. Knows nothing of pages."""

from __future__ import annotations

import numpy as np


def attention(q, k, v, *, scale, sliding_window=None, soft_cap=None, sinks=None) -> tuple[np.ndarray, np.ndarray]:
    """The results for the queries of one row, and the sum of their weights times |v|, the measure of rounding errors.

    q: [queries, num_q_heads, head_dim], the last of the row's tokens. k, v: [tokens, num_kv_heads, head_dim], all of
    its tokens in order.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    out, magnitude = np.zeros_like(q), np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        end = len(k) - len(q) + i + 1
        begin = 0 if sliding_window is None else max(0, end - sliding_window)
        for head in range(q.shape[1]):
            scores = k[begin:end, head // group] @ q[i, head] * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            sink = -np.inf if sinks is None else float(sinks[head])  # a score without a value
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            weights /= weights.sum() + np.exp(sink - top)
            out[i, head] = weights @ v[begin:end, head // group]
            magnitude[i, head] = weights @ np.abs(v[begin:end, head // group])
    return out, magnitude
