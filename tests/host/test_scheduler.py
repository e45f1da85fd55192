"""What the scheduler does, one rule a test. That tokens come out right is tested in test_scheduler_property.py."""

import pytest

from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request, RequestStatus
from jpaged.host.sampling_params import MAX_BANNED_IDS, SamplingParams
from jpaged.host.scheduler import Scheduler

EOS = 2


def make_scheduler(num_pages=100, page_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64):
    return Scheduler(
        PagePool(num_pages + 1, page_size),  # and the null page
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        prefix_caching=False,  # what it does: test_sharing.py
        reserve=0,
    )


def make_request(name, num_prompt_tokens=4, max_tokens=100, eos=(EOS,), **sampling):
    prompt = list(range(10, 10 + num_prompt_tokens))
    return Request(name, prompt, SamplingParams(max_tokens=None, **sampling), 0, frozenset(eos), max_tokens)


def add(scheduler, *names, **options):
    requests = [make_request(name, **options) for name in names]
    for request in requests:
        scheduler.add(request)
    return requests[0] if len(requests) == 1 else requests


def planned(plan):
    """{name: (start, num_tokens)} in the plan's order."""
    return {request.request_id: (start, num_tokens) for request, start, num_tokens in plan.rows}


def step(scheduler, token=7):
    """One step in which every row draws `token`; what was planned."""
    plan = scheduler.schedule()
    scheduler.check()
    update(scheduler, plan, token)
    return planned(plan)


def update(scheduler, plan, token=7):
    gained = scheduler.update(plan, [token] * len(plan.rows), [-0.5] * len(plan.rows))
    scheduler.check()
    return gained


# What a step holds


def test_a_new_request_is_given_its_whole_prompt_and_then_a_token_a_step():
    scheduler = make_scheduler()
    request = add(scheduler, "a", num_prompt_tokens=5)
    assert step(scheduler) == {"a": (0, 5)}
    assert step(scheduler) == {"a": (5, 1)}
    assert step(scheduler) == {"a": (6, 1)}
    assert request.output_token_ids == [7, 7, 7]


def test_with_nothing_to_do_there_is_no_plan():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    add(scheduler, "a", max_tokens=1)
    step(scheduler)
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished


def test_prompts_and_single_tokens_share_a_step():
    scheduler = make_scheduler()
    add(scheduler, "a")
    step(scheduler)
    add(scheduler, "b", num_prompt_tokens=6)
    assert step(scheduler) == {"a": (4, 1), "b": (0, 6)}


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = add(scheduler, "a", num_prompt_tokens=10)
    plans = [scheduler.schedule()]
    assert update(scheduler, plans[0]) == []
    plans.append(scheduler.schedule())
    assert update(scheduler, plans[1]) == []
    assert request.output_token_ids == []
    plans.append(scheduler.schedule())
    assert update(scheduler, plans[2]) == [request]
    assert [planned(plan) for plan in plans] == [{"a": (0, 4)}, {"a": (4, 4)}, {"a": (8, 2)}]


def test_the_budget_is_used_to_the_last_token():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", "b", "c")
    plan = scheduler.schedule()
    assert planned(plan) == {"a": (0, 4), "b": (0, 4), "c": (0, 2)}
    assert plan.num_tokens == 10
    update(scheduler, plan)
    assert step(scheduler) == {"a": (4, 1), "b": (4, 1), "c": (2, 2)}


def test_running_requests_come_before_waiting_ones():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "a", "b")
    assert step(scheduler) == {"a": (0, 4)}
    assert step(scheduler) == {"a": (4, 1), "b": (0, 3)}
    assert step(scheduler) == {"a": (5, 1), "b": (3, 1)}


def test_when_the_budget_is_smaller_than_the_number_running_the_oldest_are_served():
    scheduler = make_scheduler(max_num_batched_tokens=2)
    add(scheduler, "a", "b", "c", num_prompt_tokens=1, max_tokens=2)
    assert step(scheduler) == {"a": (0, 1), "b": (0, 1)}
    assert step(scheduler) == {"a": (1, 1), "b": (1, 1)}
    assert step(scheduler) == {"c": (0, 1)}


