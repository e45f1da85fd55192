from __future__ import annotations

import copy
import json
import pickle
import random

import pytest
import tokenizers
from stored_tokenizers import DATA, sentencepiece, smollm2, smollm2_backend_text, stored
from tokenizers import decoders, models, pre_tokenizers, processors

from jpaged.host.tokenizer import Tokenizer

REFERENCE = json.loads((DATA / "smollm2_tokenizer.json").read_text())


def write_directory(path, *, config=None, backend=None, **files):
    """A model's directory; keyword `a_json` becomes the file `a.json`."""
    (path / "tokenizer.json").write_text(backend or smollm2_backend_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, text in files.items():
        (path / ".".join(name.rsplit("_", 1))).write_text(text if isinstance(text, str) else json.dumps(text))
    return path


@pytest.mark.parametrize("case", REFERENCE["strings"], ids=lambda case: repr(case["text"][:24]))
def test_strings_become_the_ids_of_the_reference_and_back(case):
    assert smollm2().encode(case["text"]) == case["ids"]
    assert smollm2().decode(case["ids"], skip_special_tokens=False) == case["decoded"]


def test_every_token_decodes_as_in_tokenizers():
    backend = tokenizers.Tokenizer.from_str(smollm2_backend_text())
    for i in range(smollm2().vocab_size):
        assert smollm2().decode([i], skip_special_tokens=False) == backend.decode([i], skip_special_tokens=False), i


@pytest.mark.parametrize("skip", [True, False])
def test_broken_bytes_decode_as_in_tokenizers_for_byte_level_bpe(skip):
    backend = tokenizers.Tokenizer.from_str(smollm2_backend_text())
    rng = random.Random(0)
    short = [i for i in range(smollm2().vocab_size) if len(smollm2().piece(i, skip_special_tokens=False)) < 3]
    for _ in range(500):
        ids = rng.choices(short, k=20) + [rng.randrange(17)]
        rng.shuffle(ids)
        assert smollm2().decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_broken_bytes_decode_as_in_sentencepiece_for_byte_fallback(name):
    for case in stored(name)["broken"]:
        assert sentencepiece(name).decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("skip", [True, False])
def test_texts_of_whole_characters_decode_as_in_tokenizers_for_byte_fallback(name, skip):
    tokenizer, rng = sentencepiece(name), random.Random(0)
    whole = [i for i in range(tokenizer.vocab_size) if not 0x80 <= i - 3 - 4 * (name == "gemma") < 0x100]
    for _ in range(1000):
        ids = rng.choices(whole + [0, 1, 2] * 200, k=rng.randrange(6))
        assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip), ids


def test_ids_without_a_token_show_nothing_and_negative_ones_are_refused():
    end = smollm2().vocab_size
    assert smollm2().decode([smollm2().encode("hi")[0], end, end + 100]) == "hi"
    with pytest.raises(ValueError, match="-1"):
        smollm2().decode([-1])
    with pytest.raises(ValueError, match="1.5"):
        smollm2().decode([1.5])


def test_half_a_surrogate_pair_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"character 2 .*U\+D83D"):
        smollm2().encode("ab\ud83d")
    with pytest.raises(ValueError, match="must be a string, got int"):
        smollm2().encode(3)


