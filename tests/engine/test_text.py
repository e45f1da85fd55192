"""The text of a request, with a model that says what the test wants: stop strings, streams, characters in parts."""

from __future__ import annotations

import engine_support as support
import pytest
import stored_tokenizers

from jpaged.host.sampling_params import SamplingParams

NUMBERS = " one two three STOP HERE four five"


def say(engine, text=NUMBERS, prompt="Say:", **options):
    """The finished sample of a parrot, after checking that its stream joins to its text."""
    support.teach(engine, text)
    engine.add_request(prompt, SamplingParams(**({"temperature": 0, "max_tokens": 30} | options)))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output.outputs[0] for output in engine.step()]
    final = outputs[-1]
    for earlier, later in zip(outputs, outputs[1:], strict=False):
        assert later.text.startswith(earlier.text), "the stream took back text"
        assert len(later.token_ids) == len(earlier.token_ids) + 1
        # Half a character would show as this; what is broken for good is shown by the last output alone.
        assert "\ufffd" not in earlier.text
    for hidden in options.get("stop") or ():
        if not options.get("include_stop_str_in_output") and not options.get("min_tokens"):
            assert not any(hidden in output.text for output in outputs)
    return final


def test_a_parrot_says_its_text_and_ends(parrot):
    tokens = support.teach(parrot, NUMBERS)
    sample = say(parrot)
    assert (sample.text, sample.token_ids) == (NUMBERS, tokens)
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_one_engine_serves_new_weights_of_the_same_shapes(parrot):
    assert say(parrot, " first").text == " first"
    assert say(parrot, " second text").text == " second text"


@pytest.mark.parametrize(
    "stop, text, hit",
    [
        (["STOP HERE"], " one two three ", "STOP HERE"),  # of several tokens
        (["TOP H"], " one two three S", "TOP H"),  # begins within a token and ends within one
        (["HERE", "two three"], " one ", "two three"),  # the one that is complete first
        (["three STOP HERE four", "STOP"], " one two three ", "STOP"),  # and not the one that begins first
        ([" one"], "", " one"),  # the first token
        (["five"], " one two three STOP HERE four ", "five"),  # the last one
        (["STOP HEROES", "absent"], NUMBERS, None),  # begins but does not come
        (["five."], NUMBERS, None),  # held back until the end
    ],
)
def test_stop_strings_cut_the_text(parrot, stop, text, hit):
    sample = say(parrot, stop=stop)
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, "stop", hit)


def test_a_stop_string_may_be_shown(parrot):
    assert say(parrot, stop=["TOP H"], include_stop_str_in_output=True).text == " one two three STOP H"


def test_the_tokens_up_to_the_one_that_completes_a_stop_string_are_kept(parrot):
    tokens = support.teach(parrot, NUMBERS)
    sample = say(parrot, stop=["TOP H"], logprobs=True)
    assert sample.token_ids == tokens[:6] and len(sample.logprobs) == 6


def test_a_stop_string_counts_from_min_tokens_on(parrot):
    assert say(parrot, stop=["two"], min_tokens=2).text == NUMBERS
    assert say(parrot, stop=["two", "four"], min_tokens=2).stop_reason == "four"
    assert say(parrot, stop=["two"], min_tokens=1).stop_reason == "two"


def test_the_end_of_text_does_not_come_before_min_tokens(parrot):
    num_tokens = len(support.teach(parrot, NUMBERS))
    sample = say(parrot, min_tokens=12, max_tokens=14)
    assert 2 not in sample.token_ids[:12] and len(sample.token_ids) >= 12
    assert len(say(parrot, min_tokens=num_tokens - 1).token_ids) == num_tokens


def test_ignoring_the_end_of_text_goes_on_and_keeps_the_users_stops(parrot):
    sample = say(parrot, ignore_eos=True, max_tokens=20)
    assert (len(sample.token_ids), sample.finish_reason) == (20, "length")
    assert sample.text == (NUMBERS + NUMBERS + NUMBERS)[: len(sample.text)], "the end-of-text token is not shown"
    # The second round is stopped.
    assert say(parrot, ignore_eos=True, stop=["five one"]).text == NUMBERS.removesuffix("five")
    first = support.teach(parrot, NUMBERS)[3]
    assert say(parrot, ignore_eos=True, stop_token_ids=[first]).stop_reason == first


