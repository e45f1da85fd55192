"""What the pool needs the place of goes to swap space, and comes back: pages by their contents, families together."""

import numpy as np
import pytest

from jpaged.host.page_pool import PagePool
from jpaged.host.queues import PRIORITY_PLACES
from jpaged.host.request import Request, RequestStatus
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler
from jpaged.host.swap_costs import SwapCosts
from jpaged.host.swap_space import NO_MOVES, SwapSpace

PAGE_SIZE = 4


def make_swap_space(num_pages=8, num_disk_pages=0, **costs) -> SwapSpace:
    return SwapSpace(num_pages, SwapCosts(PAGE_SIZE, **costs), num_disk_pages)


def make_scheduler(num_pages=8, max_num_seqs=8, swap_space=None, max_model_len=32, **options) -> Scheduler:
    return Scheduler(
        PagePool(num_pages + 1, PAGE_SIZE, swap_space),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
        **{"reserve": 0} | options,
    )


def add(scheduler: Scheduler, name: str, prompt, max_tokens=16, **options) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = Request(name, list(prompt), sampling, 0, frozenset(), max_tokens, **options)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, token=1):
    """Plans a step and takes in its results: the plan."""
    plan = scheduler.schedule()
    scheduler.check()
    scheduler.update(plan, [token] * len(plan.rows), [0.0] * len(plan.rows))
    scheduler.check()
    return plan


def shares(plan) -> dict[str, tuple[int, int]]:
    return {request.request_id: (start, num_tokens) for request, start, num_tokens in plan.rows}


def test_a_page_goes_out_when_its_place_is_needed_and_comes_back_for_the_same_tokens():
    swap_space = make_swap_space()
    scheduler = make_scheduler(num_pages=8, swap_space=swap_space)
    first = add(scheduler, "first", range(12), max_tokens=1)
    held = []
    scheduler.pool.acquire, acquire = (
        lambda n: (pages := acquire(n)) and held.append(pages) or pages,
        scheduler.pool.acquire,
    )
    step(scheduler)
    assert first.finish_reason == "length" and not swap_space.num_held
    page_ids = held[0]
    plan = scheduler_step_of(scheduler, add(scheduler, "second", range(50, 80), max_tokens=1))
    assert sorted(page_id for page_id, _ in plan.moves.swap_out) == sorted(page_ids)
    assert not plan.moves.swap_in
    places = {page_id: place for page_id, place in plan.moves.swap_out}
    plan = scheduler_step_of(scheduler, again := add(scheduler, "again", range(12), max_tokens=1))
    # Its last token is computed once more.
    assert shares(plan) == {"again": (11, 1)} and again.num_swapped_pages == 3 and again.num_cached_tokens == 12
    assert [place for place, _ in plan.moves.swap_in] == [places[page_id] for page_id in page_ids]
    assert (swap_space.num_swapped_out, swap_space.num_swapped_in) == (3 + 2, 3)


def scheduler_step_of(scheduler: Scheduler, request: Request):
    plan = step(scheduler)
    assert shares(plan).keys() == {request.request_id}
    return plan


def test_a_preempted_request_goes_on_from_its_last_full_page():
    scheduler = make_scheduler(num_pages=8, swap_space=make_swap_space(always=True))
    old, young = add(scheduler, "old", range(14)), add(scheduler, "young", range(50, 64))
    while not scheduler.num_preemptions:
        step(scheduler)
    assert young.status is RequestStatus.WAITING
    while scheduler.waiting:
        plan = step(scheduler)
    assert old.finish_reason == "length" and shares(plan) == {"young": (16, 1)} and young.num_swapped_pages == 4


def test_a_page_that_was_brought_back_is_not_moved_out_again():
    swap_space = make_swap_space(num_pages=14)
    scheduler = make_scheduler(num_pages=8, swap_space=swap_space)
    for turn in range(3):
        for name, prompt in (("a", range(30)), ("b", range(50, 80))):
            add(scheduler, f"{name}{turn}", prompt, max_tokens=1)
            step(scheduler)
    assert swap_space.num_swapped_in > swap_space.num_swapped_out
    assert swap_space.num_swapped_out == 14


