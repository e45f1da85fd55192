"""Owns `Tokenizer`: text to token ids and back, from a model's directory or from GGUF metadata."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from jpaged.host import chat, gguf_tokenizer

# Characters, from which on a text is encoded without holding Python's lock, for other threads to go on meanwhile.
_LONG_TEXT = 4096
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders under which the text of a token depends on nothing but whether it comes first, so that text can be streamed.
_DECODERS = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


# Byte fallback shows each byte that is no part of a character as one U+FFFD; byte-level BPE one for a broken character.
codecs.register_error("jpaged.replace_each_byte", _replace_each_byte)


class Tokenizer:
    """Text to token ids and back; wraps a `tokenizers.Tokenizer`, which must not be changed afterwards.

    `special_tokens` maps names (`bos_token`, ...) to their text; `chat_templates` maps names to Jinja sources, of which
    "default" is the usual one. Two tokenizers are equal if they do the same: weights loaded twice are then trees of one
    structure.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ):
        # A file may hold the settings of a training run: a silent cut at 512 tokens, for one.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        given = eos_token_ids if eos_token_ids is not None else [] if eos is None else [eos]
        self.eos_token_ids: frozenset[int] = frozenset(given)
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        kinds = _decoder_kinds(backend.decoder)
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        # These put a space between words, which is part of no token.
        self._puts_spaces = not kinds or "WordPiece" in kinds
        self.utf8_errors = "jpaged.replace_each_byte" if self._byte_fallback else "replace"
        self._pieces: dict[int, bytes | None] = {}

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @classmethod
    def from_directory(cls, path: str | pathlib.Path) -> Tokenizer | None:
        """The tokenizer of a published model's directory, from `tokenizer.json` and the files beside it; None if the
        directory holds no tokenizer.

        Whether `encode` adds a beginning-of-sequence token is what `tokenizer.json` says; `add_bos_token` and
        `add_eos_token` of `tokenizer_config.json` count where it says nothing.

        Raises ValueError for a tokenizer in another format.
        """
        path = pathlib.Path(path)
        if not (path / "tokenizer.json").is_file():
            for other in ("tokenizer.model", "vocab.json", "tekken.json"):
                if (path / other).is_file():
                    raise ValueError(
                        f"{path} has {other} but no tokenizer.json; write one with transformers: "
                        "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
                    )
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library has no exception of its own
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read ({error}): download it again") from error
        config = _read_json(path / "tokenizer_config.json")
        special = _special_tokens(_read_json(path / "special_tokens_map.json") | config)
        known = {t.content for t in backend.get_added_tokens_decoder().values()}
        missing = [t for t in special.values() if t not in known and backend.token_to_id(t) is not None]
        backend.add_special_tokens(missing)
        if backend.post_processor is None:
            bos, eos = (special.get(name) if config.get(f"add_{name}") else None for name in ("bos_token", "eos_token"))
            gguf_tokenizer.add_bos_eos(backend, _with_id(backend, bos), _with_id(backend, eos))
        return cls(backend, special_tokens=special, chat_templates=_chat_templates(path, config))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer in a GGUF file's metadata, given as a dict from key to plain Python value.

        Raises ValueError for a kind of tokenizer that is not known.
        """
        built = gguf_tokenizer.build(fields)
        return cls(
            built.backend,
            special_tokens=built.special_tokens,
            eos_token_ids=built.eos_token_ids,
            chat_templates=built.chat_templates,
        )

    @functools.cached_property
    def _digest(self) -> bytes:
        rest = [sorted(self.special_tokens.items()), sorted(self.eos_token_ids), sorted(self.chat_templates.items())]
        return hashlib.sha256((self._backend.to_str() + json.dumps(rest)).encode()).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        return self is other or self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def chat_template(self) -> str | None:
        """The default template's source; None if the model has none."""
        return self.chat_templates.get("default")

    def with_chat_template(self, template: str) -> Tokenizer:
        """The same tokenizer with this template, and no other."""
        return Tokenizer(
            self._backend,
            special_tokens=self.special_tokens,
            eos_token_ids=self.eos_token_ids,
            chat_templates={"default": template},
        )

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which are no part of a text."""
        return self._special_ids

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included. A model may have more rows than that."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Special tokens written out in it ("<|im_end|>") become their ids; with
        `add_special_tokens` those that the model expects around every text are added.

        Raises ValueError for anything that cannot be written as UTF-8.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        try:
            if len(text) > _LONG_TEXT:
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            lone = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
            raise ValueError(
                f"character {lone} of the text is half of a surrogate pair (U+{ord(text[lone]):04X}); "
                "join the pair or drop it"
            ) from None

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that goes on from another one: without special tokens around it, and without the space that
        most SentencePiece models put in front of a text.

        Raises ValueError for anything that cannot be written as UTF-8.
        """
        if not self._puts_space_in_front:
            return self.encode(text, add_special_tokens=False)
        for before in ("\n", "|", "0"):
            ids, shown = (self.encode(part, add_special_tokens=False) for part in (before + text, before))
            if ids[: len(shown)] == shown:  # no token spans the border
                return ids[len(shown) :]
        raise ValueError(f"the tokenizer has no ids for {text!r} that could follow any text: give token ids")

    @functools.cached_property
    def _puts_space_in_front(self) -> bool:
        ids = self.encode("a", add_special_tokens=False)
        return b"".join(self.piece(i) or b"" for i in ids).startswith(b" ")

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool | None = None,
    ) -> str:
        """The text of the ids. Bytes that are no UTF-8 show as U+FFFD; ids without a token show as nothing.
        `SamplingParams` says what the two options do.

        Unlike `tokenizers`, which for SentencePiece drops every character spelled in bytes that touches a broken one,
        this keeps the whole ones, as SentencePiece does.
        """
        pieces: list[bytes] = []
        before = None
        for token_id in token_ids:
            piece = self.piece(token_id, first=before is None, skip_special_tokens=skip_special_tokens)
            if piece is not None:
                pieces.append(self.spaced(piece, before, token_id, spaces_between_special_tokens))
                before = token_id
        return b"".join(pieces).decode("utf-8", self.utf8_errors)

    def piece(self, token_id: int, *, first: bool = False, skip_special_tokens: bool = True) -> bytes | None:
        """What a token adds to a text, in UTF-8 (a token may hold a part of a character); None if it isn't shown.

        `first`: no token before it is shown. Most SentencePiece models take the leading space off the first one.
        """
        if skip_special_tokens and token_id in self._special_ids:
            return None
        if first and not self._byte_level:
            return self._first_piece(token_id)
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self._make_piece(token_id)
            return piece

    def spaced(self, piece: bytes, before: int | None, token_id: int, spaces: bool | None) -> bytes:
        """A token's `piece` as it is shown after the token `before` (None: as the first): if either is special, with or
        without a space in front."""
        if spaces is None or before is None or self._special_ids.isdisjoint((before, token_id)):
            return piece
        if spaces:
            return piece if piece.startswith(b" ") else b" " + piece
        return piece.removeprefix(b" ") if self._puts_spaces else piece

    def _token(self, token_id: int) -> str | None:
        try:
            return self._backend.id_to_token(token_id) or None
        except (OverflowError, TypeError):
            raise ValueError(f"a token id must be a whole number from 0 to 2**32 - 1, got {token_id!r}") from None

    def _make_piece(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        if token is None:
            return None
        if self._byte_level:
            try:
                return bytes(map(_byte_of_char().__getitem__, token))
            except KeyError:
                return token.encode()  # an added token, kept as it is written
        byte = self._fallback_byte(token)
        if byte is not None:
            return byte
        context, before = self._context
        text = self._backend.decode([context, token_id], skip_special_tokens=False)
        assert text.startswith(before), f"the decoder changes earlier text: {before!r} became {text!r}"
        return text[len(before) :].encode()

    def _first_piece(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        if token is None:
            return None
        byte = self._fallback_byte(token)
        if byte is not None and byte >= b"\x80":
            return byte
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _fallback_byte(self, token: str) -> bytes | None:
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(match[1]) if match else None

    @functools.cached_property
    def _context(self) -> tuple[int, str]:
        """A token to stand before another, and its text."""
        for i in range(self.vocab_size):
            if i not in self._special_ids and (token := self._token(i)) and self._fallback_byte(token) is None:
                text = self._backend.decode([i], skip_special_tokens=False)
                if text.strip() and text.isascii():
                    return i, text
        raise ValueError("the tokenizer has no token of plain text")

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a chat (a list of dicts with `role` and `content`), with the start of the assistant's answer if
        `add_generation_prompt`. `variables` are what the model's template reads beside (`tools`, `enable_thinking`).

        Raises ValueError: no template, a message of another shape, an unknown variable, the template's own complaint.
        """
        name = "tool_use" if variables.get("tools") and "tool_use" in self.chat_templates else "default"
        template = self.chat_templates.get(name)
        if template is None:
            named = f" named 'default' (but: {', '.join(sorted(self.chat_templates))})" if self.chat_templates else ""
            raise ValueError(
                f"the model has no chat template{named}: give the prompt as text, or put a chat_template.jinja beside "
                "tokenizer.json"
            )
        return chat.render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
            variables=variables,
        )

    def encode_chat(self, messages: Any, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """The ids of a chat. The template writes every special token, so none is added (no second BOS)."""
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself, or the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _decoder_kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of its parts. Raises ValueError for one that looks at more than one token."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    unknown = kinds - _DECODERS | {"Strip at the end" for part in parts if part["type"] == "Strip" and part["stop"]}
    if unknown:
        raise ValueError(f"the tokenizer's decoder is not supported: {', '.join(sorted(unknown))}")
    return kinds


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name to text; the files write a token as a string or as an object with `content`."""
    found = {}
    for name in _NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str) and token:
            found[name] = token
    return found


def _with_id(backend: tokenizers.Tokenizer, token: str | None) -> tuple[str, int] | None:
    token_id = None if token is None else backend.token_to_id(token)
    return None if token is None or token_id is None else (token, token_id)


def _chat_templates(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name to source. A file of its own wins over what `tokenizer_config.json` says."""
    stored = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(stored, list):
        found = {entry["name"]: entry["template"] for entry in stored}
    else:
        found = {"default": stored} if stored else {}
    for file in sorted(path.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    return found
