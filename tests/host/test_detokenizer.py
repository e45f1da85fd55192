from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored_tokenizers import sentencepiece, smollm2, words

from jpaged.host.detokenizer import Detokenizer
from jpaged.host.stop_strings import compile_stop_strings
from jpaged.host.tokenizer import Tokenizer

KINDS = ("smollm2", "llama", "gemma")


def tokenizer_of(kind: str) -> Tokenizer:
    return smollm2() if kind == "smollm2" else sentencepiece(kind)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def run(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """The part that each token makes visible, then what `finish` adds."""
    return [*map(detokenizer.append, ids), detokenizer.finish()]


# ---- the oracle: the definitions, one after another, over the whole text at each step


def is_unfinished(tail: bytes) -> bool:
    """Bytes that begin a character and lack its end."""
    ends = [b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"\xbf\xbf\xbf"]
    if not tail:
        return False
    for end in ends:
        try:
            if len((tail + end).decode()) == 1:
                return True
        except UnicodeDecodeError:
            pass
    return False


def text_after(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    """The text of the ids without a character that the next token may complete."""
    first, pieces = True, []
    for i in ids:
        piece = tokenizer.piece(i, first=first, skip_special_tokens=skip)
        if piece is not None:
            first = False
            pieces.append(piece)
    raw = b"".join(pieces)
    unfinished = next((n for n in (3, 2, 1) if is_unfinished(raw[len(raw) - n :]) and n <= len(raw)), 0)
    return raw[: len(raw) - unfinished].decode("utf-8", tokenizer.utf8_errors)


def find_stop(texts: list[str], stop: Sequence[str], min_tokens: int) -> tuple[int, str] | None:
    """Where the first stop string that counts ends, and which it is. `texts[n]` is the text after n tokens."""
    whole = texts[-1]
    for end in range(1, len(whole) + 1):
        completed_by = next(n for n, text in enumerate(texts) if len(text) >= end)
        for string in stop:
            if whole[:end].endswith(string) and min(completed_by, len(texts) - 2) > min_tokens:
                return end, string
    return None


def oracle(tokenizer, ids, stop, include, skip, min_tokens) -> tuple[list[str], str | None]:
    """The parts that `run` must give, and the stop string found."""
    texts = [text_after(tokenizer, ids[:n], skip) for n in range(len(ids) + 1)] + [tokenizer.decode(ids, skip)]
    found = find_stop(texts, stop, min_tokens)
    visible = []
    for n, text in enumerate(texts):
        if found is not None and len(text) >= found[0]:
            end, string = found
            visible.append(texts[-1][: end if include else end - len(string)])
            continue
        begun = [k for s in stop for k in range(1, len(s)) if text.endswith(s[:k])]
        at_end = n == len(texts) - 1
        visible.append(text if at_end else text[: len(text) - max(begun, default=0)])
    parts = [after[len(before) :] for before, after in zip(visible, visible[1:], strict=False)]
    return parts, found and found[1]


@st.composite
def generations(draw):
    tokenizer = tokenizer_of(draw(st.sampled_from(KINDS)))
    short = short_pieces(tokenizer)
    an_id = st.one_of(st.sampled_from(short), st.integers(0, tokenizer.vocab_size + 3), st.integers(0, 3))
    words = st.sampled_from(["aaa", "abab", " the end", "é", "你好", "😀", "👩‍👧", "\n\n", "\ufffd", "a"])
    some = st.one_of(st.lists(an_id, min_size=1, max_size=4), words.map(lambda word: ids_of(tokenizer, word)))
    ids = sum(draw(st.lists(some, max_size=8)), [])
    skip = draw(st.booleans())
    text = tokenizer.decode(ids, skip)
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda c: text[c[0] : c[0] + c[1]])
    others = st.sampled_from(["a", "ab", "aa", "aaa", "aba", "b", "\ufffd", "\n", "好"])
    stop = draw(st.lists(st.one_of(cuts.filter(bool), cuts.filter(bool), others), max_size=3))
    return tokenizer, ids, tuple(stop), draw(st.booleans()), skip, draw(st.integers(0, len(ids)))


@functools.cache
def short_pieces(tokenizer: Tokenizer) -> list[int]:
    """Ids of one or two bytes, parts of characters among them."""
    found = []
    for i in range(tokenizer.vocab_size):
        piece = tokenizer.piece(i, skip_special_tokens=False)
        if piece is not None and len(piece) <= 2:
            found.append(i)
    return found


@given(generations())
def test_every_part_is_what_the_definitions_say(case):
    tokenizer, ids, stop, include, skip, min_tokens = case
    detokenizer = Detokenizer(tokenizer, stop, include, skip, min_tokens)
    parts, hit = oracle(tokenizer, ids, stop, include, skip, min_tokens)
    assert run(detokenizer, ids) == parts
    assert detokenizer.stop_hit == hit
    assert detokenizer.text == "".join(parts)


@given(generations())
def test_without_stop_strings_the_parts_join_to_the_decoded_text(case):
    tokenizer, ids, _, _, skip, _ = case
    assert "".join(run(Detokenizer(tokenizer, skip_special_tokens=skip), ids)) == tokenizer.decode(ids, skip)


@given(generations(), st.integers(0, 20))
def test_the_text_continues_the_prompt(case, cut):
    tokenizer, ids, _, _, skip, _ = case
    prompt, output = ids[:cut], ids[cut:]
    whole = tokenizer.decode(ids, skip)
    if text_after(tokenizer, prompt, skip) == tokenizer.decode(prompt, skip):  # ends between characters
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_tail=prompt)
        assert tokenizer.decode(prompt, skip) + "".join(run(detokenizer, output)) == whole