def test_special_tokens_are_shown_if_asked(parrot):
    assert say(parrot, skip_special_tokens=False).text == NUMBERS + "<|im_end|>"
    shown = say(parrot, skip_special_tokens=False, stop=["<|im_end|>"])
    assert (shown.text, shown.stop_reason) == (NUMBERS, "<|im_end|>")
    spaced = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    assert say(parrot, **spaced).text == NUMBERS + " <|im_end|>"
    assert say(parrot, stop=[" <|"], **spaced).text == NUMBERS
    assert say(parrot, prompt="Say:<|im_start|>", text="now", **spaced).text == " now <|im_end|>"


def test_the_last_token_allowed_may_complete_a_stop_string(parrot):
    sample = say(parrot, stop=["TOP H"], max_tokens=6)
    assert (sample.finish_reason, sample.stop_reason, sample.text) == ("stop", "TOP H", " one two three S")
    sample = say(parrot, stop=["STOP HERE"], max_tokens=5)
    assert (sample.finish_reason, sample.text) == ("length", " one two three STOP"), "what was held back is shown"


def test_characters_of_several_tokens_come_whole(parrot):
    text = " a 🦜 and é, 中文"
    assert len(support.teach(parrot, text)) > len(text.split()) + 3
    assert say(parrot, text).text == text
    assert say(parrot, text, stop=["🦜"]).text == " a "


def test_a_character_that_max_tokens_cuts_is_replaced_at_the_end_alone(parrot):
    assert len(support.teach(parrot, " 🦜")) == 4
    assert say(parrot, " 🦜", max_tokens=2).text == " \ufffd"
    assert say(parrot, " 🦜", max_tokens=3).text == " 🦜"


def test_samples_stop_each_on_its_own(parrot):
    support.teach(parrot, NUMBERS)
    sampling = SamplingParams(temperature=0, max_tokens=30, n=3, stop=["four"])
    output = support.serve(parrot, ["Say:"], sampling)[0]
    assert [sample.text for sample in output.outputs] == [" one two three STOP HERE "] * 3


def test_the_text_of_a_fork_begins_with_the_text_so_far(parrot):
    support.teach(parrot, NUMBERS)
    parent = parrot.add_request("Say:", SamplingParams(temperature=0, max_tokens=30, stop=["four"]))
    for _ in range(3):
        parrot.step()
    child = parrot.fork(parent)[0]
    finished = support.finish(parrot)
    assert finished[child].outputs[0].text == finished[parent].outputs[0].text == " one two three STOP HERE "
    assert finished[child].prompt == "Say:"


def test_requests_with_their_own_stops_share_a_batch_and_a_small_pool(parrot):
    support.teach(parrot, NUMBERS)
    stops = [None, "three", ["HERE"], "five", None, "one"]
    sampling = [SamplingParams(temperature=0, max_tokens=30, stop=stop) for stop in stops]
    prompt = parrot.tokenizer.encode("tell me, please, ")
    before = parrot.stats.num_preemptions
    with support.small_pool(parrot, 16):
        outputs = support.serve(parrot, [(prompt * 4)[i : 20 + i] for i in range(6)], sampling)
    cut = [NUMBERS.split(stop)[0] if stop else NUMBERS for stop in (None, "three", "HERE", "five", None, "one")]
    assert [output.outputs[0].text for output in outputs] == cut
    assert parrot.stats.num_preemptions > before


def test_a_chat_is_a_prompt_and_its_text_is_told(parrot, monkeypatch):
    monkeypatch.setattr(parrot.tokenizer, "chat_templates", {"default": stored_tokenizers.CHATML})
    support.teach(parrot, " yes")
    message = [{"role": "user", "content": "Is it?"}]
    output = support.serve(parrot, [message], SamplingParams(temperature=0))[0]
    assert output.prompt == "<|im_start|>user\nIs it?<|im_end|>\n"
    assert output.prompt_token_ids == parrot.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert output.outputs[0].text == " yes"


def test_a_sentencepiece_models_text_continues_its_prompt():
    """The leading space of the first word belongs to the text, and bytes join to characters."""
    tokenizer = stored_tokenizers.sentencepiece("llama")
    text = " two 🦜 three"
    engine = support.build(support.parrot(tokenizer, [1000]))
    script = tokenizer.encode(text, add_special_tokens=False)
    prompt = tokenizer.encode("one")
    script = [token_id for token_id in script if token_id not in prompt]
    assert len(set(script)) == len(script)
    engine.weights = support.parrot(tokenizer, script).weights
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=30))
    parts = []
    while engine.has_unfinished_requests():
        parts += [output.outputs[0].text for output in engine.step()]
    assert tokenizer.decode(prompt) + parts[-1] == tokenizer.decode([*prompt, *script])
    assert "🦜" in parts[-1] and not any("\ufffd" in part for part in parts)
    support.assert_idle(engine)
