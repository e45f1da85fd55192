"""Sessions: scores are those of an independent reference, branches cost what differs, and nobody else notices."""

from __future__ import annotations

import dataclasses
import random

import engine_support as support
import jax
import numpy as np
import pytest
import stored_tokenizers

import jpaged
from jpaged.engine.compile import CompiledSteps
from jpaged.host import page_tables
from jpaged.host.request import RequestFailed
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def scorer():
    """An engine that can score; its prefix cache is empty when a test begins."""
    return support.build(support.tiny("llama"), prompt_logprobs=True)


@pytest.fixture
def engine(scorer):
    scorer.reset_prefix_cache()
    yield scorer
    support.assert_idle(scorer)


@pytest.fixture(scope="module")
def alone():
    """An engine that shares nothing."""
    return support.build(support.tiny("llama"), prefix_caching=False, prompt_logprobs=True)  # the same programs


@pytest.fixture(scope="module")
def talker():
    """A parrot with SmolLM2's tokenizer."""
    return support.build(support.parrot(stored_tokenizers.smollm2(), [1000]), prompt_logprobs=True)


def stored(name: str, row: int = 0) -> tuple[list[int], np.ndarray]:
    """40 tokens, and the log-probabilities of tokens 1 to 39 given those before, of an independent implementation."""
    reference = support.reference(name)
    ids, logits = reference["input_ids"][row], reference["logits"][row].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return ids.tolist(), logprobs[np.arange(39), ids[1:]]


def assert_scores(found, expected) -> None:
    assert all(type(score) is float for score in found)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


# Scores


@pytest.mark.parametrize("name", ["llama", "mistral_sw8", "llama_rope_dynamic"])
def test_scores_are_the_log_probabilities_of_the_reference(name, engine):
    if name != "llama":
        engine = support.build(support.tiny(name), prompt_logprobs=True)
    for row, begin in ((0, 1), (0, 11), (1, 39)):
        ids, expected = stored(name, row)
        assert_scores(engine.session(ids[:begin]).score(ids[begin:]), expected[begin - 1 :])
    support.assert_idle(engine)


@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("cached", [0, 7, 8, 40])
def test_chunks_and_what_is_found_change_no_score(engine, budget, cached, monkeypatch):
    monkeypatch.setattr(engine._scheduler, "max_num_batched_tokens", min(budget, 16))
    ids, expected = stored("llama")
    if cached:
        support.serve(engine, [ids[:cached]], dataclasses.replace(GREEDY, max_tokens=1))
    for begin in (8, 9, 17):
        before = engine.stats.num_cached_tokens
        assert_scores(engine.session(ids[:begin]).score(ids[begin:]), expected[begin - 1 :])
        found = engine.stats.num_cached_tokens - before
        assert found >= min(cached, begin - 1) // 4 * 4


def test_a_preempted_score_is_exact(engine):
    ids, expected = stored("llama")
    before = engine.stats.num_preemptions
    with support.small_pool(engine, 16):
        others = [engine.add_request(support.reference("llama")["input_ids"][1][:10], GREEDY) for _ in range(2)]
        others.append(engine.add_request(ids[20:26], dataclasses.replace(GREEDY, max_tokens=24)))
        scores = engine.session(ids[:5]).score(ids[5:])
        preemptions = engine.stats.num_preemptions - before
        finished = support.finish(engine)
    assert preemptions > 0, "the pool is too large to say anything"
    assert_scores(scores, expected[4:])
    assert finished.keys() == set(others)


def test_a_score_beside_other_requests_takes_the_results_of_its_own_row(engine):
    ids, expected = stored("llama", 1)
    names = [engine.add_request(ids[:length], GREEDY) for length in (3, 13)]
    engine.step()
    assert_scores(engine.session(ids[:2]).score(ids[2:]), expected[1:])
    assert support.finish(engine).keys() == set(names)


def test_a_score_leaves_the_session_and_costs_what_is_new(engine):
    ids, expected = stored("llama")
    session = engine.session(ids[:21])
    first = session.score(ids[21:25])
    computed = engine.stats.num_scheduled_tokens
    assert session.score(ids[21:25]) == pytest.approx(first, abs=1e-5)
    assert engine.stats.num_scheduled_tokens - computed == 25 - 20
    assert session.token_ids == ids[:21]
    assert_scores(first, expected[20:24])


def test_scores_count_as_no_output(engine):
    outputs = engine.stats.num_output_tokens
    engine.session([5, 6]).score([7, 8, 9])
    assert engine.stats.num_output_tokens == outputs