@given(generations(), st.integers(0, 20), st.booleans())
def test_spaces_beside_special_tokens_are_the_same_in_the_stream_and_after_a_prompt(case, cut, spaces):
    tokenizer, ids, _, _, _, _ = case
    whole, options = tokenizer.decode(ids, False, spaces), {"skip_special_tokens": False}
    options["spaces_between_special_tokens"] = spaces
    assert "".join(run(Detokenizer(tokenizer, **options), ids)) == whole
    prompt, output = ids[:cut], ids[cut:]
    if text_after(tokenizer, prompt, False) == tokenizer.decode(prompt, False):
        text = "".join(run(Detokenizer(tokenizer, prompt_tail=prompt, **options), output))
        assert tokenizer.decode(prompt, False, spaces) + text == whole


# ---- the same, said by example


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_all_broken_bytes_are_shown_as_soon_as_they_are_known_to_be_broken(kind):
    tokenizer = tokenizer_of(kind)
    byte_ids = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.piece(i) or b"") == 1}
    byte_ids |= {bytes([b]): tokenizer._backend.token_to_id(f"<0x{b:02X}>") for b in range(0x80, 0x100)}
    borders = (
        0x41,
        0x80,
        0x8F,
        0x90,
        0x9F,
        0xA0,
        0xBF,
        0xC1,
        0xC2,
        0xDF,
        0xE0,
        0xE1,
        0xED,
        0xEF,
        0xF0,
        0xF1,
        0xF4,
        0xF5,
    )
    for raw in map(bytes, itertools.product(borders, repeat=3)):
        ids = [byte_ids[raw[n : n + 1]] for n in range(3)]
        assert run(Detokenizer(tokenizer), ids) == oracle(tokenizer, ids, (), False, True, 0)[0], raw


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_spread_over_tokens_appears_at_once(kind):
    tokenizer = tokenizer_of(kind)
    ids = ids_of(tokenizer, "a😀b")
    parts = run(Detokenizer(tokenizer), ids)
    assert "".join(parts) == "a😀b"
    assert "😀" in "".join(parts[-3:-1]) and parts.count("") >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_broken_off_is_shown_at_the_end(kind):
    tokenizer = tokenizer_of(kind)
    ids = ids_of(tokenizer, "ab😀")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.append, ids)) == "ab"
    rest = detokenizer.finish()
    assert rest and not rest.strip("\ufffd") and "ab" + rest == tokenizer.decode(ids) == detokenizer.text


@pytest.mark.parametrize("kind", KINDS)
def test_the_leading_space_stays_after_a_prompt(kind):
    tokenizer = tokenizer_of(kind)
    whole, prompt = ids_of(tokenizer, "France is Paris"), ids_of(tokenizer, "France is")
    output = whole[len(prompt) :]
    assert "".join(run(Detokenizer(tokenizer, prompt_tail=prompt), output)) == " Paris"


