"""What requests share: pages of a common prefix, and all pages of a request that was forked. One rule a test."""

import pytest

from jpaged.host.batch import Buckets, pack, pack_copies
from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request, RequestStatus
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler

PAGE_SIZE = 4


def make_scheduler(num_pages=100, max_num_seqs=8, max_num_batched_tokens=64, prefix_caching=True):
    return Scheduler(
        PagePool(num_pages + 1, PAGE_SIZE),  # and the null page
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=32,
        prefix_caching=prefix_caching,
        reserve=0,
    )


def make_request(name, prompt, max_tokens=100, parent=None, cache_salt=b"", outputs=()):
    asked = prompt, SamplingParams(max_tokens=None), 0, frozenset(), max_tokens
    return Request(name, *asked, parent=parent, cache_salt=cache_salt, output_token_ids=list(outputs))


def add(scheduler, name, prompt=range(10), **options):
    request = make_request(name, list(prompt), **options)
    scheduler.add(request)
    return request


def fork(scheduler, name, parent):
    return add(scheduler, name, parent.prompt_token_ids, parent=parent, outputs=parent.output_token_ids)


def step(scheduler, token=7):
    """One step in which every row draws `token`: {name: (start, num_tokens)}, and the copies."""
    plan = scheduler.schedule()
    scheduler.check()
    scheduler.update(plan, [token] * len(plan.rows), [-0.5] * len(plan.rows))
    scheduler.check()
    return {request.request_id: (start, num_tokens) for request, start, num_tokens in plan.rows}, plan.page_copies


def serve(scheduler, name, prompt=range(10), **options):
    """A request by itself, to its end."""
    request = add(scheduler, name, prompt, **options)
    while scheduler.has_unfinished:
        step(scheduler)
    return request


# The prefix cache


def test_a_prompt_begins_with_the_full_pages_of_an_equal_one():
    scheduler = make_scheduler()
    first = serve(scheduler, "first", range(10), max_tokens=1)
    second = add(scheduler, "second", [*range(9), 99])
    assert step(scheduler)[0] == {"second": (8, 2)}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert scheduler.num_cached_tokens == 8


def test_it_shares_the_pages_of_one_that_still_runs():
    scheduler = make_scheduler()
    first = add(scheduler, "first")
    step(scheduler)
    second = add(scheduler, "second")
    assert step(scheduler)[0] == {"first": (10, 1), "second": (8, 2)}
    assert second.page_ids[:2] == first.page_ids[:2] and second.page_ids[2] != first.page_ids[2]


def test_generated_tokens_are_found_too():
    scheduler = make_scheduler()
    first = serve(scheduler, "first", range(3), max_tokens=6)
    add(scheduler, "second", [*range(3), *first.output_token_ids, 50])
    assert step(scheduler)[0] == {"second": (8, 2)}


def test_of_a_prompt_that_is_found_whole_only_the_last_token_is_computed_and_not_written():
    scheduler = make_scheduler()
    serve(scheduler, "first", range(8), max_tokens=1)
    second = add(scheduler, "second", range(8))
    plan = scheduler.schedule()
    assert [row[1:] for row in plan.rows] == [(7, 1)]
    assert second.num_cached_tokens == 8
    batch, _ = pack(plan.rows, scheduler.rows, Buckets.make(8, 64, 32, PAGE_SIZE), vocab_size=100)
    assert batch.slot_mapping[0] == 0 and batch.positions[0] == 7 and batch.context_lens[0] == 8
    scheduler.update(plan, [7], [0.0])
    assert step(scheduler)[0] == {"second": (8, 1)}  # a page of its own from here on