def test_requests_with_the_same_tokens_share_the_pages_that_come_back():
    scheduler = make_scheduler(num_pages=8, swap_space=make_swap_space())
    for name, prompt in (("a", range(12)), ("b", range(50, 80))):
        add(scheduler, name, prompt, max_tokens=1)
        step(scheduler)
    one, other = (add(scheduler, name, range(12)) for name in ("one", "other"))
    plan = step(scheduler)
    assert len(plan.moves.swap_in) == 3 and one.page_ids[:3] == other.page_ids[:3]
    assert (one.num_swapped_pages, other.num_swapped_pages) == (3, 0)
    assert scheduler.pool.num_shared == 3


def test_a_page_that_is_yet_to_come_back_is_not_copied_but_brought_back_twice():
    swap_space = make_swap_space(num_pages=32, always=True)
    scheduler = make_scheduler(num_pages=8, swap_space=swap_space)
    add(scheduler, "before", [1, 2, 3], max_tokens=2)
    step(scheduler, token=4), step(scheduler, token=5)  # the page of 1, 2, 3, 4 is published
    again = add(scheduler, "again", [1, 2, 3])
    step(scheduler, token=4)
    fork = again.like("fork", parent=again, output_token_ids=[4])
    scheduler.add(fork)
    add(scheduler, "urgent", range(10, 39), max_tokens=1, priority=-1)
    assert shares(step(scheduler)) == {"urgent": (0, 29)}  # it needs all pages
    plan = step(scheduler)
    assert shares(plan) == {"again": (3, 1), "fork": (3, 1)}, "both go on in the page that comes back"
    assert not plan.page_copies and again.page_ids != fork.page_ids
    (place, _), _ = plan.moves.swap_in
    assert sorted(plan.moves.swap_in) == sorted((place, page_id) for page_id in again.page_ids + fork.page_ids)


def test_the_least_recently_used_page_goes_to_disk_and_then_is_forgotten():
    swap_space = make_swap_space(num_pages=1, num_disk_pages=1)
    for key, page_id in ((b"a", 1), (b"b", 2), (b"c", 3)):
        swap_space.swap_out(key, page_id)
        assert swap_space.find([key]) == [], "it is not there yet"
        moves = swap_space.take_moves()
        assert list(moves.swap_out) == [(page_id, 0)]
        assert list(moves.spills) == ([] if key == b"a" else [(0, 1)])
        assert swap_space.find([key]) == [key]
    assert swap_space.find([b"a"]) == [] and swap_space.places_of([b"b", b"c"]) == [1, 0]
    assert swap_space.take_moves() is NO_MOVES
    swap_space.check()


def test_only_as_many_pages_go_out_in_a_step_as_there_are_places_for():
    swap_space = make_swap_space(num_pages=2)
    for page_id in range(1, 4):
        swap_space.swap_out(bytes([page_id]), page_id)
    assert len(swap_space.take_moves().swap_out) == 2


@pytest.mark.parametrize(
    ("costs", "num_pages", "pays"),
    [
        ({}, 1, True),  # nothing is measured yet
        ({"seconds_per_move": 1, "seconds_per_page": 1, "seconds_per_token": 1}, 1, True),  # 2 against 4
        ({"seconds_per_move": 4, "seconds_per_page": 1, "seconds_per_token": 1}, 1, False),  # 5 against 4
        ({"seconds_per_move": 4, "seconds_per_page": 1, "seconds_per_token": 1}, 2, True),  # 6 against 8
        ({"seconds_per_move": 0, "seconds_per_page": 5, "seconds_per_token": 1}, 1000, False),
        ({"seconds_per_move": 0, "seconds_per_page": 5, "seconds_per_token": 1, "always": True}, 1000, True),
    ],
)
def test_pages_come_back_where_that_is_cheaper_than_to_compute_them(costs, num_pages, pays):
    swap_space = make_swap_space(num_pages=1000, **costs)
    assert swap_space.costs.pays(num_pages) is pays
    swap_space.costs.always = True
    keys = [page_id.to_bytes(2, "big") for page_id in range(num_pages)]
    for page_id, key in enumerate(keys):
        swap_space.swap_out(key, page_id)
    swap_space.take_moves()
    swap_space.costs.always = costs.get("always", False)
    assert (swap_space.find(keys) == keys) is pays


