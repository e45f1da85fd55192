"""Owns `Detokenizer`: generated tokens to text as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from jpaged.host.stop_strings import compile_stop_strings
from jpaged.host.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one request into text, a part with each token.

    Without stop strings, what `append` and `finish` return joins to `tokenizer.decode(all tokens)`. No part ends within
    a character. Where a character was broken off, `finish` shows U+FFFD for it, as `decode` does.

    The text continues the prompt: `prompt_tail` (all of the prompt's tokens, or the last ones) decides whether the
    first token's leading space is shown, for SentencePiece drops it only where a text begins, and a character that
    began in the prompt is shown whole. So `decode(prompt) + text == decode(prompt + output)` if the prompt ends between
    characters.

    Stop strings are looked for in the text, wherever the borders of tokens fall. The one whose last character comes
    first ends the text, and of several that end there the one listed first. The text is cut before it, or after it with
    `include_stop_str_in_output`; nothing of a stop string is returned before it is certain not to be one. A stop string
    counts if the token that completes it is not among the first `min_tokens`; it may begin in those.

    Each token costs the same, however long the text has grown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_tail: Sequence[int] = (),
        spaces_between_special_tokens: bool | None = None,
    ):
        self.stop_hit: str | None = None
        self._tokenizer = tokenizer
        self._stop = compile_stop_strings(tuple(stop)) if stop else None
        self._include_stop = include_stop_str_in_output
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._spaces = spaces_between_special_tokens
        self._before: int | None = None  # the last token that is shown
        self._finished = False
        self._state = 0  # of the automaton
        self._held = ""  # decoded, but may be the beginning of a stop string
        self._parts: list[str] = []
        self._num_chars = 0
        self._broken_off = self._begin_in_prompt(prompt_tail)  # bytes that begin a character

    def _begin_in_prompt(self, prompt_tail: Sequence[int]) -> bytes:
        pieces: list[bytes] = []
        for token_id in reversed(prompt_tail):
            piece = self._tokenizer.piece(token_id, skip_special_tokens=self._skip_special_tokens)
            if piece is not None:
                self._before = token_id if self._before is None else self._before
                pieces.append(piece)
            if sum(map(len, pieces)) >= 3:  # no unfinished character is longer
                break
        tail = b"".join(reversed(pieces))
        return tail[len(tail) - _num_broken_off(tail) :]

    @property
    def num_chars(self) -> int:
        """The length of `text`, without joining it."""
        return self._num_chars

    @property
    def text(self) -> str:
        """All text returned so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def text_between(self, start: int, stop: int) -> str:
        """`text[start:stop]`, at the cost of what comes after `start`."""
        if start == 0:
            return self.text[:stop]
        found, end = [], self._num_chars
        for part in reversed(self._parts):
            if end <= start:
                break
            begin = end - len(part)
            found.append(part[max(start - begin, 0) : max(stop - begin, 0)])
            end = begin
        return "".join(reversed(found))

    def append(self, token_id: int) -> str:
        """The text that the next token makes visible. After a stop string: nothing."""
        if self.stop_hit is not None:
            return ""
        assert not self._finished, "append after finish"
        self._num_tokens += 1
        piece = self._tokenizer.piece(
            token_id, first=self._before is None, skip_special_tokens=self._skip_special_tokens
        )
        if piece is None:
            return ""
        raw = self._broken_off + self._tokenizer.spaced(piece, self._before, token_id, self._spaces)
        self._before = token_id
        border = len(raw) - _num_broken_off(raw)
        self._broken_off = raw[border:]
        return self._show(raw[:border].decode("utf-8", self._tokenizer.utf8_errors))

    def finish(self) -> str:
        """What was held back, now that no token follows. A second call returns nothing."""
        if self._finished or self.stop_hit is not None:
            return ""
        self._finished = True
        visible = self._show(self._broken_off.decode("utf-8", self._tokenizer.utf8_errors))
        held, self._held = self._held, ""
        self._parts.append(held)
        self._num_chars += len(held)
        return visible + held

    def _show(self, new: str) -> str:
        if self._stop is None:
            visible = new
        else:
            visible, self._held = self._split(self._held + new, len(self._held))
        self._parts.append(visible)
        self._num_chars += len(visible)
        return visible

    def _split(self, text: str, num_old: int) -> tuple[str, str]:
        """Cuts the text that isn't visible yet, of which `num_old` characters were examined before, into what may be
        shown and what must wait."""
        stop, state = self._stop, self._state
        assert stop is not None
        counts = self._num_tokens > self._min_tokens
        for i in range(num_old, len(text)):
            state = stop.step(state, text[i])
            index = stop.ending[state]
            if index is not None and counts:
                self.stop_hit = stop.strings[index]
                end = i + 1 if self._include_stop else i + 1 - len(self.stop_hit)
                return text[:end], ""
        self._state = state
        border = len(text) - stop.held[state]
        return text[:border], text[border:]


def _num_broken_off(raw: bytes) -> int:
    """How many bytes at the end begin a character that further bytes may complete.

    Python's incremental decoder is no help: it waits for a third byte after the first two of a surrogate, which are
    broken whatever follows.
    """
    if raw.isascii():
        return 0  # nearly always
    for n in range(1, min(3, len(raw)) + 1):
        lead = raw[-n]
        if 0x80 <= lead < 0xC0:
            continue  # within a character
        length = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 1
        if n >= length:
            return 0
        low, high = _SECOND_BYTES.get(lead, (0x80, 0xBF))
        return n if n == 1 or low <= raw[-n + 1] <= high else 0
    return 0


# No overlong forms, no surrogates, nothing above U+10FFFF (Unicode, table 3-7).
_SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
