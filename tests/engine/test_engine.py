"""`Engine`: tokens equal the references whatever the batch, aborts, ids, samples, what an output is."""

from __future__ import annotations

import dataclasses

import engine_support as support
import jax
import numpy as np
import pytest

from jpaged.engine.compile import CompiledSteps
from jpaged.engine.engine import Engine
from jpaged.engine.group import Group
from jpaged.host.beam_search import BeamSearch
from jpaged.host.page_tables import PageTables
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler

MIXED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=2, max_tokens=15, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.1, seed=4, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.02, seed=5, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
]


def prompts(n: int) -> list[list[int]]:
    """Prompts of 1 to 40 tokens."""
    rng = np.random.default_rng(n)
    return [rng.integers(3, 320, int(rng.integers(1, 41))).tolist() for _ in range(n)]


@pytest.mark.parametrize("name", support.LOADABLE)
def test_greedy_tokens_equal_the_reference_alone_and_preempted(name):
    stored = support.reference(name)
    expected = stored["greedy_cached" if "greedy_cached" in stored else "greedy"].tolist()
    # 24 pages of 4 hold two prompts of 40 tokens, but not their 20 new ones. Budget 16: each prompt comes in chunks.
    engine = support.build(support.tiny(name), max_num_seqs=2, num_pages=25)
    engine._buckets = engine._buckets._replace(decode=(2,))  # a shape less to compile for each checkpoint
    assert [support.tokens(support.serve(engine, [ids]))[0] for ids in stored["input_ids"]] == expected
    assert engine.stats.num_preemptions == 0
    together = support.serve(engine, list(stored["input_ids"]))
    assert support.tokens(together) == expected
    # A window of 8 tokens keeps three pages.
    assert (engine.stats.num_preemptions > 0) == (engine.model_config.sliding_window is None)
    support.assert_idle(engine)


def test_sampled_tokens_do_not_depend_on_the_neighbours(engine):
    asked = list(zip(prompts(6), MIXED, strict=True))
    alone = [support.tokens(support.serve(engine, [prompt], sampling))[0] for prompt, sampling in asked]
    together = support.serve(engine, [prompt for prompt, _ in asked], MIXED)
    assert support.tokens(together) == alone
    before = engine.stats.num_preemptions
    with support.small_pool(engine, 16):
        reverse = support.serve(engine, [prompt for prompt, _ in asked[::-1]], MIXED[::-1])
    assert engine.stats.num_preemptions > before
    assert support.tokens(reverse) == alone[::-1]


def test_the_synchronous_loop_gives_the_same_tokens_in_the_same_steps_of_the_device(engine, monkeypatch):
    asked = list(zip(prompts(6), MIXED, strict=True))
    started = []
    launch = Engine._launch
    monkeypatch.setattr(Engine, "_launch", lambda self, *args: started.append(len(args)) or launch(self, *args))
    ahead = support.tokens(support.serve(engine, [prompt for prompt, _ in asked], MIXED))
    assert started.count(2) > 5, "no step was started ahead"
    started.clear()
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, async_scheduling=False))
    assert support.tokens(support.serve(engine, [prompt for prompt, _ in asked], MIXED)) == ahead
    assert started.count(2) == 0


@pytest.fixture(scope="module")
def searching():
    return support.build(support.tiny("llama"), max_num_beams=3)