def test_what_never_pays_is_not_moved_out():
    swap_space = make_swap_space(seconds_per_move=0, seconds_per_page=5, seconds_per_token=1)
    swap_space.swap_out(b"a", 1)
    assert swap_space.take_moves() is NO_MOVES and not swap_space.num_held


def test_the_price_of_a_token_is_that_of_the_best_step():
    costs = SwapCosts(PAGE_SIZE)
    for seconds, num_tokens in ((1, 10), (1, 100), (1, 20)):
        costs.record_prompt(seconds, num_tokens)
    assert costs.seconds_per_token == 0.01


def test_a_swap_space_without_a_page_is_refused():
    with pytest.raises(ValueError, match="at least one page, got 0"):
        make_swap_space(num_pages=0)


def test_new_weights_empty_the_swap_space():
    swap_space = make_swap_space()
    scheduler = make_scheduler(num_pages=8, swap_space=swap_space)
    for name, prompt in (("a", range(12)), ("b", range(50, 80))):
        add(scheduler, name, prompt, max_tokens=1)
        step(scheduler)
    assert swap_space.num_held
    scheduler.forget()
    assert not swap_space.num_held
    assert shares(scheduler_step_of(scheduler, add(scheduler, "again", range(12)))) == {"again": (0, 12)}


# Families


def add_family(scheduler: Scheduler, name: str, prompt, n: int, **options) -> list[Request]:
    first = add(scheduler, f"{name}/0", prompt, family=name, **options)
    return [first, *(add(scheduler, f"{name}/{i}", prompt, family=name, parent=first, **options) for i in range(1, n))]


def test_samples_of_a_request_are_preempted_and_resumed_together():
    scheduler = make_scheduler(num_pages=10)
    old = add(scheduler, "old", range(14), max_tokens=16)
    family = add_family(scheduler, "family", range(50, 58), n=3, max_tokens=20)
    turns = []
    while scheduler.has_unfinished:
        plan = step(scheduler, token=len(turns))
        turns.append({request.family for request, _, _ in plan.rows})
        running = {request.status for request in family if request.finish_reason is None}
        if old.finish_reason is None and turns[-1] == {"old"}:
            assert running == {RequestStatus.WAITING}, "not all of the family wait"
        if old.finish_reason is None:
            preemptions = {request.num_preemptions for request in family}
            assert len(preemptions) == 1
    assert {"old"} in turns and preemptions == {1}


def test_a_family_that_is_the_first_loses_only_its_last_member():
    scheduler = make_scheduler(num_pages=8)
    family = add_family(scheduler, "family", range(8), n=4, max_tokens=22)
    while scheduler.has_unfinished:
        step(scheduler, token=len(family[0].output_token_ids))
    assert family[0].num_preemptions == 0 < family[-1].num_preemptions


def test_a_family_that_never_fits_together_runs_in_turn():
    scheduler = make_scheduler(num_pages=10, prefix_caching=False)
    old = add(scheduler, "old", range(30), max_tokens=2)
    family = add_family(scheduler, "family", range(50, 58), n=4, max_tokens=20)
    for _ in range(200):
        if not scheduler.has_unfinished:
            break
        step(scheduler)
    assert [request.finish_reason for request in [old, *family]] == ["length"] * 5


# Order


def test_urgent_requests_come_first_and_ties_in_the_order_of_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        add(scheduler, name, range(4), max_tokens=1, priority=priority)
    served = []
    while scheduler.has_unfinished:
        served += shares(step(scheduler))
    assert served == ["c", "e", "a", "d", "b"]


def test_an_urgent_request_takes_the_row_of_a_less_urgent_one():
    scheduler = make_scheduler(max_num_seqs=2)
    first, second = add(scheduler, "first", range(4), priority=1), add(scheduler, "second", range(4, 8))
    step(scheduler)
    add(scheduler, "equal", range(8, 12))
    assert shares(step(scheduler)).keys() == {"equal", "second"}
    assert (first.num_preemptions, second.num_preemptions) == (1, 0)
    add(scheduler, "later", range(12, 16))
    assert shares(step(scheduler)).keys() == {"equal", "second"}, "equals do not push each other out"


