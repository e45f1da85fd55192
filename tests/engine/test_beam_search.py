"""Beam search: the sequences and scores of transformers, whatever runs beside it and however little memory there is."""

from __future__ import annotations

import engine_support as support
import numpy as np
import pytest
from engine_support import serve

import jpaged
from jpaged.engine.api import _able_to
from jpaged.host.sampling_params import SamplingParams

PREFIX = [(7 * i * i + 3) % 300 for i in range(30)]
OPTIONS = {"max_num_beams": 4, "max_num_seqs": 8}
BEAMS = SamplingParams(num_beams=4, n=4, temperature=0, max_tokens=14, logprobs=True, stop_token_ids=[73, 3, 105])


def beam_tokens(output):
    return [(sample.token_ids, sample.finish_reason, sample.stop_reason) for sample in output.outputs]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert beam_tokens(a) == beam_tokens(b)
        for x, y in zip(a.outputs, b.outputs, strict=True):
            np.testing.assert_allclose(x.score, y.score, atol=1e-5)
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def large():
    return support.of_few_shapes(support.build(support.tiny("llama"), **OPTIONS, num_pages=200), decode=2)


def test_scores_are_the_log_probabilities_over_the_length(large):
    output = serve(large, [PREFIX[:9]], BEAMS)[0]
    scores = [sample.score for sample in output.outputs]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    for sample in output.outputs:
        assert sample.score == pytest.approx(sum(sample.logprobs) / len(sample.token_ids), abs=1e-5)
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] in BEAMS.stop_token_ids else "length")
    support.assert_idle(large)


@pytest.fixture(scope="module", params=[(True, True), (False, False)])
def other(request):
    prefix_caching, async_scheduling = request.param
    options = {"prefix_caching": prefix_caching, "async_scheduling": async_scheduling}
    return support.of_few_shapes(support.build(support.tiny("llama"), **OPTIONS, **options, num_pages=200), decode=2)


@pytest.mark.parametrize("num_pages", [199, 40, 32, 27])
def test_beams_are_the_same_beside_others_and_in_little_memory(large, other, num_pages):
    """Several searches, samples and greedy requests at once, in less than one search would take without sharing."""
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=True)
    work = [
        (PREFIX[5:], greedy),
        (PREFIX[:29], BEAMS),
        (PREFIX[:12], greedy),
        (PREFIX[:9], SamplingParams(num_beams=3, n=2, temperature=0, max_tokens=9, length_penalty=0.0, logprobs=True)),
        (PREFIX[3:20], SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=8, ignore_eos=True, logprobs=True)),
        (PREFIX[:17], SamplingParams(num_beams=2, temperature=0, max_tokens=25, early_stopping=True, logprobs=True)),
        (PREFIX[8:24], BEAMS),
    ]
    expected = [serve(large, [prompt], one)[0] for prompt, one in work]
    other.reset_prefix_cache()
    before = other.stats.num_preemptions
    with support.small_pool(other, num_pages):
        found = serve(other, *zip(*work, strict=True))
    for a, b in zip(found, expected, strict=True):
        if a.outputs[0].score is None:
            assert support.tokens([a]) == support.tokens([b])
        else:
            assert_same([a], [b])
    preemptions = other.stats.num_preemptions - before
    assert sum(output.num_preemptions for output in found) == preemptions
    assert (preemptions > 0) == (num_pages < 30)
    support.assert_idle(other)


def test_beams_share_their_prompt_and_what_they_have_in_common(large):
    before = large.stats.num_scheduled_tokens
    large.reset_prefix_cache()
    large.add_request(PREFIX[:28], SamplingParams(num_beams=4, temperature=0, max_tokens=12, ignore_eos=True))
    most = 0
    while large.has_unfinished_requests():
        large.step()
        most = max(most, large.num_pages - large.num_free_pages)
    assert large.stats.num_scheduled_tokens - before <= 28 + 4 * 12
    assert most <= 7 + 4 * 3 < 4 * 10


def test_a_search_can_be_aborted_at_any_time(large):
    for steps in range(6):
        name = large.add_request(PREFIX[:9], BEAMS)
        for _ in range(steps):
            large.step()
        assert large.abort(name)
        support.assert_idle(large)