def test_only_the_same_tokens_in_front_count():
    scheduler = make_scheduler()
    serve(scheduler, "first", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    add(scheduler, "other start", [0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert step(scheduler)[0] == {"other start": (0, 9)}


def test_only_the_same_salt_counts():
    scheduler = make_scheduler()
    serve(scheduler, "first", max_tokens=1, cache_salt=b"a")
    serve(scheduler, "second", max_tokens=1, cache_salt=b"b")
    assert scheduler.num_cached_tokens == 0
    serve(scheduler, "third", max_tokens=1, cache_salt=b"a")
    assert scheduler.num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_found():
    scheduler = make_scheduler(prefix_caching=False)
    serve(scheduler, "first", max_tokens=1)
    add(scheduler, "second")
    assert step(scheduler)[0] == {"second": (0, 10)}


def test_a_page_that_another_has_finished_meanwhile_is_not_computed_again():
    scheduler = make_scheduler(max_num_batched_tokens=12)
    first = add(scheduler, "first", range(20))
    second = add(scheduler, "second", [*range(16), 90, 91])
    assert step(scheduler)[0] == {"first": (0, 12)}
    assert step(scheduler)[0] == {"first": (12, 8), "second": (12, 4)}  # begins with three pages of the first
    assert step(scheduler)[0] == {"first": (20, 1), "second": (16, 2)}
    assert second.page_ids[:3] == first.page_ids[:3]


def test_a_running_prompt_goes_on_with_pages_that_another_has_finished_meanwhile():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "slow", range(24))
    step(scheduler)
    page_ids = scheduler.pool.acquire(2)  # as if another had computed the next ones
    for page_id, key in zip(page_ids, make_request("x", list(range(24))).keys(2, PAGE_SIZE), strict=False):
        scheduler.pool.publish(page_id, key)
    scheduler.pool.release(page_ids)
    assert step(scheduler)[0] == {"slow": (16, 8)}
    assert scheduler.running[0].page_ids[2:4] == page_ids


def test_pages_of_an_aborted_step_are_not_offered():
    scheduler = make_scheduler()
    add(scheduler, "first")
    plan = scheduler.schedule()
    scheduler.abort("first")
    scheduler.update(plan, [7], [0.0])
    add(scheduler, "second")
    assert step(scheduler)[0] == {"second": (0, 10)}


def test_a_preempted_request_finds_its_own_pages_again():
    scheduler = make_scheduler(num_pages=9)
    add(scheduler, "old", range(14))
    young = add(scheduler, "young", range(50, 60))
    step(scheduler)
    blocker = scheduler.pool.acquire(scheduler.pool.num_free)
    for _ in range(3):  # until the old one needs a fifth page
        plan = scheduler.schedule()
        scheduler.update(plan, [7] * 2, [0.0] * 2)
    assert young.num_preemptions == 1
    scheduler.pool.release(blocker)
    assert step(scheduler)[0]["young"] == (8, 5)
    assert young.num_cached_tokens == 0, "what it found later is its own"


def test_pages_released_longest_ago_go_first_and_suffixes_before_prefixes():
    scheduler = make_scheduler(num_pages=8)
    serve(scheduler, "first", range(8), max_tokens=1)
    serve(scheduler, "second", range(50, 58), max_tokens=1)
    assert scheduler.pool.num_free == 8
    held = scheduler.pool.acquire(5)  # 4 that hold nothing, and one of the first's
    scheduler.pool.release(held)
    add(scheduler, "again", range(8))
    assert step(scheduler)[0] == {"again": (4, 4)}


def test_a_published_page_is_handed_out_only_when_no_other_is_free():
    pool = PagePool(num_pages=4, page_size=1)
    first, second, third = pool.acquire(3)
    pool.publish(second, b"key")
    pool.release([first, second, third])
    assert pool.match([b"key"]) == [second]
    assert sorted(pool.acquire(2)) == [first, third]
    assert pool.acquire(1) == [second]
    assert pool.match([b"key"]) == []


def test_of_equal_pages_the_first_is_found():
    pool = PagePool(num_pages=4, page_size=1)
    first, second = pool.acquire(2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.match([b"key"]) == [first]
    pool.release([first, second])
    pool.check([])


def test_what_was_computed_with_other_weights_is_forgotten():
    scheduler = make_scheduler()
    serve(scheduler, "before", range(10), max_tokens=1)
    running = add(scheduler, "running", range(50, 60))
    step(scheduler)
    scheduler.forget()
    scheduler.check()
    child = fork(scheduler, "child of running", running)
    for _ in range(8):
        step(scheduler)
    assert running.is_stale and child.is_stale
    for name, prompt in (("before again", range(10)), ("running again", range(50, 60))):
        add(scheduler, name, prompt)
        assert step(scheduler)[0][name] == (0, 10)
    add(scheduler, "as the child", [*range(50, 60), *child.output_token_ids[:6]])
    assert step(scheduler)[0]["as the child"] == (8, 8), "found are pages of `running again`"


# Forks


def test_forks_wait_for_the_prompt_and_then_compute_its_last_token_alone():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    second, third = (add(scheduler, name, parent=first) for name in "12")
    assert step(scheduler) == ({"0": (0, 10)}, [])
    assert step(scheduler) == ({"0": (10, 1), "1": (9, 1), "2": (9, 1)}, [])
    assert second.page_ids == third.page_ids == first.page_ids
    assert scheduler.pool.num_used == 3


def test_whoever_writes_first_into_a_shared_page_writes_into_a_copy():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    second, third = (add(scheduler, name, parent=first) for name in "12")
    step(scheduler)
    step(scheduler)
    shared = first.page_ids[2]
    rows, copies = step(scheduler)
    assert rows == {"0": (11, 1), "1": (10, 1), "2": (10, 1)}
    assert copies == [(shared, first.page_ids[2]), (shared, second.page_ids[2])]
    assert third.page_ids[2] == shared, "the last one has it for itself"
    assert first.page_ids[:2] == second.page_ids[:2] == third.page_ids[:2]
    assert step(scheduler)[1] == []


def test_forks_whose_prompt_fills_its_pages_copy_nothing():
    scheduler = make_scheduler()
    first = add(scheduler, "0", range(8))
    add(scheduler, "1", range(8), parent=first)
    assert [step(scheduler)[1] for _ in range(4)] == [[]] * 4
    assert scheduler.pool.num_used == 4


def test_a_fork_in_the_middle_shares_the_page_that_is_being_filled():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    step(scheduler)
    step(scheduler)
    second = fork(scheduler, "1", first)
    rows, copies = step(scheduler)
    assert rows == {"0": (11, 1), "1": (11, 1)}
    assert len(copies) == 1 and copies[0][0] == first.page_ids[2]
    assert second.output_token_ids == first.output_token_ids == [7, 7, 7]


def test_a_page_is_not_copied_from_one_that_is_only_being_copied():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    add(scheduler, "1", parent=first)
    step(scheduler)
    step(scheduler)
    shared = first.page_ids[2]
    child = fork(scheduler, "2", first)
    _, copies = step(scheduler)  # the first leaves the page to its fork, and another fork leaves the first's
    assert copies == [(shared, first.page_ids[2]), (shared, child.page_ids[2])]


def test_a_page_that_is_being_copied_takes_no_other_copy():
    scheduler = make_scheduler(num_pages=8)
    first = add(scheduler, "a", range(9))
    other = add(scheduler, "b", range(50, 59))
    step(scheduler)
    for parent, name in ((other, "b fork"), (first, "a fork")):
        fork(scheduler, name, parent)
        step(scheduler)  # in which the fork copies: one more page each
    assert scheduler.pool.num_free == 0
    for request in scheduler.running[2:]:
        scheduler.abort(request.request_id)
    # By hand, to the state in which two copies are needed and the only page that comes free is the first one's source.
    scheduler.pool.fork(first.page_ids)
    scheduler.pool.fork(other.page_ids)
    held = scheduler.pool.acquire(scheduler.pool.num_free - 1)
    scheduler._tables.take_copies()
    source = first.page_ids[2]
    assert scheduler._tables._copy(first, 2) and scheduler.pool.num_free == 0
    scheduler.pool.release([source])  # its other holder was preempted
    assert scheduler.pool.num_free == 1
    assert not scheduler._tables._copy(other, 2)
    assert scheduler.pool.num_free == 1 and len(scheduler._tables._copies) == 1
    scheduler.pool.release(held)
    assert scheduler._tables._copy(other, 2) and scheduler._tables.take_copies()[1][1] != source


def test_a_published_page_is_copied_even_by_its_only_holder():
    scheduler = make_scheduler()
    first = add(scheduler, "0", max_tokens=4)
    step(scheduler)
    step(scheduler)
    second = add(scheduler, "1", parent=first)  # shares the page up to the prompt's end
    scheduler._queues.max_num_seqs = 1  # does not start yet
    step(scheduler)
    scheduler._queues.max_num_seqs = 8
    step(scheduler)  # the first fills the page and ends
    assert first.status is RequestStatus.FINISHED
    page_id = second.page_ids[2]
    _, copies = step(scheduler)
    assert copies == [(page_id, second.page_ids[2])] and second.page_ids[2] != page_id


def test_a_fork_that_finds_no_room_begins_with_what_is_published():
    scheduler = make_scheduler(max_num_seqs=1)
    first = add(scheduler, "0", max_tokens=2)
    second = add(scheduler, "1", parent=first)
    step(scheduler)
    step(scheduler)
    assert first.status is RequestStatus.FINISHED
    assert step(scheduler)[0] == {"1": (8, 2)}
    assert second.parent is None


@pytest.mark.parametrize("when", ["before its prompt is computed", "afterwards"])
def test_forks_of_an_aborted_request_go_on_alone(when):
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    second = add(scheduler, "1", parent=first)
    if when == "afterwards":
        step(scheduler)
    scheduler.abort("0")
    scheduler.check()
    assert step(scheduler)[0] == {"1": (8, 2) if when == "afterwards" else (0, 10)}
    assert len(second.output_token_ids) == 1


def test_a_fork_can_be_aborted_while_it_waits_for_the_prompt():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    add(scheduler, "1", parent=first)
    assert scheduler.num_waiting == 2
    scheduler.abort("1")
    scheduler.check()
    assert scheduler.num_waiting == 1 and first.forks == []


def test_after_an_interruption_forks_wait_by_themselves():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    add(scheduler, "1", parent=first)
    scheduler.start_over()
    scheduler.check()
    assert step(scheduler)[0] == {"0": (0, 10)}
    assert step(scheduler)[0] == {"0": (10, 1), "1": (8, 2)}


def test_of_equal_prompts_that_come_together_one_is_computed():
    scheduler = make_scheduler()
    for name in "abc":
        add(scheduler, name)
    other = add(scheduler, "other", range(20, 30))
    assert step(scheduler)[0] == {"a": (0, 10)}
    assert step(scheduler)[0] == {"a": (10, 1), "b": (8, 2), "c": (8, 2), "other": (0, 10)}
    assert other.num_cached_tokens == 0


def test_equal_prompts_that_cannot_be_found_are_computed_together():
    for options in ({"prefix_caching": False}, {}):
        scheduler = make_scheduler(**options)
        for name in "ab":
            add(scheduler, name, range(10) if options else range(3))  # without a full page, or nothing is kept
        assert len(step(scheduler)[0]) == 2


def test_a_decode_step_is_not_started_ahead_of_a_copy():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    add(scheduler, "1", parent=first)
    step(scheduler)
    plan = scheduler.schedule()
    assert scheduler.ahead(plan) is None
    scheduler.update(plan, [7, 7], [0.0, 0.0])
    plan = scheduler.schedule()
    assert plan.page_copies and scheduler.ahead(plan) is None
    scheduler.update(plan, [7, 7], [0.0, 0.0])
    assert scheduler.ahead(scheduler.schedule()) is not None


def test_tokens_that_requests_share_are_held_once():
    scheduler = make_scheduler()
    first = add(scheduler, "0")
    add(scheduler, "1", parent=first)
    step(scheduler)
    assert scheduler.num_held_tokens == 10
    step(scheduler)
    assert scheduler.num_held_tokens == 11  # the first has gone on in the page
    step(scheduler)
    assert scheduler.num_held_tokens == 8 + 4 + 3


def test_copies_are_padded_to_few_numbers_of_them():
    buckets = Buckets.make(40, 64, 32, PAGE_SIZE)
    assert buckets.copies == (4, 16, 40)
    assert pack_copies([(3, 5)] * 5, buckets).tolist() == [[3, 5]] * 5 + [[0, 0]] * 11