class Interrupt:
    """Raises at a call of a function: before it, or after it has done its work and its result is lost."""

    def __init__(self, function, at, after):
        self.function, self.left, self.after = function, at, after

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        result = self.function(*args, **kwargs)
        if self.left == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(
    "place", ["_steps", "_make_kv_pages", "_pool.acquire", "_pool.release", "_scheduler.schedule", "_scheduler.update"]
)
def test_after_an_interruption_anywhere_the_engine_goes_on_with_the_right_tokens(engine, monkeypatch, place, at, after):
    prompts = [[7] * 20, [8, 9], [11] * 5]
    expected = support.tokens(support.serve(engine, prompts))
    owner, name = engine, place
    if "." in place:
        owner, name = getattr(engine, place.split(".")[0]), place.split(".")[1]
    if place == "_make_kv_pages":  # it is called after an error
        engine._start_over()
    ids = [engine.add_request(prompt, support.GREEDY) for prompt in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Interrupt(getattr(owner, name), at, after))
        try:
            support.finish(engine)
        except KeyboardInterrupt:
            pass
    for request_id in ids:  # as `generate` does
        engine.abort(request_id)
    support.assert_idle(engine)
    assert support.tokens(support.serve(engine, prompts)) == expected


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Request, "end"),
        (Scheduler, "finish"),
        (PageTables, "give_back"),
        (PageTables, "publish"),
        (BeamSearch, "advance"),
        (Scheduler, "branch"),
        (Group, "output"),
        (Engine, "_record"),
    ],
)
def test_requests_that_an_interruption_met_go_on_and_all_are_told_of(searching, monkeypatch, owner, name, at, after):
    sampled = SamplingParams(temperature=1, seed=3, n=2, max_tokens=12, ignore_eos=True)
    beams = SamplingParams(temperature=0, num_beams=3, n=3, max_tokens=12)
    asked = [([7] * 20, support.GREEDY), ([8, 9], sampled), ([11] * 5, beams)]
    expected = support.tokens(support.serve(searching, *zip(*asked, strict=True)))
    ids = [searching.add_request(*one) for one in asked]
    finished = {}
    with monkeypatch.context() as patch:
        interrupt = Interrupt(getattr(owner, name), at, after)
        patch.setattr(owner, name, lambda *args: interrupt(*args))
        while searching.has_unfinished_requests():
            try:
                finished |= {output.request_id: output for output in searching.step() if output.finished}
            except KeyboardInterrupt:
                continue
    assert interrupt.left <= 0
    assert finished.keys() == set(ids)
    assert support.tokens([finished[request_id] for request_id in ids]) == expected
    support.assert_idle(searching)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_after_an_error_of_the_device_the_engine_goes_on_with_the_right_tokens(engine, monkeypatch, steps):
    asked = prompts(5)
    expected = support.tokens(support.serve(engine, asked))
    ids = [engine.add_request(prompt, support.GREEDY) for prompt in asked]
    for _ in range(steps):
        engine.step()

    def out_of_memory(weights, kv_pages, batch):
        jax.tree.map(lambda array: array.delete(), kv_pages)  # they were donated
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")

    with monkeypatch.context() as patch:
        patch.setattr(CompiledSteps, "__call__", lambda self, *args: out_of_memory(*args))
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            engine.step()
    finished = support.finish(engine)
    assert support.tokens([finished[request_id] for request_id in ids]) == expected


def test_samples_of_one_request_differ_and_are_repeatable(engine):
    sampling = SamplingParams(temperature=1, n=4, seed=42, max_tokens=12, ignore_eos=True)
    prompt = prompts(1)[0]
    first, second = (support.serve(engine, [prompt], sampling)[0] for _ in range(2))
    texts = support.tokens([first])
    assert texts == support.tokens([second])
    assert len(set(map(tuple, texts))) == 4
    assert [sample.index for sample in first.outputs] == [0, 1, 2, 3]
    single = support.serve(engine, [prompt], dataclasses.replace(sampling, n=1))
    assert support.tokens(single) == texts[:1], "the first of n samples is the one that n=1 draws"


def test_more_samples_than_rows_are_all_served(engine):
    sampling = SamplingParams(temperature=1, n=7, seed=0, max_tokens=5, ignore_eos=True)
    output = support.serve(engine, [[5, 6, 7]], sampling)[0]
    assert output.finished and [len(ids) for ids in support.tokens([output])] == [5] * 7


def test_equal_seeds_repeat_and_other_seeds_differ(engine):
    def draw(seed):
        return support.tokens(support.serve(engine, [[9, 8, 7]], SamplingParams(seed=seed, max_tokens=16)))[0]

    drawn = {seed: draw(seed) for seed in (0, 1, 2**32, 2**63, -1)}
    assert len(set(map(tuple, drawn.values()))) == 5
    assert all(draw(seed) == tokens for seed, tokens in drawn.items())
    assert draw(2**64 - 1) == drawn[-1], "seeds count modulo 2**64"


def test_without_a_seed_draws_differ(engine):
    sampling = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)
    first, second = support.tokens(support.serve(engine, [[9, 8, 7]] * 2, sampling))
    assert first != second


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 12])
def test_an_abort_at_any_time_leaves_the_others_as_they_were(engine, steps):
    given = prompts(6)
    expected = support.tokens(support.serve(engine, given))
    with support.small_pool(engine, 16):
        ids = [engine.add_request(prompt, support.GREEDY) for prompt in given]
        finished = {}
        for _ in range(steps):
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        aborted = [ids[i] for i in (1, 4, 0) if ids[i] not in finished]
        assert [engine.abort(request_id) for request_id in aborted] == [True] * len(aborted)
        assert engine.abort(aborted[0]) is False
        finished |= support.finish(engine)
    assert finished.keys() == set(ids) - set(aborted)
    assert all(support.tokens([finished[i]]) == [expected[ids.index(i)]] for i in finished)