def test_at_most_max_num_seqs_requests_run():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, "a", "b", "c", max_tokens=2)
    assert list(step(scheduler)) == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert list(step(scheduler)) == ["a", "b"]
    assert list(step(scheduler)) == ["c"]


def test_a_step_that_was_never_run_is_planned_again():
    scheduler = make_scheduler()
    add(scheduler, "a")
    assert planned(scheduler.schedule()) == planned(scheduler.schedule()) == {"a": (0, 4)}
    scheduler.check()


# A step ahead of the results


def test_a_step_ahead_gives_each_row_the_token_that_is_being_drawn():
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", "b", num_prompt_tokens=4)
    step(scheduler)
    plan = scheduler.schedule()
    ahead = scheduler.ahead(plan)
    assert planned(plan) == {"a": (4, 1), "b": (4, 1)}
    assert planned(ahead) == {"a": (5, 1), "b": (5, 1)}
    update(scheduler, plan)
    further = scheduler.ahead(ahead)
    update(scheduler, ahead)
    assert planned(further) == {"a": (6, 1), "b": (6, 1)}
    assert a.num_computed_tokens == b.num_computed_tokens == 6


def test_there_is_no_step_ahead_where_a_request_ends_by_its_length_is_aborted_or_could_start():
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, "a", max_tokens=3)
    add(scheduler, "b", max_tokens=9)
    step(scheduler)
    plan = scheduler.schedule()
    assert scheduler.ahead(plan) is not None
    add(scheduler, "c")
    assert scheduler.ahead(plan) is None
    scheduler.abort("c")
    assert scheduler.ahead(plan) is not None
    update(scheduler, plan)
    plan = scheduler.schedule()
    assert scheduler.ahead(plan) is None  # "a" ends with this step's token
    scheduler.abort("a")
    assert scheduler.ahead(plan) is None


def test_a_step_ahead_preempts_nobody_and_takes_no_page_if_not_all_are_free():
    scheduler = make_scheduler(num_pages=4, page_size=4, max_model_len=12)
    add(scheduler, "a", "b", num_prompt_tokens=6)
    step(scheduler)
    plan = scheduler.schedule()  # tokens 6; 7 still fits the pages
    assert scheduler.ahead(plan) is not None
    update(scheduler, plan)
    plan = scheduler.schedule()
    assert scheduler.ahead(plan) is None  # token 8 of each takes a page, and none is free
    assert scheduler.num_preemptions == 0 and scheduler.pool.num_free == 0


def test_a_stop_token_wastes_the_row_of_the_step_ahead():
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", "b")
    step(scheduler)
    plan = scheduler.schedule()
    ahead = scheduler.ahead(plan)
    scheduler.update(plan, [EOS, 7], [-0.5, -0.5])
    assert a.finish_reason == "stop"
    assert update(scheduler, ahead) == [b]
    assert a.output_token_ids == [7, EOS]


# Pages


def test_a_page_is_taken_only_when_a_token_needs_it():
    scheduler = make_scheduler(page_size=4)
    request = add(scheduler, "a", num_prompt_tokens=3)
    held = []
    for _ in range(7):
        step(scheduler)
        held.append(len(request.page_ids))
    assert held == [1, 1, 2, 2, 2, 2, 3]  # 3 4 5 6 7 8 9 tokens computed
    assert scheduler.num_held_tokens == 9


def test_the_block_table_lists_the_pages_and_is_padded_with_the_null_page():
    scheduler = make_scheduler(page_size=4, max_model_len=20)
    request = add(scheduler, "a", num_prompt_tokens=8)
    step(scheduler)
    step(scheduler)
    assert request.block_table.tolist() == [*request.page_ids, 0, 0]
    assert len(request.page_ids) == 3


