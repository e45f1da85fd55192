"""Structured texts with real tokenizers: whatever is drawn from the masks is what was asked for."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import stored_tokenizers

from jpaged.host.grammar import Grammars
from jpaged.host.structured import Structured

TOKENIZERS = {
    "smollm2": stored_tokenizers.smollm2,
    "llama": lambda: stored_tokenizers.sentencepiece("llama"),
    "gemma": lambda: stored_tokenizers.sentencepiece("gemma"),
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["ä", "b\n", "漢字"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def grammars(request):
    tokenizer = TOKENIZERS[request.param]()
    eos = tokenizer.special_ids and min(tokenizer.eos_token_ids or tokenizer.special_ids)
    vocab_size = tokenizer.vocab_size + 37  # models have more rows than tokens
    made = Grammars(tokenizer, vocab_size, frozenset({eos}))
    return made, tokenizer, vocab_size, eos


def allowed(matcher, vocab_size):
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(grammars, structured, seed, longest=200):
    """A text of tokens drawn at random from those that are allowed; None if it has not ended by then."""
    made, tokenizer, vocab_size, eos = grammars
    matcher, rng, tokens = made.matcher(structured), random.Random(seed), []
    for _ in range(longest):
        matcher.follow(tokens)
        ids = allowed(matcher, vocab_size).tolist()
        assert ids and ids[-1] < tokenizer.vocab_size, "an id without a token is allowed"
        assert not (set(ids) - {eos}) & tokenizer.special_ids, "a special token is allowed inside of a text"
        # The longest tokens end a text soonest, the shortest try the borders of characters.
        token_id = eos if eos in ids and rng.random() < 0.3 else rng.choice(ids)
        if token_id == eos:
            return b"".join(tokenizer.piece(i) or b"" for i in tokens).decode()
        tokens.append(token_id)
    return None


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-z]{2,5}", r"(äö|漢字|🙂)+!", r"a?b*c{2}", r" *x", r"[^a-zA-Z]{3}"])
def test_a_text_matches_its_regular_expression(grammars, pattern):
    texts = [walk(grammars, Structured(regex=pattern), seed) for seed in range(6)]
    found = [text for text in texts if text is not None]
    assert found and all(re.fullmatch(pattern, text) for text in found), found


def test_a_text_fits_its_json_schema(grammars):
    found = [text for seed in range(40) if (text := walk(grammars, Structured(json=PERSON), seed)) is not None]
    assert found
    for text in found:
        person = json.loads(text)
        assert list(person) == ["name", "age", "tags"]
        assert isinstance(person["name"], str) and len(person["name"]) <= 8
        assert isinstance(person["age"], int) and 0 <= person["age"] <= 130
        assert len(person["tags"]) <= 2 and set(person["tags"]) <= {"ä", "b\n", "漢字"}


def test_a_text_is_one_of_the_choices(grammars):
    choices = ["yes", "yes and no", ' "quoted" \\', "ünï 漢字 🙂", "no\nline"]
    found = {walk(grammars, Structured(choice=choices), seed) for seed in range(24)}
    assert found <= set(choices) and len(found) >= 3


def test_a_text_follows_its_grammar(grammars):
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]?/'
    found = [text for seed in range(6) if (text := walk(grammars, Structured(grammar=grammar), seed)) is not None]
    assert found and all(re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?)*", text) for text in found)


def test_a_json_object_is_an_object(grammars):
    made, tokenizer, _, _ = grammars
    matcher = made.matcher(Structured(json_object=True))
    tokens = []
    for part in ("{", '"a"', ":", " [1", ",", " null", "]", "}"):
        tokens += tokenizer.encode_continuation(part)
    matcher.follow(tokens)
    mask = np.zeros(-(-grammars[2] // 32), np.uint32)
    matcher.fill(mask)
    assert allowed(matcher, grammars[2]).tolist() == [grammars[3]], "it is complete, and only its end may follow"


@pytest.mark.parametrize(
    ("structured", "complaint"),
    [
        (Structured(regex="(("), r"^regex cannot be followed: .*unclosed group"),
        (Structured(regex="[a&&b]"), r"^regex cannot be met"),
        (Structured(json={"type": "nonsense"}), "^json cannot be followed: .*nonsense"),
        (Structured(json={"type": "integer", "minimum": 5, "maximum": 3}), "^json cannot be followed: .*5.*3"),
        (Structured(json='{"$ref": "#/nowhere"}'), "^json cannot be followed"),
        (Structured(grammar="start: missing"), "^grammar cannot be followed: .*missing"),
        (Structured(grammar="no rules"), "^grammar cannot be followed"),
    ],
)
def test_what_cannot_be_met_is_refused_at_once(grammars, structured, complaint):
    with pytest.raises(ValueError, match=complaint):
        grammars[0].matcher(structured)


def test_each_text_is_followed_on_its_own_and_anew_after_tokens_were_taken_back(grammars):
    made, tokenizer, vocab_size, _ = grammars
    first, second = (made.matcher(Structured(regex="ab+")) for _ in range(2))
    a, b = (tokenizer.encode_continuation(text) for text in "ab")
    first.follow(a)
    begun = allowed(second, vocab_size).tolist()
    assert allowed(first, vocab_size).tolist() != begun
    fork = first.fork()
    fork.follow([*a, *b])
    after_a = allowed(first, vocab_size).tolist()
    assert allowed(fork, vocab_size).tolist() != after_a
    fork.follow(a)
    assert allowed(fork, vocab_size).tolist() == after_a


def test_without_an_end_of_sequence_there_is_no_structure():
    with pytest.raises(ValueError, match="end-of-sequence token"):
        Grammars(stored_tokenizers.smollm2(), 50_000, frozenset()).matcher(Structured(regex="a"))
