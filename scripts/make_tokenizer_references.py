"""Regenerate `tests/data/tokenizers`: the tokenizers that the tests use, with references by SentencePiece.

How to run, in the environment of `make_references.py` with sentencepiece 0.2.3 added:

    refs/bin/python scripts/make_tokenizer_references.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

- `smollm2.json.xz`: the `tokenizer.json` of that model (the strings it is tested on are in `smollm2_tokenizer.json`);
- `llama.json.xz`, `gemma.json.xz`: two small SentencePiece BPE models, trained here on the documentation that comes
  with Python 3.11: one puts a space before the text as Llama's does, the other has user-defined pieces and adds no
  space, as Gemma's. Each holds `fields` (GGUF metadata), `strings` (text and SentencePiece's ids) and `broken` (random
  ids, many of them bytes, and SentencePiece's text).
"""

import argparse
import io
import json
import lzma
import pathlib
import pydoc_data.topics
import random

import gguf
import sentencepiece
from references.smollm2 import build_tokenizer
from references.texts import STRINGS

OUT = pathlib.Path(__file__).parents[1] / "tests" / "data" / "tokenizers"
USER_DEFINED = ["▁▁", "▁▁▁▁", "\n\n", "<sep>"]
CORPUS = "\n".join(pydoc_data.topics.topics.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=pathlib.Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    path = parser.parse_args().gguf
    write("smollm2", json.loads(build_tokenizer(gguf.GGUFReader(path).fields).to_str()))
    write("llama", references(train(), user_defined=(), add_space_prefix=True))
    gemma = train(add_dummy_prefix=False, user_defined_symbols=USER_DEFINED)
    write("gemma", references(gemma, user_defined=USER_DEFINED, add_space_prefix=False))


def write(name: str, value: dict) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    (OUT / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def train(**options) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for line in CORPUS.split("\n") if line.strip()),
        model_writer=model,
        model_type="bpe",
        vocab_size=2000,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def references(model: sentencepiece.SentencePieceProcessor, *, user_defined, add_space_prefix: bool) -> dict:
    size = model.vocab_size()
    rng = random.Random(0)
    texts = [text for text in STRINGS if not any(t in text for t in ("<s>", "</s>", "<unk>"))]
    texts += ["".join(rng.choices("ab aeiou nst  \n\t.,é你😀0129", k=rng.randrange(1, 40))) for _ in range(100)]
    starts = [rng.randrange(len(CORPUS)) for _ in range(60)]
    texts += [CORPUS[start : start + rng.randrange(1, 300)] for start in starts]
    in_bytes = [i for i in range(size) if model.is_byte(i)]
    others = [i for i in range(size) if not model.is_byte(i) and not model.is_control(i) and not model.is_unknown(i)]
    broken = [rng.choices(in_bytes, k=6) + rng.choices(others, k=3) for _ in range(100)]
    # Characters spelled in bytes, then one that breaks off.
    spelled = [model.piece_to_id(f"<0x{byte:02X}>") for byte in "é你😀".encode()]
    broken += [spelled[:n] for n in range(1, len(spelled) + 1)]
    for ids in broken[:100]:
        rng.shuffle(ids)
    return {
        "fields": {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
            "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
            "tokenizer.ggml.token_type": [token_type(model, i, user_defined) for i in range(size)],
            "tokenizer.ggml.add_space_prefix": add_space_prefix,
        },
        "strings": [{"text": text, "ids": model.encode(text)} for text in texts],
        "broken": [{"ids": ids, "text": model.decode(ids)} for ids in broken],
    }


def token_type(model: sentencepiece.SentencePieceProcessor, i: int, user_defined) -> int:
    kinds = {
        gguf.TokenType.UNKNOWN: model.is_unknown(i),
        gguf.TokenType.CONTROL: model.is_control(i),
        gguf.TokenType.BYTE: model.is_byte(i),
        gguf.TokenType.USER_DEFINED: model.id_to_piece(i) in user_defined,
    }
    return int(next((kind for kind, holds in kinds.items() if holds), gguf.TokenType.NORMAL))


if __name__ == "__main__":
    main()