def test_all_that_a_model_can_hold_is_scored(engine):
    ids = [(7 * i * i + 3) % 300 for i in range(64)]
    scores = engine.session(ids[:40]).score(ids[40:])
    logprobs = jax.nn.log_softmax(jpaged.forward(support.tiny("llama"), np.array([ids]))[0])
    assert_scores(scores, np.asarray(logprobs)[np.arange(39, 63), ids[40:]])


# Branches


@pytest.mark.parametrize("length", [5, 8, 21])
def test_a_branch_gives_the_tokens_of_its_prompt_alone(engine, alone, length):
    ids, _ = stored("llama")
    session = engine.session(ids[:length])
    branch = session.fork()
    branch.append(ids[length : length + 3])
    output = branch.generate(GREEDY)
    sampling = dataclasses.replace(GREEDY, temperature=1.0, seed=3, logprobs=True)
    drawn = branch.generate(sampling)
    prompt = ids[: length + 3]
    assert output.token_ids == support.tokens(support.serve(alone, [prompt], GREEDY))[0]
    expected = support.serve(alone, [prompt + output.token_ids], sampling)[0].outputs[0]
    assert drawn.token_ids == expected.token_ids
    np.testing.assert_allclose(drawn.logprobs, expected.logprobs, atol=1e-5)
    assert branch.token_ids == prompt + output.token_ids + drawn.token_ids and len(branch) == len(prompt) + 12
    assert session.token_ids == ids[:length] and len(session) == length


def test_a_second_call_computes_the_tail_alone(engine):
    ids, _ = stored("llama")
    session = engine.session(ids[:28])
    session.generate(GREEDY)
    for last in (7, 8):
        branch = session.fork()
        branch.append([last])
        computed, cached = engine.stats.num_scheduled_tokens, engine.stats.num_cached_tokens
        branch.generate(GREEDY)  # of its 35 tokens 8 pages are there; then one token a step
        assert engine.stats.num_cached_tokens - cached == 32
        assert engine.stats.num_scheduled_tokens - computed == 3 + 5


def test_branches_and_scores_are_right_where_memory_keeps_nothing(engine, alone):
    ids, expected = stored("llama")
    tokens = support.tokens(support.serve(alone, [ids[:30]], GREEDY))
    session = engine.session(ids[:30])
    with support.small_pool(engine, 11):
        for _ in range(2):
            assert [session.fork().generate(GREEDY).token_ids] == tokens
            assert_scores(session.score(ids[30:]), expected[29:])
            engine.session(ids[::-1]).score([3, 4])  # takes all pages


def test_a_session_finds_only_pages_of_its_salt(engine):
    ids, _ = stored("llama")
    engine.session(ids[:20], cache_salt="a").generate(GREEDY)
    cached = engine.stats.num_cached_tokens
    engine.session(ids[:20], cache_salt="a").fork().score(ids[20:])
    assert engine.stats.num_cached_tokens == cached + 16
    engine.session(ids[:20]).generate(GREEDY)
    engine.session(ids[:20], cache_salt="b").score(ids[20:])
    assert engine.stats.num_cached_tokens == cached + 16
    engine.session(ids[:20], cache_salt="a").generate(dataclasses.replace(GREEDY, cache_salt="a"))
    assert engine.stats.num_cached_tokens > cached + 16


# Other requests