def test_a_request_starts_only_if_all_its_present_tokens_find_free_pages():
    scheduler = make_scheduler(num_pages=5, page_size=4, max_model_len=20, max_num_batched_tokens=8)
    add(scheduler, "a", num_prompt_tokens=5)  # holds 2 pages, 3 are free
    step(scheduler)
    add(scheduler, "b", num_prompt_tokens=13)  # 4 pages, though 2 would do for the first chunk
    assert step(scheduler) == {"a": (5, 1)}
    scheduler.abort("b")
    add(scheduler, "c", num_prompt_tokens=12)
    assert step(scheduler) == {"a": (6, 1), "c": (0, 7)}


def test_pages_are_not_reserved_for_tokens_of_later_steps():
    scheduler = make_scheduler(num_pages=5, page_size=4, max_model_len=20, max_num_batched_tokens=8)
    request = add(scheduler, "a", num_prompt_tokens=18)
    step(scheduler)
    assert (len(request.page_ids), scheduler.pool.num_free) == (2, 3)


def test_a_waiting_request_that_does_not_fit_blocks_those_behind_it():
    scheduler = make_scheduler(num_pages=5, page_size=4, max_model_len=20)
    add(scheduler, "a", num_prompt_tokens=8)
    step(scheduler)
    add(scheduler, "long", num_prompt_tokens=13)  # 4 pages; 3 are free
    add(scheduler, "short", num_prompt_tokens=1)
    assert list(step(scheduler)) == ["a"]
    scheduler.abort("a")
    assert list(step(scheduler)) == ["long", "short"]


def test_a_request_as_long_as_the_pool_is_served():
    scheduler = make_scheduler(num_pages=2, page_size=4, max_model_len=8)
    request = add(scheduler, "a", num_prompt_tokens=7)
    step(scheduler)
    assert request.finish_reason == "length"
    assert scheduler.pool.num_free == 2


# Preemption


def preempted():
    """Two requests on four pages, one step before the pool is too small for both; both have drawn 3 tokens."""
    scheduler = make_scheduler(num_pages=4, page_size=4, max_model_len=16)
    old, young = add(scheduler, "old", "young", num_prompt_tokens=6)
    for token in (3, 4, 5):
        step(scheduler, token)
    return scheduler, old, young


def test_out_of_pages_the_last_come_is_preempted():
    scheduler, old, young = preempted()
    assert step(scheduler) == {"old": (8, 1)}
    assert (old.num_preemptions, young.num_preemptions, scheduler.num_preemptions) == (0, 1, 1)
    assert young.status is RequestStatus.WAITING
    assert (young.page_ids, young.num_computed_tokens) == ([], 0)


def test_a_preempted_request_keeps_its_outputs_and_computes_them_again():
    scheduler, old, young = preempted()
    step(scheduler)
    assert young.output_token_ids == [3, 4, 5]
    scheduler.abort("old")
    assert step(scheduler, token=6) == {"young": (0, 9)}
    assert young.output_token_ids == [3, 4, 5, 6]
    assert young.output_logprobs == [-0.5] * 4


def test_a_preempted_request_is_the_first_to_start_again():
    scheduler, old, young = preempted()
    add(scheduler, "new")
    step(scheduler)
    assert [request.request_id for request in scheduler.waiting] == ["young", "new"]


def test_nobody_starts_in_the_step_of_a_preemption():
    scheduler, old, young = preempted()
    small = add(scheduler, "small", num_prompt_tokens=1)
    step(scheduler)
    assert scheduler.pool.num_free == 1  # which is enough for it
    assert small.status is RequestStatus.WAITING


def test_a_request_may_have_to_preempt_itself():
    scheduler = make_scheduler(num_pages=4, page_size=4, max_model_len=16)
    add(scheduler, "old", num_prompt_tokens=9)  # 3 pages until it has 12 tokens
    young = add(scheduler, "young", num_prompt_tokens=4)
    step(scheduler)
    assert step(scheduler) == {"old": (9, 1)}
    assert young.num_preemptions == 1