def test_a_directory_without_a_tokenizer_has_none(tmp_path):
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_tokenizer_in_another_format_is_named_with_the_cure(tmp_path, other):
    (tmp_path / other).write_text("{}")
    with pytest.raises(ValueError, match=f"{other}.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)


def test_a_broken_config_is_named(tmp_path):
    write_directory(tmp_path, special_tokens_map_json="{")
    with pytest.raises(ValueError, match="special_tokens_map.json is not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_special_tokens_are_read_as_strings_or_objects_and_from_both_files(tmp_path):
    write_directory(
        tmp_path,
        config={"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": None},
        special_tokens_map_json={"bos_token": "<|im_start|>"},
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, frozenset({2}))
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_a_special_token_that_tokenizer_json_holds_as_plain_text_is_special(tmp_path):
    backend = copy.deepcopy(stored("smollm2"))
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["id"] != 2]
    write_directory(tmp_path, backend=json.dumps(backend), config={"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a<|im_end|>") == [81, 2]
    assert tokenizer.decode([81, 2]) == "a"
    assert tokenizer.vocab_size == 49152


def test_truncation_and_padding_stored_by_a_training_run_are_off(tmp_path):
    backend = tokenizers.Tokenizer.from_str(smollm2_backend_text())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    write_directory(tmp_path, backend=backend.to_str())
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert len(tokenizer.encode("1234567")) == 7
    assert len(tokenizer.encode("1")) == 1


@pytest.mark.parametrize("add", [True, False])
def test_the_config_decides_on_bos_and_eos_where_tokenizer_json_says_nothing(tmp_path, add):
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": add, "add_eos_token": add}
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, config=config))
    assert tokenizer.encode("a") == ([1, 81, 2] if add else [81])
    assert tokenizer.encode("a", add_special_tokens=False) == [81]


def test_tokenizer_json_decides_on_bos_where_it_says_something(tmp_path):
    backend = tokenizers.Tokenizer.from_str(smollm2_backend_text())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair=None, special_tokens=[("<|im_start|>", 1)]
    )
    config = {"bos_token": "<|im_start|>", "add_bos_token": False}
    assert Tokenizer.from_directory(write_directory(tmp_path, backend=backend.to_str(), config=config)).encode("a") == [
        1,
        81,
    ]


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"chat_template": "T{{ messages[0].content }}"}},
        {"config": {"chat_template": [{"name": "default", "template": "T{{ messages[0].content }}"}]}},
        {"chat_template_json": {"chat_template": "T{{ messages[0].content }}"}, "config": {"chat_template": "old"}},
        {"chat_template_jinja": "T{{ messages[0].content }}", "config": {"chat_template": "old"}},
    ],
    ids=["config", "list", "json", "jinja"],
)
def test_a_chat_template_is_found_wherever_it_is_stored(tmp_path, files):
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, **files))
    assert tokenizer.chat_template == "T{{ messages[0].content }}"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "Tx"


def test_tools_pick_the_template_made_for_them(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, config={"chat_template": named}))
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat) == "plain"
    assert tokenizer.apply_chat_template(chat, tools=[{}, {}]) == "2 tools"


def test_tokenizers_made_twice_from_one_model_are_equal_and_hash_alike(tmp_path):
    path = write_directory(tmp_path, config={"eos_token": "<|im_end|>"})
    one, two = Tokenizer.from_directory(path), Tokenizer.from_directory(path)
    assert one == two and hash(one) == hash(two) and one is not two
    write_directory(tmp_path, config={"eos_token": "<|im_start|>"})
    assert one != Tokenizer.from_directory(path)
    assert one != "a tokenizer"


def test_a_tokenizer_survives_pickling_and_copying():
    for again in (pickle.loads(pickle.dumps(smollm2())), copy.deepcopy(smollm2())):
        assert again == smollm2()
        assert again.decode(again.encode("hi 12 é")) == "hi 12 é"


def small(decoder, tokens) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoder
    return Tokenizer(backend)


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece(), decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()],
    ids=["none", "wordpiece", "metaspace", "metaspace_never", "fuse"],
)
def test_other_decoders_give_the_text_that_they_give_in_tokenizers(decoder):
    tokenizer = small(decoder, ["[UNK]", "▁un", "##able", "you", ".", "▁", "n't", "▁▁x"])
    rng = random.Random(0)
    for _ in range(200):
        ids = rng.choices(range(8), k=rng.randrange(6))
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids), ids


def test_a_decoder_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match="CTC"):
        small(decoders.CTC(), ["a"])
    with pytest.raises(ValueError, match="Strip at the end"):
        small(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), ["a"])