@pytest.mark.parametrize("call", ["generate", "score"])
def test_what_others_gain_meanwhile_is_returned_by_the_next_step(engine, alone, call):
    ids, _ = stored("llama")
    lengths = {"short": 2, "long": 12}
    sampling = {name: dataclasses.replace(GREEDY, max_tokens=length) for name, length in lengths.items()}
    expected = {name: support.tokens(support.serve(alone, [ids[:9]], one))[0] for name, one in sampling.items()}
    for name, one in sampling.items():
        engine.add_request(ids[:9], one, request_id=name)
    session = engine.session(ids[:20])
    if call == "generate":
        session.generate(dataclasses.replace(GREEDY, max_tokens=5))
    else:
        session.score(ids[20:])
    with pytest.raises(ValueError, match="request_id 'short' is in use"):
        engine.add_request(ids[:9], request_id="short")
    seen: dict[str, list[int]] = {"short": [], "long": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(len(output.outputs[0].token_ids))
            if output.finished:
                assert output.outputs[0].token_ids == expected[output.request_id]
    assert seen == {name: list(range(1, length + 1)) for name, length in lengths.items()}
    assert engine.step() == []


def test_what_an_aborted_request_had_gained_is_dropped(engine):
    ids, _ = stored("llama")
    engine.add_request(ids[:5], dataclasses.replace(GREEDY, max_tokens=2), request_id="ended")
    engine.add_request(ids[:5], dataclasses.replace(GREEDY, max_tokens=30), request_id="runs")
    engine.session(ids[:7]).generate(GREEDY)
    assert engine.abort("ended") and engine.abort("runs") and not engine.abort("ended")
    assert not engine.has_unfinished_requests() and engine.step() == []


# A tree

dense = jax.jit(lambda params, tokens: jax.nn.log_softmax(jpaged.forward(params, tokens)))


def logprobs_of(ids: list[int]) -> np.ndarray:
    """The whole distribution after each token, of the model without pages: what follows changes nothing before it."""
    return np.asarray(dense(support.tiny("llama"), np.array([ids + [0] * (64 - len(ids))])))[0, : len(ids)]


@pytest.mark.parametrize("seed", range(6))
def test_any_tree_in_any_pool_beside_any_requests_gives_what_the_model_gives(engine, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(engine._scheduler, "max_num_batched_tokens", rng.choice([3, 8, 16]))
    nodes = [engine.session([rng.randrange(320) for _ in range(length)]) for length in (1, 6, 13)]
    names, finished = set(), set()
    with support.small_pool(engine, rng.choice([16, 18, 30])):
        for _ in range(20):
            node = rng.choice(nodes)
            if len(node) > 50:
                nodes.remove(node)
                nodes.append(engine.session([len(nodes)]))
                continue
            more, before = [rng.randrange(320) for _ in range(rng.randrange(1, 9))], node.token_ids
            call = rng.choice(["fork", "append", "generate", "score", "score", "others"])
            if call == "fork":
                nodes.append(node.fork())
            elif call == "append":
                node.append(more)
                assert node.token_ids == before + more
            elif call == "generate":
                output = node.generate(SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=True))
                assert node.token_ids == before + output.token_ids
                expected = logprobs_of(node.token_ids)[len(before) - 1 : -1]
                np.testing.assert_allclose(output.logprobs, expected[range(5), output.token_ids], atol=1e-4)
                assert (expected.max(axis=-1) - output.logprobs < 1e-3).all(), "not the likeliest tokens"
            elif call == "score":
                expected = logprobs_of(before + more)[len(before) - 1 : -1]
                assert_scores(node.score(more), expected[range(len(more)), more])
                assert node.token_ids == before
            else:
                sampling = SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True, n=rng.choice([1, 2]))
                names.add(engine.add_request(before[:9], sampling))
            if rng.random() < 0.2:
                finished |= {output.request_id for output in engine.step() if output.finished}
        finished |= support.finish(engine).keys()
    assert finished == names


# Interruptions