def test_several_may_be_preempted_in_one_step_and_keep_their_order():
    scheduler = make_scheduler(num_pages=6, page_size=1, max_model_len=6)
    add(scheduler, "a", "b", num_prompt_tokens=2)
    add(scheduler, "c", "d", num_prompt_tokens=1)
    step(scheduler)
    assert step(scheduler) == {"a": (2, 1), "b": (2, 1)}
    assert [request.request_id for request in scheduler.waiting] == ["c", "d"]


def test_the_oldest_request_is_never_preempted():
    scheduler = make_scheduler(num_pages=4, page_size=1, max_model_len=4)
    names = [f"r{index}" for index in range(4)]
    requests = add(scheduler, *names, num_prompt_tokens=1)
    for oldest in requests:
        while oldest.finish_reason is None:
            before = oldest.num_tokens
            step(scheduler)
            assert oldest.num_tokens == before + 1
    assert requests[0].num_preemptions == 0
    assert [request.request_id for request in requests if request.num_preemptions] == names[1:]


def test_requests_that_keep_coming_do_not_starve_one_that_waits():
    scheduler = make_scheduler(num_pages=4, page_size=4, max_model_len=16, max_num_seqs=4)
    add(scheduler, "short-0", num_prompt_tokens=1, max_tokens=4)
    step(scheduler)
    long = add(scheduler, "long", num_prompt_tokens=13, max_tokens=3)
    for index in range(1, 12):
        add(scheduler, f"short-{index}", num_prompt_tokens=1, max_tokens=4)
        step(scheduler)
    assert long.finish_reason == "length"


# Ends


@pytest.mark.parametrize(
    ("sampling", "drawn", "outputs", "finish_reason", "stop_reason"),
    [
        ({}, [7, EOS], [7, EOS], "stop", None),
        ({"stop_token_ids": [9]}, [7, 9], [7, 9], "stop", 9),
        ({"stop_token_ids": [EOS]}, [EOS], [EOS], "stop", EOS),
        ({"ignore_eos": True}, [EOS] * 5, [EOS] * 5, "length", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [EOS], [EOS], "stop", EOS),
        ({"min_tokens": 2}, [EOS, EOS, EOS], [EOS] * 3, "stop", None),
        ({"min_tokens": 1, "stop_token_ids": [9]}, [9, 9], [9, 9], "stop", 9),
        ({}, [7, 7, 7, 7, EOS], [7, 7, 7, 7, EOS], "stop", None),
        ({}, [7] * 5, [7] * 5, "length", None),
    ],
)
def test_a_request_ends_by(sampling, drawn, outputs, finish_reason, stop_reason):
    scheduler = make_scheduler()
    request = add(scheduler, "a", max_tokens=5, **sampling)
    for token in drawn:
        assert request.finish_reason is None
        step(scheduler, token)
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == (
        outputs,
        finish_reason,
        stop_reason,
    )
    assert request.status is RequestStatus.FINISHED
    assert request.finish_time >= request.last_token_time >= request.first_token_time >= request.arrival
    assert scheduler.pool.num_free == 100


def test_a_request_that_reaches_max_model_len_ends_by_length():
    scheduler = make_scheduler(max_model_len=8)
    request = add(scheduler, "a", num_prompt_tokens=5)
    while scheduler.has_unfinished:
        step(scheduler)
    assert (len(request.output_token_ids), request.finish_reason) == (3, "length")


def test_a_finished_request_frees_its_pages_for_the_next_step():
    scheduler = make_scheduler(num_pages=2, page_size=4, max_model_len=8)
    add(scheduler, "a", "b", num_prompt_tokens=5, max_tokens=1)
    assert list(step(scheduler)) == ["a"]
    assert list(step(scheduler)) == ["b"]


def test_the_engine_may_end_a_request_by_a_stop_string():
    scheduler = make_scheduler()
    request = add(scheduler, "a")
    step(scheduler)
    scheduler.finish(request, "stop", "\n\n")
    assert (request.finish_reason, request.stop_reason) == ("stop", "\n\n")
    assert not scheduler.has_unfinished
    assert scheduler.schedule() is None


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop():
    scheduler = make_scheduler()
    request = add(scheduler, "a", max_tokens=1)
    step(scheduler)
    assert request.finish_reason == "length"
    scheduler.finish(request, "stop", "end")
    assert (request.finish_reason, request.stop_reason) == ("stop", "end")
    scheduler.check()


