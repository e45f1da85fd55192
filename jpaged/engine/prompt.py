"""Owns what a prompt may be: text, token ids, or chat messages, checked and turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.host.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def to_token_ids(prompt: Any, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str | None, list[int]]:
    """The prompt's text (None where token ids were given) and its token ids.

    Raises ValueError for an empty prompt, an id outside the vocabulary, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("the prompt is empty: give at least one character, or token ids")
        return prompt, _encoded(_need(tokenizer).encode(prompt), vocab_size)
    if hasattr(prompt, "__array__"):
        array = np.asarray(prompt)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"a prompt as an array must be whole numbers [length], got {array.dtype} of shape {array.shape}"
            )
        prompt = array.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise ValueError(
            f"a prompt must be text, a list of token ids or a list of messages, got {type(prompt).__name__}"
        )
    if not len(prompt):
        raise ValueError("the prompt is empty: give at least one token id or message")
    if isinstance(prompt[0], Mapping):
        tokenizer = _need(tokenizer)
        text = tokenizer.apply_chat_template(prompt)
        # The template writes the beginning-of-sequence token itself, where the model wants one.
        return text, _encoded(tokenizer.encode(text, add_special_tokens=False), vocab_size)
    token_ids = []
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise ValueError(f"token ids must be whole numbers, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary, which has ids 0 to {vocab_size - 1}")
        token_ids.append(int(token_id))
    return None, token_ids


def continuation_ids(continuation: Any, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """The token ids of what goes on from other tokens: text or token ids.

    Raises ValueError as `to_token_ids`, and for chat messages.
    """
    if isinstance(continuation, str):
        if not continuation:
            raise ValueError("the continuation is empty: give at least one character or token id")
        return _encoded(_need(tokenizer).encode_continuation(continuation), vocab_size)
    if not isinstance(continuation, Sequence) and not hasattr(continuation, "__array__"):
        raise ValueError(f"a continuation must be text or token ids, got {continuation!r}")
    if isinstance(continuation, Sequence) and not len(continuation):
        raise ValueError("the continuation is empty: give at least one character or token id")
    if isinstance(continuation, Sequence) and isinstance(continuation[0], Mapping):
        raise ValueError("a continuation must be text or token ids, got messages: a session can only begin with them")
    return to_token_ids(continuation, tokenizer, vocab_size)[1]


def _need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise ValueError("these params have no tokenizer, so a prompt must be a list of token ids")
    return tokenizer


def _encoded(token_ids: list[int], vocab_size: int) -> list[int]:
    if not token_ids:
        raise ValueError("the prompt is empty: the tokenizer made no token of it")
    if max(token_ids) >= vocab_size:
        raise ValueError(
            f"the tokenizer made token id {max(token_ids)} of the prompt, but the model's vocabulary has ids 0 to "
            f"{vocab_size - 1}: take weights and tokenizer from one checkpoint"
        )
    return token_ids