@pytest.mark.parametrize("call", ["generate", "score"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("place", ["_launch", "_outputs", "_record"])
def test_an_interruption_leaves_the_session_as_it_was_and_no_request(engine, alone, call, at, place, monkeypatch):
    ids, expected = stored("llama")
    other = engine.add_request(ids[:5], GREEDY)
    session = engine.session(ids[:20])
    original, calls = getattr(engine, place), [0]

    def interrupted(*args):
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(GREEDY) if call == "generate" else session.score(ids[20:])
    assert session.token_ids == ids[:20] and list(engine._groups) == [other]
    found = support.finish(engine)[other]
    assert support.tokens([found]) == support.tokens(support.serve(alone, [ids[:5]], GREEDY))
    assert_scores(session.score(ids[20:]), expected[19:])


@pytest.mark.parametrize("kind", ["processor", "grammar"])
def test_another_request_that_fails_is_told_of_by_step_and_not_by_the_session(talker, kind):
    def fail(token_ids, logits):
        raise RuntimeError("no")

    structured = Structured(regex="a{1000000}") if kind == "grammar" else None
    processor = fail if kind == "processor" else None
    sampling = SamplingParams(max_tokens=9, structured=structured, logits_processor=processor)
    failing = [talker.add_request("Go", sampling) for _ in range(2)]
    assert len(talker.session("Hello").generate(GREEDY).token_ids) == 6
    with pytest.raises(RequestFailed):
        talker.session("Hello").generate(sampling)
    found = []
    while talker.has_unfinished_requests():
        with pytest.raises(RequestFailed) as caught:
            talker.step()
        found.append(caught.value.request_id)
    assert sorted(found) == sorted(failing)
    support.assert_idle(talker)


# Text


def test_text_is_appended_generated_and_shown(talker):
    talker.weights = support.parrot(talker.tokenizer, [1000]).weights
    said = support.teach(talker, " small house.")
    session = talker.session("Once upon a time")
    session.append(" there was a")
    assert session.text == "Once upon a time there was a" and len(session) == len(session.token_ids)
    branch = session.fork()
    output = branch.generate(SamplingParams(temperature=0, max_tokens=9))
    assert (output.text, output.token_ids, output.finish_reason) == (" small house.", said, "stop")
    assert branch.text == "Once upon a time there was a small house." and branch.token_ids[-1] == said[-1]
    assert session.text == "Once upon a time there was a"
    likely, unlikely = session.score(" small house."), session.score(" small dog.")
    assert len(likely) == len(said) - 1 and sum(likely) > sum(unlikely)
    assert repr(session) == f"Session({len(session)} tokens)"
    support.assert_idle(talker)


def test_messages_begin_a_session(talker, monkeypatch):
    monkeypatch.setattr(talker.tokenizer, "chat_templates", {"default": stored_tokenizers.CHATML})
    session = talker.session([{"role": "user", "content": "Hi"}])
    assert session.token_ids == talker.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n", add_special_tokens=False)


@pytest.mark.parametrize("name", ["smollm2", "llama", "gemma"])
@pytest.mark.parametrize("text", [" there was", "ing", "\nhello", "  two", "a\n", " ", "é", "\n\n"])
def test_what_is_appended_reads_as_it_is_written(name, text):
    """The SentencePiece model of "llama" puts a space in front of every text."""
    tokenizer = stored_tokenizers.smollm2() if name == "smollm2" else stored_tokenizers.sentencepiece(name)
    begin = tokenizer.encode("Once upon a time")
    assert tokenizer.decode(begin + tokenizer.encode_continuation(text)) == "Once upon a time" + text


# Bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.append([]), "the continuation is empty: give at least one character or token id"),
        (lambda s: s.append(""), "the continuation is empty: give at least one character or token id"),
        (lambda s: s.score([]), "the continuation is empty"),
        (lambda s: s.append(np.zeros(0, np.int32)), "the prompt is empty|the continuation is empty"),
        (lambda s: s.append([5, 320]), "token id 320 is outside the vocabulary, which has ids 0 to 319"),
        (lambda s: s.score([-1]), "token id -1 is outside the vocabulary"),
        (lambda s: s.append([1.5]), "token ids must be whole numbers, got 1.5"),
        (lambda s: s.append(7), "text or token ids, got 7"),
        (lambda s: s.append(" text"), "these params have no tokenizer"),
        (lambda s: s.score(" text"), "these params have no tokenizer"),
        (lambda s: s.text, "these params have no tokenizer: read token_ids"),
        (lambda s: s.append([{"role": "user", "content": "Hi"}]), "a continuation must be text or token ids, got mess"),
        (lambda s: s.append([9] * 60), "the session would have 65 tokens, but max_model_len is 64: give it fewer or"),
        (lambda s: s.score([9] * 60), "session and continuation have 65 tokens together, but max_model_len is 64: sho"),
        (lambda s: s.generate(SamplingParams(n=2)), "a session is one sequence, got n=2: fork it for others"),
        (lambda s: s.generate(SamplingParams(best_of=3)), "a session is one sequence, got best_of=3: fork it"),
        (lambda s: s.generate(SamplingParams(num_beams=2, temperature=0)), "one sequence, got num_beams=2: fork it"),
        (lambda s: s.generate({"n": 1}), "sampling must be SamplingParams, got dict"),
        (lambda s: s.generate(SamplingParams(cache_salt="x")), "has cache_salt='mine' and sampling 'x': give it to"),
        (lambda s: s.generate(SamplingParams(stop_token_ids=[320])), "stop_token_ids has 320"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(engine, call, words):
    session = engine.session([5, 6, 7, 8, 9], cache_salt="mine")
    with pytest.raises(ValueError, match=words):
        call(session)
    assert session.token_ids == [5, 6, 7, 8, 9] and not engine.has_unfinished_requests()


def test_a_full_session_is_told_that_nothing_fits(engine):
    session = engine.session([5] * 60)
    assert len(session.generate(dataclasses.replace(GREEDY, max_tokens=20)).token_ids) == 4
    assert len(session) == 64
    with pytest.raises(ValueError, match="64 tokens and max_model_len is 64, which must also hold what is generated"):
        session.generate(GREEDY)
    with pytest.raises(ValueError, match="have 65 tokens together"):
        session.score([5])


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "the prompt is empty"),
        ("text", {}, "these params have no tokenizer"),
        ([320], {}, "token id 320 is outside the vocabulary"),
        ([5] * 65, {}, "the session would have 65 tokens, but max_model_len is 64"),
        ([5], {"cache_salt": 1}, "cache_salt must be text or None, got 1"),
    ],
)
def test_a_session_that_cannot_begin_is_refused(engine, prompt, options, words):
    with pytest.raises(ValueError, match=words):
        engine.session(prompt, **options)