# Aborts


def test_an_aborted_request_frees_its_pages_at_once():
    scheduler = make_scheduler(num_pages=20)
    running = add(scheduler, "running")
    step(scheduler)
    assert scheduler.pool.num_free == 19
    assert scheduler.abort("running") is running
    assert (running.status, running.finish_reason) == (RequestStatus.FINISHED, "abort")
    assert scheduler.pool.num_free == 20


def test_a_waiting_request_can_be_aborted():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", "b", "c")
    step(scheduler)
    scheduler.abort("b")
    scheduler.abort("a")
    assert list(step(scheduler)) == ["c"]


def test_aborting_an_unknown_or_finished_request_does_nothing():
    scheduler = make_scheduler()
    request = add(scheduler, "a", max_tokens=1)
    step(scheduler)
    assert scheduler.abort("a") is None
    assert scheduler.abort("nobody") is None
    assert request.finish_reason == "length"


def test_results_for_a_request_aborted_during_the_step_are_dropped():
    scheduler = make_scheduler()
    first, second = add(scheduler, "first", "second")
    plan = scheduler.schedule()
    scheduler.abort("first")
    assert update(scheduler, plan) == [second]
    assert first.output_token_ids == []


def test_results_for_a_request_that_lost_its_pages_during_the_step_are_dropped():
    scheduler = make_scheduler()
    request = add(scheduler, "a")
    step(scheduler)
    plan = scheduler.schedule()
    scheduler._preempt_last()
    assert update(scheduler, plan) == []
    assert request.num_computed_tokens == 0
    assert step(scheduler) == {"a": (0, 5)}


def test_the_id_of_a_finished_request_may_be_used_again():
    scheduler = make_scheduler()
    add(scheduler, "a")
    scheduler.abort("a")
    add(scheduler, "a")
    assert step(scheduler) == {"a": (0, 4)}


# Refusals


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    add(scheduler, "a")
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        add(scheduler, "a")


def test_a_prompt_that_leaves_no_room_to_generate_is_refused():
    scheduler = make_scheduler(max_model_len=8)
    with pytest.raises(ValueError, match=r"has 8 tokens .* max_model_len \(8\): shorten"):
        add(scheduler, "a", num_prompt_tokens=8)
    assert not scheduler.has_unfinished


def test_a_pool_that_does_not_hold_max_model_len_tokens_is_refused_with_the_length_it_holds():
    with pytest.raises(ValueError, match="lower max_model_len to 12"):
        make_scheduler(num_pages=3, page_size=4, max_model_len=13)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make_scheduler(**{name: 0})


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        make_request("a", num_prompt_tokens=0)


def test_max_tokens_below_one_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        make_request("a", max_tokens=0)


def test_min_tokens_with_more_ending_ids_than_can_be_banned_is_refused():
    ids = list(range(100, 100 + MAX_BANNED_IDS))  # and the end-of-sequence id
    with pytest.raises(ValueError, match=f"at most {MAX_BANNED_IDS} .* there are {MAX_BANNED_IDS + 1}"):
        make_request("a", min_tokens=1, stop_token_ids=ids)
    make_request("a", min_tokens=1, stop_token_ids=ids, ignore_eos=True)
    make_request("a", stop_token_ids=ids)


# The request's own words


def test_a_request_reads_prompt_and_output_as_one_sequence():
    request = make_request("a", num_prompt_tokens=3)
    for token in (1, 2, 3):
        request.append(token, 0.0, 0.0)
    whole = [10, 11, 12, 1, 2, 3]
    assert [request.token_at(position) for position in range(request.num_tokens)] == whole
    for start in range(7):
        for stop in range(start, 7):
            assert request.tokens(start, stop) == whole[start:stop]
