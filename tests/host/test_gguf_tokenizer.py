from __future__ import annotations

import json
import random

import gguf
import pytest
from stored_tokenizers import DATA, sentencepiece, smollm2, smollm2_gguf_fields, stored
from tokenizers import Regex, pre_tokenizers

from jpaged.host.gguf_tokenizer import PRE_TOKENIZERS
from jpaged.host.tokenizer import Tokenizer

REFERENCE = json.loads((DATA / "smollm2_tokenizer.json").read_text())
TEXTS = [case["text"] for case in REFERENCE["strings"]]


def tiny_fields(**changes):
    """Byte-level BPE over a, b, ab; `changes` are fields without their prefix, None to remove one."""
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<s>", "</s>", "a", "b", "Ġ", "ab", "<think>", "pad"],
        "token_type": [3, 3, 1, 1, 1, 1, 4, 5],
        "merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def test_the_tokenizer_of_a_gguf_is_the_published_one():
    tokenizer, rng = Tokenizer.from_gguf(smollm2_gguf_fields()), random.Random(0)
    texts = ["".join(rng.choices([*TEXTS, "a", " ", "1"], k=3)) for _ in range(300)]
    for text in TEXTS + texts:
        ids = tokenizer.encode(text)
        assert ids == smollm2().encode(text)
        assert tokenizer.decode(ids) == smollm2().decode(ids)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, {2})
    assert tokenizer.special_tokens["pad_token"] == "<|im_end|>"


def test_the_small_model_holds_its_tokenizer_and_its_chat_template(small_model):
    fields = {name: field.contents() for name, field in gguf.GGUFReader(small_model).fields.items()}
    tokenizer = Tokenizer.from_gguf(fields)
    for case in REFERENCE["strings"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
    for case in REFERENCE["chats"]:
        assert tokenizer.apply_chat_template(case["messages"], case["add_generation_prompt"]) == case["text"]
        assert tokenizer.encode_chat(case["messages"], case["add_generation_prompt"]) == case["ids"]


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_sentencepiece_models_give_the_ids_of_sentencepiece(name):
    tokenizer = sentencepiece(name)
    for case in stored(name)["strings"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}


def test_special_tokens_in_a_sentencepiece_text_are_read_as_such():
    assert sentencepiece("llama").encode("</s>", add_special_tokens=False) == [2]
    assert sentencepiece("llama").decode([1, 2]) == ""
    assert sentencepiece("llama").decode([1, 2], skip_special_tokens=False) == "<s></s>"


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_every_character(pre):
    for pattern in PRE_TOKENIZERS[pre].patterns:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        for text in TEXTS:
            assert "".join(part for part, _ in split.pre_tokenize_str(text)) == text


@pytest.mark.parametrize(
    "pre, parts",
    [
        ("gpt-2", ["It", "'s", " HelloWORLD", " 12345", "!?", "\n\n", " x"]),
        ("smollm", ["It", "'s", " HelloWORLD", " ", "1", "2", "3", "4", "5", "!?", "\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " HelloWORLD", " ", "123", "45", "!?\n\n", " x"]),
        ("qwen2", ["It", "'s", " HelloWORLD", " ", "1", "2", "3", "4", "5", "!?\n\n", " x"]),
        ("gpt-4o", ["It's", " Hello", "WORLD", " ", "123", "45", "!?\n\n", " x"]),
        ("tekken", ["It", "'s", " Hello", "WORLD", " ", "1", "2", "3", "4", "5", "!?\n\n", " x"]),
        ("default", ["It", "'", "s", " HelloWORLD", " ", "123", "45", "!?", "\n\n", " x"]),
    ],
)
def test_pre_tokenizers_cut_where_their_models_learned_to(pre, parts):
    text = "It's HelloWORLD 12345!?\n\n x"
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    assert [part for part, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == parts


def test_qwen2_composes_characters_first():
    fields = tiny_fields(pre="qwen2", tokens=["<s>", "</s>", "Ã", "©", "é"], token_type=[3, 3, 1, 1, 1], merges=[])
    assert Tokenizer.from_gguf(fields).encode("e\u0301") == Tokenizer.from_gguf(fields).encode("é") == [2, 3]


def test_user_defined_tokens_are_shown_and_control_tokens_are_not():
    tokenizer = Tokenizer.from_gguf(tiny_fields())
    assert tokenizer.encode("ab<think>a</s>") == [5, 6, 2, 1]
    assert tokenizer.decode([5, 6, 2, 1]) == "ab<think>a"


def test_unused_tokens_are_never_shown():
    assert Tokenizer.from_gguf(tiny_fields()).decode([2, 7, 3]) == "ab"


@pytest.mark.parametrize(
    "changes, ids",
    [
        ({}, [5]),
        ({"add_bos_token": True}, [0, 5]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 5, 1]),
        ({"pre": "llama-bpe"}, [0, 5]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [5]),
        ({"add_bos_token": True, "bos_token_id": None}, [5]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says_or_as_its_kind_does(changes, ids):
    assert Tokenizer.from_gguf(tiny_fields(**changes)).encode("ab") == ids


def test_the_ends_of_a_turn_end_the_text_too():
    assert Tokenizer.from_gguf(tiny_fields(eot_token_id=0)).eos_token_ids == {0, 1}
    tokens = ["<s>", "</s>", "a", "b", "Ġ", "ab", "<|im_end|>", "<|eot_id|>"]
    by_name = tiny_fields(tokens=tokens, token_type=[3, 3, 1, 1, 1, 1, 3, 1])
    assert Tokenizer.from_gguf(by_name).eos_token_ids == {1, 6}


def test_chat_templates_come_with_their_names():
    fields = tiny_fields() | {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert Tokenizer.from_gguf(fields).chat_templates == {"default": "A", "tool_use": "{{ tools }}"}
    assert Tokenizer.from_gguf(tiny_fields()).chat_template is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "t5"}, "'t5' is not supported.*gpt2.*llama"),
        ({"pre": "novel"}, "'novel' is not supported.*gpt-2.*smollm"),
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "8 tokens but 1 scores"),
        ({"token_type": [1]}, "8 tokens but 1 token types"),
        ({"merges": ["x y"]}, "contradict"),
        ({"eos_token_id": 8}, "eos_token_id is 8, outside"),
    ],
)
def test_bad_metadata_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(tiny_fields(**changes))
