"""Requests that are scored: which tokens of them are computed, what a batch asks for, and in what order the scores of
all rows and chunks come together. The stand-in for a step gives each target a number of its own, and NaN for none."""

import random

import numpy as np
import pytest

from jpaged.host import page_tables
from jpaged.host.batch import Buckets, pack
from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler

PAGE_SIZE, MAX_LEN, VOCAB = 4, 32, 1000


def make_scheduler(num_pages=100, max_num_batched_tokens=64, max_num_seqs=8, prefix_caching=True):
    scheduler = Scheduler(
        PagePool(num_pages + 1, PAGE_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_LEN,
        prefix_caching=prefix_caching,
    )
    scheduler.buckets = Buckets.make(max_num_seqs, max_num_batched_tokens, MAX_LEN, PAGE_SIZE)
    return scheduler


def add(scheduler, name, prompt, score_from=None, max_tokens=1):
    sampling = SamplingParams(max_tokens=None)
    request = Request(name, list(prompt), sampling, 0, frozenset(), max_tokens, score_from=score_from)
    scheduler.add(request)
    return request


def step(scheduler):
    """One step; {name: (start, num_tokens)}, the batch, and who gained something."""
    plan = scheduler.schedule()
    scheduler.check()
    batch, rows = pack(plan.rows, scheduler.rows, scheduler.buckets, VOCAB, with_targets=True)
    scores = None
    if batch.targets is not None:
        scores = np.where(batch.targets >= 0, -1000.0 * (batch.positions + 1) - batch.targets, np.nan)
    tokens = [7] * len(batch.context_lens)
    gained = scheduler.update(plan._replace(rows=rows), tokens, [-0.5] * len(tokens), None, scores)
    scheduler.check()
    return {request.request_id: (start, num_tokens) for request, start, num_tokens in rows}, batch, gained


def expected(request):
    tokens = request.prompt_token_ids
    return [-1000.0 * position - tokens[position] for position in range(request.score_from, len(tokens))]


def finish(scheduler):
    while scheduler.has_unfinished:
        step(scheduler)


@pytest.mark.parametrize("score_from", [1, 2, 9])
def test_each_token_from_there_on_is_the_target_of_the_one_before(score_from):
    scheduler = make_scheduler()
    request = add(scheduler, "a", range(100, 110), score_from)
    _, batch, gained = step(scheduler)
    assert batch.targets.tolist() == [-1] * (score_from - 1) + list(range(100 + score_from, 110)) + [-1] * 7
    assert gained == [request] and request.prompt_logprobs == expected(request)
    assert (request.finish_reason, request.output_token_ids) == ("stop", [])
    assert not scheduler.has_unfinished and scheduler.pool.num_used == 0


def test_rows_that_are_not_scored_have_no_targets_and_decode_batches_no_field():
    scheduler = make_scheduler()
    other = add(scheduler, "other", range(6), max_tokens=3)
    scored = add(scheduler, "scored", range(100, 105), 3)
    step(scheduler)
    again = add(scheduler, "again", range(200, 205), 2)
    planned, batch, gained = step(scheduler)
    assert planned == {"other": (6, 1), "again": (0, 5)}
    assert batch.targets[:6].tolist() == [-1, -1, 202, 203, 204, -1]
    assert gained == [other, again] and again.prompt_logprobs == expected(again)
    _, batch, _ = step(scheduler)
    assert batch.targets is None and batch.query_starts is None
    assert scored.prompt_logprobs == expected(scored) and other.output_token_ids == [7, 7, 7]


def test_without_the_option_a_batch_has_no_targets():
    scheduler = make_scheduler()
    add(scheduler, "a", range(6))
    assert pack(scheduler.schedule().rows, scheduler.rows, scheduler.buckets, VOCAB)[0].targets is None


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 9])
def test_scores_come_chunk_by_chunk_and_the_last_token_takes_no_step_of_its_own(budget):
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    request = add(scheduler, "a", range(100, 110), 4)
    steps = 0
    while scheduler.has_unfinished:
        step(scheduler)
        steps += 1
        assert request.prompt_logprobs == expected(request)[: max(0, min(budget * steps, 9) - 3)]
    assert steps == -(-9 // budget)


@pytest.mark.parametrize(("score_from", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)])
def test_the_token_before_the_first_that_is_scored_is_computed_whatever_is_found(score_from, found):
    scheduler = make_scheduler()
    add(scheduler, "before", range(14))
    finish(scheduler)
    request = add(scheduler, "a", range(14), score_from)
    assert step(scheduler)[0] == {"a": (found, 14 - found)}
    assert request.num_cached_tokens == found and request.prompt_logprobs == expected(request)