def test_an_urgent_request_takes_the_pages_of_less_urgent_ones():
    scheduler = make_scheduler(num_pages=8)
    one, other = add(scheduler, "one", range(14), priority=2), add(scheduler, "other", range(20, 34), priority=3)
    step(scheduler)
    plan = scheduler.ahead(scheduler.schedule())
    assert plan is not None
    urgent = add(scheduler, "urgent", range(40, 52), max_tokens=2)
    plan = step(scheduler)
    assert shares(plan)["urgent"] == (0, 12) and other.status is RequestStatus.WAITING and one.num_preemptions == 0
    step(scheduler)
    assert urgent.finish_reason == "length"


def test_no_step_goes_ahead_while_an_urgent_request_waits_for_a_row():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "first", range(4), priority=1)
    step(scheduler)
    plan = scheduler.schedule()
    add(scheduler, "equal", range(4), priority=1)
    assert scheduler.ahead(plan) is not None
    add(scheduler, "urgent", range(4))
    assert scheduler.ahead(plan) is None


def test_no_request_waits_for_ever():
    scheduler = make_scheduler(max_num_seqs=1)
    patient = add(scheduler, "patient", range(4), max_tokens=3, priority=1)
    for turn in range(PRIORITY_PLACES + 10):
        add(scheduler, str(turn), [turn], max_tokens=1)  # as fast as they are served
        step(scheduler)
    assert patient.finish_reason == "length"
    assert patient.num_preemptions == 0, "it gave way before it began, and not after"


def test_beam_searches_keep_rows_for_all_their_beams():
    scheduler = make_scheduler(num_pages=32, max_num_seqs=5)
    sampling = SamplingParams(num_beams=3, temperature=0, max_tokens=8, ignore_eos=True)
    beams = {}
    for name in ("a", "b"):
        beams[name] = Request(f"{name}/0", [1, 2, 3], sampling, 0, frozenset(), 8, is_beam=True, family=name)
        scheduler.add(beams[name])
    add(scheduler, "later", range(3))
    plan = scheduler.schedule()
    assert shares(plan).keys() == {"a/0"}, "the next search finds two rows, and needs three; nobody overtakes it"
    scheduler.update(plan, [0], [0.0], (np.zeros((1, 3)), np.zeros((1, 3))))
    for index in (1, 2):
        scheduler.add(beams["a"].like(f"a/{index}", parent=beams["a"]), order=index)
    assert shares(scheduler.schedule()).keys() == {"a/1", "a/2"}, "its own beams find theirs"
    for request in list(scheduler.running):
        scheduler.abort(request.request_id)
    assert shares(scheduler.schedule()).keys() == {"b/0", "later"}
    scheduler.abort("b/0")
    scheduler.abort("later")
    scheduler.check()


# Windows


def test_pages_that_no_token_to_come_sees_are_given_back():
    scheduler = make_scheduler(num_pages=8, sliding_window=6, max_model_len=32)
    request = add(scheduler, "0", range(10), max_tokens=20)
    most = 0
    while scheduler.has_unfinished:
        step(scheduler)
        if request.page_ids:
            seen = max(request.num_computed_tokens - 6 + 1, 0) // PAGE_SIZE
            assert request.num_dropped_pages == seen and not any(request.page_ids[:seen])
            most = max(most, scheduler.pool.num_used)
    assert most == 2  # between steps


def test_a_fork_does_not_begin_behind_its_window():
    scheduler = make_scheduler(num_pages=16, sliding_window=4, max_num_seqs=2, max_model_len=64, prefix_caching=False)
    parent = add(scheduler, "parent", range(8), max_tokens=30)
    add(scheduler, "other", range(8), max_tokens=30)
    step(scheduler)
    fork = add(scheduler, "fork", range(8), max_tokens=30, parent=parent, output_token_ids=[1])
    for _ in range(12):
        step(scheduler)
    scheduler.abort("other")
    assert shares(step(scheduler))["fork"] == (0, 9) and fork.num_dropped_pages == 1


# Room


def test_a_request_starts_only_where_those_that_run_have_room_to_go_on():
    for reserve, starts in ((0.25, False), (0, True)):
        scheduler = make_scheduler(num_pages=8, reserve=reserve)
        add(scheduler, "old", range(12))
        step(scheduler)
        add(scheduler, "new", range(20, 36))
        assert ("new" in shares(step(scheduler))) is starts
