"""Owns the tokenizers that GGUF files describe in their metadata, rebuilt as `tokenizers.Tokenizer`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFTokenizer(NamedTuple):
    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # "bos_token" and the like, for chat templates
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    chat_templates: dict[str, str]  # "default" and named ones


class PreTokenizer(NamedTuple):
    """How text is cut before bytes are merged: by each pattern in turn, matches and gaps both kept."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as it stands is taken whole
    add_bos: bool = False  # where the file doesn't say
    nfc: bool = False  # composed characters, as the published tokenizer has it


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)  # %d: how many digits stay together
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)  # words are cut at case changes; %s, %s: a contraction after a word; %s: numbers

_BY_WORD_3 = PreTokenizer((_WORDS % 3,))
_LLAMA3 = PreTokenizer((_WORDS % 3,), ignore_merges=True, add_bos=True)
_BY_WORD_1 = PreTokenizer((_WORDS.replace("{1,%d}", ""),))
_BY_GPT2 = PreTokenizer((_GPT2,))
_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))

# `tokenizer.ggml.pre` names the model a rule was first seen with; many share one.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"), _BY_GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _BY_DIGIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _BY_WORD_3),
    "qwen2": _BY_WORD_1._replace(nfc=True),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen"), _BY_WORD_1),
    "gpt-4o": PreTokenizer((_CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
    "tekken": PreTokenizer((_CASED % ("", "", r"\p{N}"),), ignore_merges=True, add_bos=True),
}

# Ends of a turn in files that were made before the key `eot_token_id` existed.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")


def build(fields: Mapping[str, Any]) -> GGUFTokenizer:
    """A tokenizer from GGUF metadata: a dict from full key (`tokenizer.ggml.tokens`) to plain Python value.

    Two kinds are known: `gpt2` (BPE over bytes, with merges) and `llama` (SentencePiece BPE, with scores).
    Raises ValueError for another kind, an unknown pre-tokenizer, or missing or contradictory metadata.
    """
    kind = _get(fields, "model")
    tokens = list(_get(fields, "tokens"))
    types = _token_types(fields, len(tokens))
    if kind == "gpt2":
        backend, add_bos = _byte_level(fields, tokens, types)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(fields, tokens, types), True
    else:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported (known: 'gpt2', 'llama')")
    _add_special_tokens(backend, tokens, types)

    # SentencePiece models have their special tokens in these places, and old files don't repeat it.
    default = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}

    def special(name: str) -> int | None:
        i = fields.get(f"tokenizer.ggml.{name}_token_id", default.get(name))
        if i is not None and not 0 <= i < len(tokens):
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id is {i}, outside of the vocabulary of {len(tokens)} tokens"
            )
        return i

    bos, eos = special("bos"), special("eos")
    ends = {i for i in (eos, special("eot"), special("eom")) if i is not None}
    if special("eot") is None:
        ends |= {i for i, t in enumerate(tokens) if t in _TURN_ENDS and types[i] == TokenType.CONTROL}
    add_bos_eos(
        backend,
        (tokens[bos], bos) if bos is not None and fields.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        (tokens[eos], eos) if eos is not None and fields.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    names = {"bos_token": bos, "eos_token": eos, "unk_token": special("unknown"), "pad_token": special("padding")}
    special_tokens = {name: tokens[i] for name, i in names.items() if i is not None}
    return GGUFTokenizer(backend, special_tokens, bos, frozenset(ends), _chat_templates(fields))


def _get(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise ValueError(f"GGUF metadata has no tokenizer.ggml.{name}; convert the model again with its tokenizer")
    return value


def _token_types(fields: Mapping[str, Any], num_tokens: int) -> list[TokenType]:
    numbers = fields.get("tokenizer.ggml.token_type")
    if numbers is None:
        return [TokenType.NORMAL] * num_tokens
    if len(numbers) != num_tokens:
        raise ValueError(f"GGUF metadata holds {num_tokens} tokens but {len(numbers)} token types; the file is damaged")
    # 0 stands for "undefined" and is written by tools that set no types.
    return [TokenType(number or TokenType.NORMAL) for number in numbers]


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[TokenType]):
    name = fields.get("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported (known: {', '.join(sorted(PRE_TOKENIZERS))})")
    vocab = {t: i for i, t in enumerate(tokens) if types[i] != TokenType.UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _get(fields, "merges")]
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises bare exceptions
        raise ValueError(f"the vocabulary and the merges of the GGUF metadata contradict each other: {error}") from None
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str], types: Sequence[TokenType]) -> tokenizers.Tokenizer:
    scores = _get(fields, "scores")
    if len(scores) != len(tokens):
        raise ValueError(f"GGUF metadata holds {len(tokens)} tokens but {len(scores)} scores; the file is damaged")
    for i, kind in enumerate(types):
        # Matched in the raw text, before spaces become ▁ (the decoder leaves spaces alone).
        if kind == TokenType.USER_DEFINED:
            tokens[i] = tokens[i].replace("▁", " ")
    vocab = {t: i for i, t in enumerate(tokens) if types[i] != TokenType.UNUSED}
    unknown = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN]
    model = models.BPE(
        vocab,
        _merges_from_scores(tokens, types, scores),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    to_meta = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*to_meta, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_from_scores(tokens: Sequence[str], types: Sequence[TokenType], scores: Sequence[float]):
    """SentencePiece joins the neighbours whose union has the best score: every split of a piece is a merge."""
    pieces = {t: i for i, t in enumerate(tokens) if types[i] == TokenType.NORMAL}
    found = []
    for piece, i in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _add_special_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[TokenType]) -> None:
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    pairs = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind in special and t])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == TokenType.USER_DEFINED and t])


def add_bos_eos(backend: tokenizers.Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """`encode` puts these (token, id) around every text."""
    single = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=None, special_tokens=list({t for t in (bos, eos) if t})
        )


def _chat_templates(fields: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key + "."): t for name, t in fields.items() if name.startswith(key + ".")}
    return named | ({"default": fields[key]} if fields.get(key) else {})