def test_generate_builds_an_engine_that_is_wide_enough():
    options = {**support.LIMITS, "max_num_seqs": 8, "warm_up": False, "num_pages": 200}  # the programs of `large`
    output = jpaged.generate(support.tiny("llama"), PREFIX[:9], BEAMS, **options)[0]
    assert len(output.outputs) == 4 and output.finished


def test_after_warm_up_a_search_compiles_nothing():
    options = {"max_num_beams": 2, "max_num_seqs": 2, "max_num_batched_tokens": 16, "warm_up": True}
    engine = support.build(support.tiny("llama"), **options, late_compile="error", num_pages=60)
    serve(engine, [PREFIX[:9]], SamplingParams(num_beams=2, temperature=0, max_tokens=8))
    assert engine.stats.num_compiles == 0 and engine.stats.num_page_copies > 0


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"num_beams": 5}, "num_beams is 5, but this engine was built for at most 4: give it max_num_beams=5"),
        ({"num_beams": 4, "max_tokens": None}, "4 beams of up to 64 tokens may take 64 pages, but the KV cache has 40"),
        ({"num_beams": 4, "stop_token_ids": list(range(9))}, "are more than the 12 candidates of this engine"),
    ],
)
def test_a_search_that_the_engine_cannot_serve_is_refused(sampling, words):
    engine = support.build(support.tiny("llama"), **OPTIONS, num_pages=41)
    with pytest.raises(ValueError, match=words):
        engine.add_request(PREFIX[:9], SamplingParams(**{"temperature": 0, "max_tokens": 8} | sampling))
    assert not engine.has_unfinished_requests()


def test_more_beams_than_rows_are_refused():
    with pytest.raises(ValueError, match=r"max_num_beams \(4\) must not exceed max_num_seqs \(2\)"):
        support.build(support.tiny("llama"), max_num_beams=4, max_num_seqs=2)
    engine = support.build(support.tiny("llama"), max_num_seqs=2)
    with pytest.raises(ValueError, match="built for at most 1: give it max_num_beams=3 and max_num_seqs=3"):
        engine.add_request(PREFIX[:9], SamplingParams(num_beams=3, temperature=0))


def test_generate_finds_room_for_as_many_beams_as_rows():
    searching, options = SamplingParams(num_beams=3, temperature=0), {"max_num_seqs": 3}
    assert _able_to(searching, options) == {"max_num_beams": 3}
    assert _able_to(searching, {}) == _able_to(searching, {"max_num_seqs": 8}) == {"max_num_beams": 4}
    assert _able_to(searching, {"max_num_beams": 5}) == {}


def test_a_search_cannot_be_forked(large):
    large.add_request(PREFIX[:9], BEAMS, request_id="beams")
    large.step()
    with pytest.raises(ValueError, match="'beams' is a beam search, which branches by itself, and cannot be forked"):
        large.fork("beams")
    large.abort("beams")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "temperature=1.0 contradicts num_beams=2.*set temperature=0"),
        ({"num_beams": 2, "temperature": 0, "top_k": 3}, "top_k=3 contradicts num_beams=2"),
        ({"num_beams": 2, "temperature": 0, "top_p": 0.5}, "top_p=0.5 contradicts"),
        ({"num_beams": 2, "temperature": 0, "stop": "x"}, "stop=.*contradicts"),
        ({"num_beams": 2, "temperature": 0, "n": 3}, r"n \(3\) must not exceed num_beams \(2\)"),
        ({"num_beams": 2, "temperature": 0, "best_of": 2}, "best_of=2 contradicts"),
        ({"num_beams": 0}, "num_beams must be a whole number from 1 .* to 64, got 0"),
        ({"num_beams": 65}, "num_beams must be .* got 65"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 is of a beam search: set num_beams above 1"),
        ({"early_stopping": True}, "early_stopping=True is of a beam search: set num_beams above 1"),
        ({"num_beams": 2, "temperature": 0, "early_stopping": "ever"}, "early_stopping must be True, False or 'never'"),
        (
            {"num_beams": 2, "temperature": 0, "early_stopping": 1},
            "early_stopping must be True.*, got 1",
        ),
        (
            {"num_beams": 2, "temperature": 0, "length_penalty": float("nan")},
            "length_penalty must be a number .* got nan",
        ),
        (
            {"num_beams": 2, "temperature": 0, "length_penalty": 10**400},
            "length_penalty must be a number",
        ),
    ],
)
def test_options_that_contradict_a_beam_search_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**options)