def test_an_abort_ends_all_samples_even_after_one_has_finished(engine):
    # The first sample ends at its first token, the others go on: the end-of-text ids are what it draws.
    sampling = SamplingParams(temperature=1, n=3, seed=3, max_tokens=30, ignore_eos=True)
    firsts = [ids[0] for ids in support.tokens(support.serve(engine, [[4, 5]], sampling))]
    assert firsts[0] not in firsts[1:]
    request_id = engine.add_request([4, 5], dataclasses.replace(sampling, stop_token_ids=[firsts[0]]))
    output = engine.step()[0]
    assert [sample.finish_reason for sample in output.outputs] == ["stop", None, None] and not output.finished
    assert engine.abort(request_id)
    assert not engine.has_unfinished_requests() and engine.step() == []


def test_aborting_what_is_not_there_says_so(engine):
    assert engine.abort("nobody") is False
    request_id = engine.add_request([1, 2], support.GREEDY)
    support.finish(engine)
    assert engine.abort(request_id) is False


def test_a_name_may_be_chosen_and_used_again(engine):
    assert engine.add_request([1, 2], support.GREEDY, request_id="mine") == "mine"
    with pytest.raises(ValueError, match="'mine' is in use"):
        engine.add_request([1, 2], support.GREEDY, request_id="mine")
    assert set(support.finish(engine)) == {"mine"}
    engine.add_request([1, 2], support.GREEDY, request_id="mine")
    assert set(support.finish(engine)) == {"mine"}


def test_names_that_look_like_those_of_samples_do_not_clash(engine):
    two = dataclasses.replace(support.GREEDY, n=2)
    engine.add_request([1, 2], support.GREEDY, request_id="a/1")
    engine.add_request([1, 2], two, request_id="a")
    engine.add_request([1, 2], support.GREEDY, request_id="a/2")
    finished = support.finish(engine)
    assert set(finished) == {"a", "a/1", "a/2"} and len(finished["a"].outputs) == 2


def test_names_given_by_the_engine_avoid_those_in_use(engine):
    taken = int(engine.add_request([1, 2], support.GREEDY).rsplit("-", 1)[1])
    engine.add_request([1, 2], support.GREEDY, request_id=f"request-{taken + 1}")
    third = engine.add_request([1, 2], support.GREEDY)
    assert len(support.finish(engine)) == 3 and third != f"request-{taken + 1}"


def test_outputs_are_snapshots(engine):
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=True, n=2)
    engine.add_request([7, 8, 9], sampling)
    kept = []
    while engine.has_unfinished_requests():
        kept += engine.step()
    final = kept[-1].outputs[0]
    for i, output in enumerate(kept):
        sample = output.outputs[0]
        assert sample.token_ids == final.token_ids[: i + 1]
        assert sample.logprobs == final.logprobs[: i + 1]
        assert sample.cumulative_logprob == pytest.approx(sum(sample.logprobs))
        assert sample.finish_reason == ("length" if i >= 7 else None)
        assert output.finished == (i == 8)  # the second sample begins a step later, when the prompt is computed
        assert len(output.latencies[0].itl) == min(i, 7)
        assert (output.latencies[0].e2e_latency is not None) == (i >= 7)


def test_what_a_caller_does_to_an_output_or_prompt_does_not_reach_the_engine(engine):
    prompt = [7, 8, 9]
    expected = support.tokens(support.serve(engine, [prompt]))
    engine.add_request(prompt, support.GREEDY)
    prompt.clear()
    output = engine.step()[0]
    output.outputs[0].token_ids.clear()
    output.prompt_token_ids.clear()
    assert support.tokens(support.finish(engine).values()) == expected


def test_logprobs_are_those_of_the_unfiltered_distribution(engine):
    stored = support.reference("llama")
    ids, logits = stored["input_ids"][0].tolist(), stored["logits"][0]
    log_softmax = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for sampling in (
        SamplingParams(temperature=0, max_tokens=1, logprobs=True),
        SamplingParams(temperature=2, top_k=3, seed=7, max_tokens=1, logprobs=True),
    ):
        for length in (3, 21, 40):
            sample = support.serve(engine, [ids[:length]], sampling)[0].outputs[0]
            assert sample.logprobs[0] == pytest.approx(log_softmax[length - 1, sample.token_ids[0]], abs=2e-3)
    sample = support.serve(engine, [ids], SamplingParams(temperature=0, max_tokens=1))[0].outputs[0]
    assert sample.logprobs is None


def test_filters_leave_only_what_they_should(engine):
    stored = support.reference("llama")
    ids, logits = stored["input_ids"][0].tolist(), stored["logits"][0, -1]
    order = np.argsort(-logits)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits))
    nucleus = int(np.searchsorted(np.cumsum(probabilities[order]), 0.3)) + 1
    likely = int(np.sum(probabilities >= 0.5 * probabilities.max()))
    for options, allowed in (({"top_k": 2}, 2), ({"top_p": 0.3}, nucleus), ({"min_p": 0.5}, likely)):
        sampling = SamplingParams(temperature=1, max_tokens=1, n=48, seed=11, ignore_eos=True, **options)
        drawn = {sample[0] for sample in support.tokens(support.serve(engine, [ids], sampling))}
        assert drawn <= set(order[:allowed].tolist()), options
        assert len(drawn) > 1 or allowed == 1, options