def test_the_leading_space_goes_where_nothing_is_shown_before():
    tokenizer = sentencepiece("llama")
    bos, ids = tokenizer.bos_token_id, ids_of(tokenizer, "the end")
    for prompt in ([], [bos]):
        assert "".join(run(Detokenizer(tokenizer, prompt_tail=prompt), ids)) == "the end"
    shown = Detokenizer(tokenizer, prompt_tail=[bos], skip_special_tokens=False)
    assert "".join(run(shown, ids)) == " the end"
    # A skipped token within the text is no beginning.
    assert "".join(run(Detokenizer(tokenizer), [*ids, tokenizer.bos_token_id, *ids])) == "the end the end"


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_that_began_in_the_prompt_is_shown_whole(kind):
    tokenizer = tokenizer_of(kind)
    ids = ids_of(tokenizer, "ab😀c")
    assert "".join(run(Detokenizer(tokenizer, prompt_tail=ids[:-2]), ids[-2:])) == "😀c"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "stop, include, text, hit",
    [
        (["STOP HERE"], False, " one two three ", "STOP HERE"),
        (["TOP H"], False, " one two three S", "TOP H"),  # begins within a token
        (["TOP H"], True, " one two three STOP H", "TOP H"),
        (["HERE", "two three"], False, " one ", "two three"),  # the one completed first
        ([" one"], False, "", " one"),
        (["three STOP", "STOP"], False, " one two ", "three STOP"),  # at one place: the one listed first
        (["STOP", "three STOP"], False, " one two three ", "STOP"),
        (["three STOX", "e S"], False, " one two thre", "e S"),
        (["nowhere", "five!"], False, " one two three STOP HERE four five", None),
    ],
)
def test_stop_strings_end_the_text(kind, stop, include, text, hit):
    tokenizer = tokenizer_of(kind)
    ids = ids_of(tokenizer, "x one two three STOP HERE four five")
    x = ids_of(tokenizer, "x")
    detokenizer = Detokenizer(tokenizer, stop, include, prompt_tail=x)
    assert "".join(run(detokenizer, ids[len(x) :])) == text == detokenizer.text
    assert detokenizer.stop_hit == hit


def test_a_stop_string_split_over_tokens_is_never_shown_in_part():
    tokenizer = smollm2()
    detokenizer = Detokenizer(tokenizer, ["STOP HERE"])
    shown = []
    for i in ids_of(tokenizer, "one STOP HERO, STOP HERE"):
        detokenizer.append(i)
        shown.append(detokenizer.text)
    assert shown[-1] == "one STOP HERO, "
    assert not any(text.rstrip().endswith(("S", "ST", "STOP", "STOP HER")) for text in shown)
    assert any(text.startswith("one STOP HERO") for text in shown)


def test_what_looked_like_a_stop_string_is_shown_at_the_end():
    tokenizer = smollm2()
    detokenizer = Detokenizer(tokenizer, ["STOP HERE"])
    ids = ids_of(tokenizer, "one STOP")
    assert "".join(map(detokenizer.append, ids)) == "one "
    assert detokenizer.finish() == "STOP"
    assert detokenizer.finish() == ""
    assert detokenizer.stop_hit is None


def test_tokens_after_a_stop_string_show_nothing():
    tokenizer = smollm2()
    detokenizer = Detokenizer(tokenizer, ["b"])
    assert run(detokenizer, ids_of(tokenizer, "a") + ids_of(tokenizer, "b") * 3) == ["a", "", "", "", ""]


@pytest.mark.parametrize(
    "stop, min_tokens, text",
    [
        ("b", 0, "a"),
        ("b", 1, "a"),
        ("b", 2, "ab "),
        ("b", 3, "ab b"),
        ("b", 4, "ab bb"),
        ("b", 5, "ab bbb"),
        ("bb", 3, "ab "),  # begins in the third token
        ("bb", 4, "ab b"),  # overlaps one that doesn't count
    ],
)
def test_a_stop_string_counts_if_it_is_completed_after_the_first_min_tokens(stop, min_tokens, text):
    tokenizer = smollm2()
    ids = [i for token in ("a", "b", " b", "b", "b") for i in ids_of(tokenizer, token)]
    assert len(ids) == 5
    assert "".join(run(Detokenizer(tokenizer, [stop], min_tokens=min_tokens), ids)) == text


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_if_asked_for(skip):
    tokenizer = smollm2()
    ids = ids_of(tokenizer, "a<|im_end|>b")
    assert "".join(run(Detokenizer(tokenizer, skip_special_tokens=skip), ids)) == ("ab" if skip else "a<|im_end|>b")
    stopped = Detokenizer(tokenizer, ["<|im_end|>"], skip_special_tokens=skip)
    assert "".join(run(stopped, ids)) == ("ab" if skip else "a")