def test_a_search_in_which_nothing_may_follow_ends_with_what_there_is():
    greedy = SamplingParams(temperature=0, max_tokens=4)
    engine = support.of_few_shapes(support.build(support.tiny("llama"), **OPTIONS, num_pages=200), decode=2)
    search = SamplingParams(num_beams=2, n=2, temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request(PREFIX[:5], search, request_id="beams")
    engine.add_request(PREFIX[:5], greedy, request_id="other")
    group = engine._groups["beams"]
    advance = group.beams.advance
    group.beams.advance = lambda outputs, ids, logprobs: advance(outputs, ids, np.full_like(logprobs, -np.inf))
    finished = support.finish(engine)
    assert [sample.finish_reason for sample in finished["beams"].outputs] == ["length"]
    assert finished["beams"].outputs[0].token_ids == []
    assert len(finished["other"].outputs[0].token_ids) <= 4
    support.assert_idle(engine)


def test_beams_that_come_late_have_places_of_their_own(large):
    """Where fewer candidates than beams are possible, a search reaches its width in several steps."""
    name = large.add_request(PREFIX[:9], SamplingParams(num_beams=4, temperature=0, max_tokens=9, ignore_eos=True))
    follower = large.add_request(PREFIX[:5], support.GREEDY)
    group = large._groups[name]
    advance = group.beams.advance

    def few(outputs, ids, logprobs):
        logprobs = logprobs.copy()
        logprobs[:, 2 if len(outputs) < 3 else 4 :] = -np.inf
        return advance(outputs, ids, logprobs)

    group.beams.advance = few
    while name in large._groups:
        large.step()
        orders = [sample.request.order for sample in group.samples if not sample.request.finish_reason]
        assert len(set(orders)) == len(orders)
        others = [s.request.order for s in large._groups[follower].samples] if follower in large._groups else []
        assert not set(orders) & set(others)
    support.finish(large)
    support.assert_idle(large)


# transformers' results, see tests/data/README.md


def stored_cases(name: str):
    """(prompt, sampling, [(tokens, score, log-probabilities), ...]) of each stored case; eos ids are stop ids here."""
    with np.load(support.CHECKPOINTS / name / "beams.npz") as stored:
        data = dict(stored)

    def cut(flat: str, lengths: str):
        return [part.tolist() for part in np.split(data[flat], np.cumsum(data[lengths])[:-1])]

    sequences = list(zip(cut("token_ids", "lengths"), data["scores"].tolist(), cut("logprobs", "lengths"), strict=True))
    early = {"False": False, "True": True, "never": "never"}
    for i, (prompt, eos) in enumerate(
        zip(cut("prompt_token_ids", "prompt_lengths"), cut("eos_token_ids", "eos_lengths"))
    ):
        n = int(data["num_return_sequences"][i])
        sampling = SamplingParams(
            temperature=0,
            num_beams=int(data["num_beams"][i]),
            n=n,
            length_penalty=float(data["length_penalty"][i]),
            early_stopping=early[str(data["early_stopping"][i])],
            max_tokens=int(data["max_new_tokens"][i]),
            stop_token_ids=eos,
            ignore_eos=True,
            logprobs=True,
        )
        yield prompt, sampling, sequences[:n]
        del sequences[:n]


@pytest.mark.parametrize("name", ["mistral_sw8", "llama_tied_bias", "llama_multi_eos"])
def test_beams_are_those_of_transformers(name):
    """All cases at once: up to 16 sequences run together, in pages that hold only some of them."""
    cases = list(stored_cases(name))
    assert len(cases) == 30
    engine = support.build(
        support.tiny(name), max_num_beams=8, max_num_seqs=16, max_num_batched_tokens=32, num_pages=140, page_size=4
    )
    support.of_few_shapes(engine)
    found = serve(engine, [prompt for prompt, _, _ in cases], [sampling for _, sampling, _ in cases])
    for output, (_, sampling, expected) in zip(found, cases, strict=True):
        assert [sample.token_ids for sample in output.outputs] == [tokens for tokens, _, _ in expected], sampling
        for sample, (tokens, score, logprobs) in zip(output.outputs, expected, strict=True):
            assert sample.score == pytest.approx(score, rel=1e-4, abs=1e-4)
            np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-4)
            assert sample.finish_reason == ("stop" if tokens[-1] in sampling.stop_token_ids else "length")
    support.assert_idle(engine)
