"""Owns log-probabilities as answers show them: tokens as texts, their offsets, the alternatives to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.host.detokenizer import Detokenizer
from jpaged.host.tokenizer import Tokenizer
from jpaged.server.http import LEAST_LOGPROB


class TokenTexts:
    """The tokens of a vocabulary as texts."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False):
        self.tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None

    def raw(self, token_id: int) -> bytes:
        """What it adds to a text, in UTF-8, special tokens as they are written."""
        if self.tokenizer is None:
            return b""
        return self.tokenizer.piece(token_id, skip_special_tokens=False) or b""

    def text(self, token_id: int) -> str:
        """That as a text; where it is a part of a character, its bytes as OpenAI shows them."""
        if self.as_ids:
            return f"token_id:{token_id}"
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """`logprobs` of a completion, part by part.

    The text of a token is what it adds to the text, so that the tokens joined are the text: nothing for a token that
    begins a character, all of it for the one that ends it. A token that the text does not show is written out.
    """

    def __init__(
        self,
        texts: TokenTexts,
        skip_special_tokens: bool,
        prompt_tail: Sequence[int] = (),
        spaces_between_special_tokens: bool | None = None,
    ):
        self._texts = texts
        self._offset = 0
        self._detokenizer = None
        if texts.tokenizer is not None:
            self._detokenizer = Detokenizer(
                texts.tokenizer,
                skip_special_tokens=skip_special_tokens,
                prompt_tail=prompt_tail,
                spaces_between_special_tokens=spaces_between_special_tokens,
            )
        self._skips = skip_special_tokens

    def part(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Mapping[int, float] | None] | None,
        is_last: bool = False,
    ) -> dict[str, Any]:
        """Of the next tokens. `tops`: the likeliest ids in the place of each, None where none are told."""
        tokens, offsets, alternatives = [], [], []
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            offsets.append(self._offset)
            shown = "" if self._detokenizer is None else self._detokenizer.append(token_id)
            if is_last and i == len(token_ids) - 1 and self._detokenizer is not None:
                shown += self._detokenizer.finish()
            self._offset += len(shown)
            own = self._texts.text(token_id)
            hidden = self._texts.tokenizer is None or self._skips and token_id in self._texts.tokenizer.special_ids
            token = own if self._texts.as_ids or hidden else shown
            tokens.append(token)
            alternatives.append(self._alternatives(tops[i] if tops else None, token_id, token or own, logprob))
        values = [None if value is None else finite(value) for value in logprobs]
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": alternatives if tops is not None else None,
        }

    def _alternatives(
        self, top: Mapping[int, float] | None, token_id: int, token: str, logprob: float | None
    ) -> dict[str, float] | None:
        if top is None or logprob is None:
            return None
        found: dict[str, float] = {}
        for other, value in top.items():
            # The same number in both places: clients tell by it that the token is the likeliest.
            found.setdefault(
                *((token, finite(logprob)) if other == token_id else (self._texts.text(other), finite(value)))
            )
        found.setdefault(token, finite(logprob))
        return found


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Mapping[int, float]] | None
) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat's answer: an entry a token, each with its bytes."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": finite(logprob), "bytes": list(texts.raw(token_id))}

    return [
        entry(token_id, logprob)
        | {"top_logprobs": [entry(*pair) for pair in (tops[i].items() if tops is not None else ())]}
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    ]


def prompt_entries(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Mapping[int, float] | None] | None,
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: for each token of a prompt its id and those of the likeliest, None for the first.

    rank: 1 is the likeliest; None for a token that is not among those that were told.
    """
    found: list[dict[str, Any] | None] = []
    for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if logprob is None:
            found.append(None)
            continue
        values: dict[int, float] = dict((tops[i] if tops else None) or {})
        ranks = {other: rank for rank, other in enumerate(values, 1)}
        values[token_id] = logprob
        found.append(
            {
                str(other): {"logprob": finite(value), "rank": ranks.get(other), "decoded_token": texts.text(other)}
                for other, value in values.items()
            }
        )
    return found


def finite(value: float) -> float:
    return value if value > LEAST_LOGPROB else LEAST_LOGPROB