def test_sessions_need_the_prefix_cache_and_scores_their_steps():
    engine = support.build(support.tiny("llama"), prefix_caching=False)
    with pytest.raises(ValueError, match="prefix_caching=False: build it with prefix_caching=True"):
        engine.session([5])
    session = support.build(support.tiny("llama")).session([5])
    with pytest.raises(ValueError, match="score needs an engine with prompt_logprobs=True"):
        session.score([6])
    with pytest.raises(ValueError, match="prompt_logprobs must be True or False, got 1"):
        jpaged.EngineConfig(prompt_logprobs=1)


# Programs


def test_after_warm_up_sessions_compile_nothing():
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "warm_up": True, "late_compile": "error"}
    engine = support.build(support.tiny("llama"), prompt_logprobs=True, **limits)
    ids, expected = stored("llama")
    engine.session(ids[:4]).score(ids[4:5])  # what JAX itself compiles for the first transfer of a kind
    before = engine._compile_counter.requests
    other = engine.add_request(ids[:3], GREEDY)
    session = engine.session(ids[:11])
    for begin, end in ((11, 12), (11, 20), (11, 40)):
        assert_scores(session.score(ids[begin:end]), expected[begin - 1 : end - 1])
    session.generate(GREEDY)
    assert engine._compile_counter.requests == before and engine.stats.num_compiles == 0
    assert support.finish(engine).keys() == {other}
    support.assert_idle(engine)


def test_without_the_option_the_programs_are_as_ever(monkeypatch):
    lowered = {}
    for scored in (False, True):
        engine = support.build(support.tiny("llama"), prompt_logprobs=scored)
        for shape in ((16, 4, False), (4, 4, True)):
            lowered[scored, shape] = engine._steps._lower(shape).as_text()
        assert (16 if scored else None) == _num_targets(engine)
    assert lowered[False, (4, 4, True)] == lowered[True, (4, 4, True)], "decode batches have no targets"
    assert lowered[False, (16, 4, False)] != lowered[True, (16, 4, False)]


def _num_targets(engine):
    seen = []
    launch = engine._launch
    engine._launch = lambda *args: seen.append(launch(*args)) or seen[-1]
    support.serve(engine, [[5, 6, 7]], dataclasses.replace(GREEDY, max_tokens=1))
    targets, logprobs = seen[0].batch.targets, seen[0].sampled.prompt_logprobs
    assert (targets is None) == (logprobs is None)
    return None if targets is None else len(targets)


# The tests are worth their names: they fail under each of these bugs, planted on purpose.


def _shift_the_targets(patch):
    from jpaged.host import batch

    targets = batch._targets
    patch.setattr(batch, "_targets", lambda *args: np.roll(targets(*args), 1))


def _find_pages_beyond_the_scores(patch):
    patch.setattr(page_tables, "islice", lambda keys, _: keys)


def _take_the_results_of_another_token(patch):
    call = CompiledSteps.__call__

    def changed(self, *args):
        kv_pages, sampled = call(self, *args)
        logprobs = sampled.prompt_logprobs
        return kv_pages, sampled._replace(prompt_logprobs=None if logprobs is None else np.roll(logprobs, -1))

    patch.setattr(CompiledSteps, "__call__", changed)


def _score_with_a_temperature(patch):
    call = CompiledSteps.__call__

    def changed(self, *args):
        kv_pages, sampled = call(self, *args)
        logprobs = sampled.prompt_logprobs
        return kv_pages, sampled._replace(prompt_logprobs=None if logprobs is None else np.asarray(logprobs) * 0.9)

    patch.setattr(CompiledSteps, "__call__", changed)


@pytest.mark.parametrize(
    "bug",
    [
        _shift_the_targets,
        _find_pages_beyond_the_scores,
        _take_the_results_of_another_token,
        _score_with_a_temperature,
    ],
)
def test_a_planted_bug_is_found(engine, bug, monkeypatch):
    ids, expected = stored("llama")
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        bug(patch)
        for begin in (9, 17, 21):
            assert_scores(engine.session(ids[:begin]).score(ids[begin:]), expected[begin - 1 :])
    for begin in (9, 17, 21):
        assert_scores(engine.session(ids[:begin]).score(ids[begin:]), expected[begin - 1 :])