def test_stats_add_up():
    engine = support.build(support.tiny("llama"))
    outputs = support.serve(engine, prompts(5))
    stats = engine.stats
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert stats.num_output_tokens == 5 * 20
    assert stats.num_preemptions == 0
    assert stats.num_scheduled_tokens == prompt_tokens + 5 * 19, "the last token of each is not computed"
    assert 0 < stats.num_decode_steps < stats.num_steps
    assert 0 < stats.kv_utilization_min <= stats.kv_utilization_mean <= 1
    assert 0 <= stats.padding < 0.5
    with support.small_pool(engine, 16):
        outputs = support.serve(engine, prompts(5))
    assert sum(output.num_preemptions for output in outputs) == engine.stats.num_preemptions > 0
    support.assert_idle(engine)


def test_first_come_first_served(engine):
    """A late short request does not overtake those that wait before it."""
    ids = [engine.add_request(prompt, support.GREEDY) for prompt in ([5] * 40, [6] * 40, [7] * 30, [8] * 30, [9])]
    seen = []
    while engine.has_unfinished_requests():
        seen += [output.request_id for output in engine.step() if output.request_id not in seen]
    assert seen == ids


def test_a_step_without_work_is_harmless(engine):
    steps = engine.stats.num_steps
    assert engine.step() == [] and engine.stats.num_steps == steps


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_kv_cache_may_be_of_lower_precision_than_the_weights(dtype):
    stored = support.reference("llama")
    engine = support.build(support.tiny("llama"), dtype=dtype, max_num_seqs=2)
    assert engine._kv_pages[0][0].dtype == dtype
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=True)
    for ids, logits in zip(stored["input_ids"], stored["logits"], strict=True):
        sample = support.serve(engine, [ids], sampling)[0].outputs[0]
        expected = logits[-1, sample.token_ids[0]] - np.logaddexp.reduce(logits[-1])
        assert sample.logprobs[0] == pytest.approx(expected, abs=0.05)


# How a request ends


def test_every_end_of_text_id_of_the_model_ends_the_text():
    stored = support.reference("llama_multi_eos")
    engine = support.build(support.tiny("llama_multi_eos"), max_num_seqs=2)
    outputs = support.serve(engine, list(stored["input_ids"]), SamplingParams(temperature=0, max_tokens=20))
    lengths = stored["stop_lengths"].tolist()
    assert support.tokens(outputs) == [
        ids[:length] for ids, length in zip(stored["greedy"].tolist(), lengths, strict=True)
    ]
    assert [(s.finish_reason, s.stop_reason) for output in outputs for s in output.outputs] == [("stop", None)] * 2
    ignoring = support.serve(engine, list(stored["input_ids"]), support.GREEDY)
    assert support.tokens(ignoring) == stored["greedy"].tolist()
    support.assert_idle(engine)


def test_stop_token_ids_end_the_text_and_are_told(engine):
    ids, greedy = support.reference("llama")["input_ids"][0], support.reference("llama")["greedy"][0].tolist()
    at = next(i for i in range(4, 20) if greedy[i] not in greedy[:i])
    sampling = dataclasses.replace(support.GREEDY, stop_token_ids=[1, greedy[at]])
    sample = support.serve(engine, [ids], sampling)[0].outputs[0]
    assert sample.token_ids == greedy[: at + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", greedy[at])


def test_no_ending_id_is_drawn_before_min_tokens(engine):
    ids, greedy = support.reference("llama")["input_ids"][0], support.reference("llama")["greedy"][0].tolist()
    sampling = dataclasses.replace(support.GREEDY, stop_token_ids=[greedy[2]], min_tokens=6)
    sample = support.serve(engine, [ids], sampling)[0].outputs[0]
    assert sample.token_ids[:2] == greedy[:2] and sample.token_ids[2] != greedy[2]
    assert greedy[2] not in sample.token_ids[:6] and len(sample.token_ids) >= 6


def test_max_tokens_and_max_model_len_end_with_length(engine):
    for prompt_length, max_tokens, expected in ((40, 1, 1), (40, 10, 10), (60, 10, 4), (63, None, 1), (10, None, 54)):
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        sample = support.serve(engine, [[9] * prompt_length], sampling)[0].outputs[0]
        assert (len(sample.token_ids), sample.finish_reason) == (expected, "length")
