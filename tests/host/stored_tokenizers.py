"""The tokenizers of `tests/data/tokenizers`, each made once."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

import tokenizers

from jpaged.host.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@functools.cache
def stored(name: str) -> Any:
    return json.loads(lzma.decompress((DATA / "tokenizers" / f"{name}.json.xz").read_bytes()))


@functools.cache
def smollm2_backend_text() -> str:
    return json.dumps(stored("smollm2"))


@functools.cache
def smollm2() -> Tokenizer:
    """Byte-level BPE."""
    return Tokenizer(
        tokenizers.Tokenizer.from_str(smollm2_backend_text()),
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    )


@functools.cache
def sentencepiece(name: str) -> Tokenizer:
    """ "llama" puts a space before the text, "gemma" doesn't."""
    return Tokenizer.from_gguf(stored(name)["fields"])


@functools.cache
def words(spaced: bool = True) -> Tokenizer:
    """Whole words, which the decoder (WordPiece, or none) puts spaces between."""
    vocab = {"[UNK]": 0, "[SEP]": 1, "[PAD]": 2, "one": 3, "two": 4, "##s": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if spaced:
        backend.decoder = tokenizers.decoders.WordPiece()
    backend.add_special_tokens(["[SEP]", "[PAD]"])
    return Tokenizer(backend, special_tokens={"eos_token": "[SEP]"})


def smollm2_gguf_fields() -> dict[str, Any]:
    """The metadata that a GGUF of SmolLM2 holds."""
    model = stored("smollm2")["model"]
    special = {token["content"] for token in stored("smollm2")["added_tokens"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