@pytest.mark.parametrize(
    "tokenizer, ids, own, spaced, close",
    [
        (smollm2(), "a<|im_end|><|im_start|>b c", None, "a <|im_end|> <|im_start|> b c", None),
        (smollm2(), "<|im_end|> b<|im_end|>\n", None, "<|im_end|> b <|im_end|> \n", None),
        (smollm2(), "a <|im_end|>", None, "a  <|im_end|>", None),  # the first is what "a" and " " say
        (smollm2(), "a b", None, "a b", None),
        (sentencepiece("llama"), [1, 2, "▁the", "s", 2], "<s></s> thes</s>", "<s> </s> thes </s>", None),
        (sentencepiece("llama"), ["s", 1, "s"], "s<s>s", "s <s> s", None),
        (words(), [3, 5, 1, 2, 4, 3, 1], "ones [SEP] [PAD] two one [SEP]", None, "ones[SEP][PAD]two one[SEP]"),
        (words(), [1, 5, 1], "[SEP]s [SEP]", "[SEP] s [SEP]", "[SEP]s[SEP]"),
        (words(spaced=False), [3, 1, 4, 4], "one [SEP] two two", None, "one[SEP]two two"),
    ],
)
def test_spaces_beside_special_tokens_are_as_the_tokenizer_writes_them_or_put_there_or_left_out(
    tokenizer, ids, own, spaced, close
):
    own = ids if own is None else own
    if isinstance(ids, str):
        ids = ids_of(tokenizer, ids)
    ids = [tokenizer._backend.token_to_id(i) if isinstance(i, str) else i for i in ids]
    assert tokenizer._backend.decode(ids, skip_special_tokens=False) == own
    for spaces, text in ((None, own), (True, spaced or own), (False, close or own)):
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert tokenizer.decode(ids, **options) == "".join(run(Detokenizer(tokenizer, **options), ids)) == text
    for spaces in (True, False):  # none is shown that a space could stand beside
        hidden = Detokenizer(tokenizer, spaces_between_special_tokens=spaces)
        assert "".join(run(hidden, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("prompt, text", [("<|im_end|>a", "b"), ("a<|im_end|>", " b"), ("a", "b"), ("", "b")])
def test_the_prompts_last_token_decides_whether_the_text_begins_with_a_space(prompt, text):
    tokenizer = smollm2()
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    detokenizer = Detokenizer(tokenizer, prompt_tail=ids_of(tokenizer, prompt), **options)
    assert "".join(run(detokenizer, ids_of(tokenizer, "b"))) == text


def test_a_stop_string_is_found_across_a_space_beside_a_special_token():
    tokenizer = smollm2()
    ids = ids_of(tokenizer, "one<|im_end|>two")
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    assert "".join(run(Detokenizer(tokenizer, ["e <|"], **options), ids)) == "on"
    assert "".join(run(Detokenizer(tokenizer, ["> t"], True, **options), ids)) == "one <|im_end|> t"


def test_a_character_that_a_special_token_breaks_off_is_replaced_before_the_space():
    tokenizer = smollm2()
    bird = ids_of(tokenizer, "🦜")
    ids = [bird[0], tokenizer.bos_token_id, *bird[1:]]
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    whole = tokenizer.decode(ids, **options)
    assert "".join(run(Detokenizer(tokenizer, **options), ids)) == whole
    assert whole.startswith("\ufffd <|im_start|> ") and not whole[14:].strip(" \ufffd")


def test_a_token_costs_the_same_in_a_long_text_full_of_near_misses():
    tokenizer = smollm2()
    stop = ["a" * 50 + "b", "a" * 25 + "c"]
    (a,) = ids_of(tokenizer, "a")

    def seconds(num_tokens: int) -> float:
        detokenizer = Detokenizer(tokenizer, stop)
        start = time.thread_time()  # other load on the machine does not count
        for _ in range(num_tokens):
            detokenizer.append(a)
        return time.thread_time() - start

    short = min(seconds(1_000) for _ in range(3))
    assert min(seconds(16_000) for _ in range(3)) < 16 * short * 4


def test_stop_strings_are_compiled_once_for_all_samples():
    assert compile_stop_strings(("a", "b")) is compile_stop_strings(("a", "b"))


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(smollm2(), ["a", ""])


@pytest.mark.parametrize("merged_at", [-1, 3, 20])
def test_a_stretch_of_the_text_is_that_of_the_whole(merged_at):
    tokenizer = smollm2()
    detokenizer = Detokenizer(tokenizer)
    for number, token_id in enumerate(ids_of(tokenizer, "One \U0001f44b two, thirty-three and so on.")):
        detokenizer.append(token_id)
        if number == merged_at:
            assert detokenizer.text  # joins what there is
        whole = "".join(detokenizer._parts)
        for start, stop in itertools.combinations_with_replacement(range(1, len(whole) + 1), 2):
            assert detokenizer.text_between(start, stop) == whole[start:stop]
        assert detokenizer.text_between(len(whole) + 3, len(whole)) == ""
    assert detokenizer.text_between(0, 3) == "One"
