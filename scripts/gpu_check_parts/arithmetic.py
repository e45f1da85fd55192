"""Owns what a measured call must at least move and compute. Every share in the results is one of these over a time.

| what             | counted | formula |
|------------------|---------|---------|
| copy             | bytes   | 2 n: each byte is read and written |
| read             | bytes   | n |
| matmul           | FLOPs   | 2 n^3 |
| decode attention | bytes   | 2 S Hkv D b + 2 B H D bq: K and V of S tokens of context, q and the result of B rows |
| attention        | FLOPs   | 4 H D p: two products for each of p pairs of a query and a token that it sees |
| pairs            | p       | n c - n (n - 1) / 2: the last n of c tokens, each sees itself and all before it |
| write_kv         | bytes   | 2 T Hkv D (bn + b): T new keys and values are read (bn bytes a number) and written (b) |
| copy_pages       | bytes   | 4 N Hkv P D b: N pages of P tokens, keys and values, are read and written |
| sample           | bytes   | 4 B V: float32 scores of B rows, read once |
| decode step      | bytes   | w + 2 S L Hkv D b: w bytes of weights, S tokens of context, L layers |
| prefill          | FLOPs   | 2 m T + 4 L H D p: m numbers in the weights of the layers, T tokens |

Left out: of a decode step, a table of embeddings, of which few rows are read; of a prefill, the head, which few tokens
need. A share of bandwidth compares with the measured copy, one of FLOPs with the measured bfloat16 product.
"""

from __future__ import annotations

from collections.abc import Iterable


def copy_bytes(size: int) -> int:
    return 2 * size


def matmul_flops(size: int) -> int:
    return 2 * size**3


def decode_bytes(
    num_seqs: int, context: int, num_q_heads: int, num_kv_heads: int, head_dim: int, kv_size: int, q_size: int = 2
) -> int:
    """`context`: tokens of all rows together. Sizes are bytes a number."""
    return 2 * context * num_kv_heads * head_dim * kv_size + 2 * num_seqs * num_q_heads * head_dim * q_size


def pairs(queries: int, context: int) -> int:
    return queries * context - queries * (queries - 1) // 2


def attention_flops(rows: Iterable[tuple[int, int]], num_q_heads: int, head_dim: int) -> int:
    """`rows`: (queries, tokens of the context, theirs included)."""
    return 4 * num_q_heads * head_dim * sum(pairs(queries, context) for queries, context in rows)


def write_bytes(num_tokens: int, num_kv_heads: int, head_dim: int, new_size: int, kv_size: int) -> int:
    return 2 * num_tokens * num_kv_heads * head_dim * (new_size + kv_size)


def copy_pages_bytes(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, kv_size: int) -> int:
    return 4 * num_pages * num_kv_heads * page_size * head_dim * kv_size


def sample_bytes(num_seqs: int, vocab: int) -> int:
    return 4 * num_seqs * vocab


def step_bytes(weight_bytes: int, context: int, num_layers: int, num_kv_heads: int, head_dim: int, kv_size: int) -> int:
    """`weight_bytes`: without a table of embeddings. `context`: tokens of all rows together."""
    return weight_bytes + 2 * context * num_layers * num_kv_heads * head_dim * kv_size


def prefill_flops(
    layer_numbers: int, rows: list[tuple[int, int]], num_layers: int, num_q_heads: int, head_dim: int
) -> int:
    """`layer_numbers`: in the weights of all layers together. `rows` as in `attention_flops`."""
    tokens = sum(queries for queries, _ in rows)
    return 2 * layer_numbers * tokens + num_layers * attention_flops(rows, num_q_heads, head_dim)