def test_what_another_publishes_meanwhile_is_taken_only_before_the_scores():
    scheduler = make_scheduler(max_num_batched_tokens=5)
    first = add(scheduler, "first", range(20), max_tokens=1)
    step(scheduler)  # page 0
    request = add(scheduler, "a", [*range(16), 90, 91, 92, 93], 10)
    while scheduler.has_unfinished:
        planned, _, _ = step(scheduler)
        if "a" in planned:
            assert planned["a"][0] <= 9 or request.prompt_logprobs
    assert request.prompt_logprobs == expected(request) and first.output_token_ids == [7]
    assert request.num_cached_tokens <= 8


def test_what_is_scored_can_be_found_afterwards():
    scheduler = make_scheduler()
    add(scheduler, "a", range(13), 3)
    finish(scheduler)
    add(scheduler, "b", range(13))
    assert step(scheduler)[0] == {"b": (12, 1)}


def test_a_prompt_of_all_that_a_model_can_hold_is_scored():
    scheduler = make_scheduler()
    request = add(scheduler, "a", range(MAX_LEN), MAX_LEN - 1)
    finish(scheduler)
    assert request.prompt_logprobs == expected(request)
    with pytest.raises(ValueError, match="leaves no room to generate"):
        add(scheduler, "b", range(MAX_LEN))
    with pytest.raises(ValueError, match="the prompt has 33 tokens"):
        add(scheduler, "c", range(MAX_LEN + 1), 4)


def test_a_restart_collects_again_what_it_computes_again():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    request = add(scheduler, "a", range(100, 120), 5)
    for _ in range(2):
        step(scheduler)
    assert request.prompt_logprobs == expected(request)[:8]
    scheduler.start_over()
    step(scheduler)
    assert request.prompt_logprobs == expected(request)[:2]
    finish(scheduler)
    assert request.prompt_logprobs == expected(request)


def run_random(seed):
    """Scored and other requests in a pool that is small; returns how many were preempted and what was found."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_pages=rng.choice([8, 9, 12, 30]),
        max_num_batched_tokens=rng.choice([1, 3, 7, 16, 64]),
        max_num_seqs=rng.choice([1, 3, 8]),
    )
    stems = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    to_come = []
    for number in range(12):
        stem = rng.choice(stems)[: rng.randrange(20)]
        prompt = stem + [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 11))]
        score_from = rng.choice([None, *range(1, len(prompt))]) if rng.random() < 0.8 else None
        to_come.append((str(number), prompt, score_from, rng.randrange(1, 12)))
    requests = []
    while to_come or scheduler.has_unfinished:
        while to_come and rng.random() < 0.6:
            requests.append(add(scheduler, *to_come.pop()))
        if scheduler.has_unfinished:
            step(scheduler)
        if rng.random() < 0.02:
            scheduler.start_over()
    for request in requests:
        if request.score_from is not None:
            assert request.prompt_logprobs == expected(request), request.request_id
            assert not request.output_token_ids
    assert scheduler.pool.num_used == 0
    return scheduler.num_preemptions, scheduler.num_cached_tokens


def test_any_pool_any_budget_any_sharing_gives_the_same_scores():
    preemptions, found = map(sum, zip(*(run_random(seed) for seed in range(150)), strict=True))
    assert preemptions > 100 and found > 1000


def test_scores_from_pages_that_know_none_are_noticed(monkeypatch):
    """The property is worth its name: without the limit on what is found, it fails."""
    monkeypatch.setattr(page_tables, "islice", lambda keys, _: keys)
    with pytest.raises(AssertionError, match="was never told the scores before token"):
        for seed in range(150):
            run_random(seed)


def test_scores_in_another_order_than_the_rows_are_noticed(monkeypatch):
    monkeypatch.setitem(globals(), "pack", lambda rows, *rest, **options: (pack_(rows, *rest, **options)[0], rows))
    with pytest.raises(AssertionError):
        for seed in range(150):
            run_random(seed)


pack_ = pack
