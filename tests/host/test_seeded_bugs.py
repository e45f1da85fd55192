"""The property of `simulation` is worth its name: it fails under each of these bugs, planted on purpose.

A bug marked TOKENS changes tokens, and must be caught without the checks of accounts, by the stand-in device alone.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
import simulation

from jpaged.host import batch
from jpaged.host.decode_rows import DecodeRows
from jpaged.host.page_pool import PagePool
from jpaged.host.page_tables import PageTables
from jpaged.host.queues import Queues
from jpaged.host.request import Request, RequestStatus
from jpaged.host.row_table import RowTable
from jpaged.host.scheduler import Scheduler
from jpaged.host.swap_space import SwapSpace

pytestmark = pytest.mark.planted

NUM_WORKLOADS = 120
ACCOUNTS, TOKENS = True, False
BUGS: dict[str, tuple[bool, Callable[[pytest.MonkeyPatch], None]]] = {}


def bug(found_by: bool):
    def register(plant):
        BUGS[plant.__name__] = found_by, plant
        return plant

    return register


def change_batch(patch, change):
    """Plants a bug in what `pack` returns: `change(batch, rows, page_size)` gives the fields to replace."""
    pack = batch.pack

    def changed(rows, table, buckets, vocab_size, **options):
        packed, rows = pack(rows, table, buckets, vocab_size, **options)
        return packed._replace(**change(packed, rows, buckets.page_size)), rows

    patch.setattr(batch, "pack", changed)


@bug(ACCOUNTS)
def a_preemption_forgets_to_release_the_pages(patch):
    preempt = Scheduler._preempt_last
    patch.setattr(Scheduler, "_preempt_last", lambda self: (self.running[-1].drop_pages(), preempt(self))[1])


@bug(ACCOUNTS)
def a_preempted_request_is_served_in_the_same_step(patch):
    preempt = Scheduler._preempt_last

    def still_running(self):
        request = preempt(self)
        request.status = RequestStatus.RUNNING
        return request

    patch.setattr(Scheduler, "_preempt_last", still_running)


@bug(ACCOUNTS)
def an_abort_leaks_the_pages(patch):
    def abort(self, request_id):
        request = self._queues.requests.get(request_id)
        if request is not None:
            request.drop_pages()
            self.finish(request, "abort")
        return request

    patch.setattr(Scheduler, "abort", abort)


@bug(ACCOUNTS)
def a_finished_request_releases_its_pages_twice(patch):
    release = PagePool.release
    patch.setattr(PagePool, "release", lambda self, page_ids: (release(self, page_ids), release(self, page_ids[:1])))


@bug(ACCOUNTS)
def the_budget_is_one_too_large(patch):
    schedule = Scheduler.schedule

    def generous(self):
        self.max_num_batched_tokens += 1
        plan = schedule(self)
        self.max_num_batched_tokens -= 1
        return plan

    patch.setattr(Scheduler, "schedule", generous)


@bug(ACCOUNTS)
def a_preempted_request_goes_to_the_end_of_the_queue(patch):
    preempt = Scheduler._preempt_last

    def sent_back(self):
        request = preempt(self)
        self.waiting.append(self.waiting.pop(0))
        return request

    patch.setattr(Scheduler, "_preempt_last", sent_back)


@bug(ACCOUNTS)
def a_page_is_handed_out_twice(patch):
    acquire = PagePool.acquire

    def careless(self, num_pages):
        page_ids = acquire(self, num_pages)
        if page_ids and len(self._free) % 3 == 0:
            self._free.insert(0, page_ids[0])
        return page_ids

    patch.setattr(PagePool, "acquire", careless)


@bug(TOKENS)
def a_preempted_request_loses_its_outputs(patch):
    preempt = Scheduler._preempt_last

    def forgetful(self):
        request = preempt(self)
        request.output_token_ids.clear()
        return request

    patch.setattr(Scheduler, "_preempt_last", forgetful)


@bug(TOKENS)
def the_block_table_is_not_refreshed_after_a_preemption(patch):
    add_pages, drop_pages = Request.add_pages, Request.drop_pages

    def drop_page_ids(self):
        table = None if self.block_table is None else self.block_table.copy()
        page_ids = drop_pages(self)
        if table is not None:
            self.block_table[:] = table
        return page_ids

    def fill_up(self, page_ids):
        stale = self.block_table.copy()
        add_pages(self, page_ids)
        self.block_table[:] = np.where(stale, stale, self.block_table)

    def give_back(self, request):
        if request.block_table is not None:
            self._free.append(request.row)
            request.block_table = None

    patch.setattr(Request, "drop_pages", drop_page_ids)
    patch.setattr(Request, "add_pages", fill_up)
    patch.setattr(RowTable, "give_back", give_back)


@bug(ACCOUNTS)
def an_ended_request_goes_on_decoding(patch):
    remove = DecodeRows.remove
    patch.setattr(
        DecodeRows, "remove", lambda self, request: remove(self, request) if request.finish_reason is None else None
    )


def leave_out_of_advance(patch, name):
    advance = DecodeRows.advance

    def change(self, token_ids):
        before = getattr(self, name)
        advance(self, token_ids)
        setattr(self, name, before)

    patch.setattr(DecodeRows, "advance", change)


@bug(TOKENS)
def the_rows_that_decode_compute_the_token_before_the_last(patch):
    leave_out_of_advance(patch, "token_ids")


@bug(TOKENS)
def the_room_that_is_left_is_not_counted_down(patch):
    leave_out_of_advance(patch, "num_left")


@bug(TOKENS)
def a_page_is_taken_one_token_late(patch):
    starts = DecodeRows.at_page_start
    patch.setattr(DecodeRows, "at_page_start", lambda self, size, ahead=0: starts(self, size, ahead - 1))


@bug(TOKENS)
def the_ids_that_end_a_later_request_are_not_looked_for(patch):
    add_endings = DecodeRows._add_endings

    def only_the_first(self, requests):
        if not self._seen_endings:
            add_endings(self, requests)

    patch.setattr(DecodeRows, "_add_endings", only_the_first)


@bug(TOKENS)
def a_step_ahead_is_one_token_behind(patch):
    step = DecodeRows.step
    patch.setattr(DecodeRows, "step", lambda self, ahead=0: step(self, ahead)._replace(starts=self.starts))


@bug(TOKENS)
def the_gaps_of_those_that_left_stay_in_the_tokens(patch):
    settle = DecodeRows.settle

    def settle_all_but_the_tokens(self):
        before = self.token_ids
        settle(self)
        self.token_ids = before[: len(self.requests)]

    patch.setattr(DecodeRows, "settle", settle_all_but_the_tokens)


@bug(TOKENS)
def the_first_slot_of_a_page_is_one_too_low(patch):
    def change(packed, rows, page_size):
        at_border = (packed.positions % page_size == 0) & (packed.slot_mapping >= page_size)
        return {"slot_mapping": packed.slot_mapping - at_border}

    change_batch(patch, change)


@bug(TOKENS)
def padding_is_written_to_the_last_page(patch):
    acquire = PagePool.acquire

    def from_the_end(self, num_pages):
        self._free.sort()
        return acquire(self, num_pages)

    def change(packed, rows, page_size):
        num_tokens = sum(num_tokens for _, _, num_tokens in rows)
        slots = packed.slot_mapping.copy()
        slots[num_tokens:] = -1  # as an index it wraps around
        return {"slot_mapping": slots}

    patch.setattr(PagePool, "acquire", from_the_end)  # no bug, but the last page is in use
    change_batch(patch, change)


@bug(TOKENS)
def context_lens_exclude_this_step(patch):
    def change(packed, rows, page_size):
        context_lens = packed.context_lens.copy()
        context_lens[: len(rows)] -= [num_tokens for _, _, num_tokens in rows]
        return {"context_lens": context_lens}

    change_batch(patch, change)


@bug(TOKENS)
def positions_start_again_in_each_chunk(patch):
    def change(packed, rows, page_size):
        positions = np.zeros_like(packed.positions)
        counted = [at for _, _, num_tokens in rows for at in range(num_tokens)]
        positions[: len(counted)] = counted
        return {"positions": positions}

    change_batch(patch, change)


@bug(TOKENS)
def sampling_values_stay_in_the_order_of_the_plan(patch):
    pack = batch.pack

    def unsorted(plan_rows, table, buckets, vocab_size, *, decoding, ahead):
        packed, rows = pack(plan_rows, table, buckets, vocab_size, decoding=decoding, ahead=ahead)
        in_table = [request.row for request, _, _ in plan_rows]
        sampling = batch._pack_sampling(plan_rows, in_table, table, len(packed.context_lens), vocab_size, ahead)
        return packed._replace(sampling=sampling), rows

    patch.setattr(batch, "pack", unsorted)


@bug(TOKENS)
def results_are_taken_in_the_order_of_the_plan(patch):
    pack = batch.pack
    patch.setattr(batch, "pack", lambda rows, *shape, **options: (pack(rows, *shape, **options)[0], rows))


@bug(TOKENS)
def a_chunk_that_does_not_reach_the_last_token_samples(patch):
    update = Scheduler.update

    def eager(self, plan, sampled, *others):
        short = [
            (request, int(token))
            for (request, start, num_tokens), token in zip(plan.rows, sampled)
            if start + num_tokens < request.num_tokens and not request.is_beam
        ]
        gained = update(self, plan, sampled, *others)
        for request, token in short:
            request.append(token, 0.0, 0.0)
        return gained

    patch.setattr(Scheduler, "update", eager)


@bug(TOKENS)
def a_step_planned_before_an_abort_still_adds_its_token(patch):
    update = Scheduler.update

    def heedless(self, plan, sampled, logprobs, candidates):
        for (request, _, _), token in zip(plan.rows, sampled):
            if request.status is RequestStatus.FINISHED:
                request.append(int(token), 0.0, 0.0)
        return update(self, plan, sampled, logprobs, candidates)

    patch.setattr(Scheduler, "update", heedless)


@bug(TOKENS)
def min_tokens_bans_one_token_too_few(patch):
    pack_sampling = batch._pack_sampling

    def short(rows, in_table, table, batch_rows, vocab_size, ahead):
        packed = pack_sampling(rows, in_table, table, batch_rows, vocab_size, ahead)
        banned_ids = packed.banned_ids.copy()
        for row, (request, _, _) in enumerate(rows):
            if len(request.output_token_ids) + ahead + 1 == request.sampling.min_tokens:
                banned_ids[row] = vocab_size
        return packed._replace(banned_ids=banned_ids)

    patch.setattr(batch, "_pack_sampling", short)


@bug(TOKENS)
def a_step_ahead_forgets_its_page(patch):
    hold, ahead = PageTables.hold, Scheduler.ahead

    def careless(self, plan):
        patch.setattr(PageTables, "hold", lambda self, request, start, end: True)
        planned = ahead(self, plan)
        patch.setattr(PageTables, "hold", hold)
        return planned

    patch.setattr(Scheduler, "ahead", careless)


@bug(ACCOUNTS)
def a_step_ahead_takes_a_request_past_its_length(patch):
    patch.setattr(Request, "num_left", lambda self, max_model_len, left=Request.num_left: left(self, max_model_len) + 1)


@bug(TOKENS)
def max_tokens_is_one_too_many(patch):
    end = Request.end

    def late(self, max_model_len):
        self.max_tokens += 1
        ended = end(self, max_model_len)
        self.max_tokens -= 1
        return ended

    patch.setattr(Request, "end", late)


# Sharing


@bug(TOKENS)
def a_shared_page_is_written_without_a_copy(patch):
    patch.setattr(PagePool, "is_read_only", lambda self, page_id: False)


@bug(TOKENS)
def a_published_page_is_written_by_its_last_holder(patch):
    patch.setattr(PagePool, "is_read_only", lambda self, page_id: self._references[page_id] > 1)


@bug(TOKENS)
def a_page_is_replaced_and_not_copied(patch):
    patch.setattr(simulation.FakeDevice, "copy", lambda self, page_copies: None)


@bug(TOKENS)
def another_page_is_copied(patch):
    copy = simulation.FakeDevice.copy
    patch.setattr(simulation.FakeDevice, "copy", lambda self, pairs: copy(self, [(s - 1, t) for s, t in pairs]))


@bug(TOKENS)
def a_copied_page_stays_in_the_table(patch):
    patch.setattr(Request, "replace_page", lambda self, index, page_id: self.page_ids[index])


@bug(TOKENS)
def a_key_tells_only_the_tokens_of_its_page(patch):
    def key(self, page, page_size):
        return repr(self.tokens(page * page_size, (page + 1) * page_size)).encode()

    patch.setattr(Request, "key", key)


@bug(TOKENS)
def a_key_leaves_out_the_last_token(patch):
    def key(self, page, page_size):
        return repr(self.tokens(0, (page + 1) * page_size - 1)).encode()

    patch.setattr(Request, "key", key)


@bug(TOKENS)
def a_page_is_published_before_it_is_computed(patch):
    hold = PageTables.hold

    def eager(self, request, start, end):
        held, computed = hold(self, request, start, end), request.num_computed_tokens
        if held and self._prefix_caching:
            request.num_computed_tokens = end
            self.publish(request)
            request.num_computed_tokens = computed
        return held

    patch.setattr(PageTables, "hold", eager)


@bug(TOKENS)
def an_evicted_page_is_still_found(patch):
    patch.setattr(PagePool, "_evict", lambda self: self._idle.popitem(last=False)[0])


@bug(TOKENS)
def a_page_that_was_found_is_not_held(patch):
    def fork(self, page_ids):
        for page_id in page_ids:
            if self._references[page_id]:
                self._references[page_id] += 1

    patch.setattr(PagePool, "fork", fork)


@bug(TOKENS)
def a_fork_takes_over_a_token_that_is_not_computed(patch):
    inheritance = PageTables.inheritance

    def greedy(self, request):
        found = inheritance(self, request)
        more = request.parent is not None and found.num_tokens % self.pool.page_size
        return found._replace(num_tokens=found.num_tokens + bool(more))

    patch.setattr(PageTables, "inheritance", greedy)


@bug(ACCOUNTS)
def forks_of_an_aborted_request_are_lost(patch):
    patch.setattr(Queues, "release_forks", lambda self, request: setattr(request, "forks", []))


@bug(ACCOUNTS)
def a_fork_waits_for_ever(patch):
    release = Queues.release_forks
    patch.setattr(Queues, "release_forks", lambda self, request: request.has_computed_prompt or release(self, request))


# Swapping


@bug(TOKENS)
def pages_are_not_brought_back(patch):
    change_moves(patch, lambda moves: moves._replace(swap_in=()))


@bug(TOKENS)
def pages_are_not_moved_out(patch):
    change_moves(patch, lambda moves: moves._replace(swap_out=()))


@bug(TOKENS)
def pages_are_not_moved_to_disk(patch):
    change_moves(patch, lambda moves: moves._replace(spills=()))


@bug(TOKENS)
def another_place_is_read(patch):
    change_moves(patch, lambda moves: moves._replace(swap_in=[(max(place - 1, 0), to) for place, to in moves.swap_in]))


@bug(TOKENS)
def a_page_is_found_before_it_has_arrived(patch):
    find = SwapSpace.find

    def hasty(self, keys):
        under_way, self._under_way = self._under_way, set()
        found = find(self, keys)
        self._under_way = under_way
        return found

    patch.setattr(SwapSpace, "find", hasty)


@bug(TOKENS)
def a_place_that_is_to_be_filled_goes_to_another_page(patch):
    make_place = SwapSpace._make_place

    def hasty(self):
        under_way, self._under_way = self._under_way, set()
        place = make_place(self)
        self._under_way |= under_way
        return place

    patch.setattr(SwapSpace, "_make_place", hasty)


@bug(TOKENS)
def a_place_keeps_its_key_when_it_is_taken(patch):
    def keep(self):
        return len(self._host) if len(self._host) < self.num_pages else next(iter(self._host.values()))

    patch.setattr(SwapSpace, "_make_place", keep)


@bug(TOKENS)
def the_page_after_those_brought_back_counts_as_computed(patch):
    found = PageTables._found

    def greedy(self, request):
        what = found(self, request)
        return what._replace(num_tokens=what.num_tokens + bool(what.keys))

    patch.setattr(PageTables, "_found", greedy)


@bug(ACCOUNTS)
def pages_brought_back_are_not_held(patch):
    def careless(self, num_pages, acquire=PageTables._acquire_for_moves):
        page_ids = acquire(self, num_pages)
        self.pool.release(page_ids[1:])
        return page_ids

    patch.setattr(PageTables, "_acquire_for_moves", careless)


def change_moves(patch, change):
    run = simulation.FakeDevice.run
    patch.setattr(simulation.FakeDevice, "run", lambda self, moves, copies: run(self, change(moves), copies))


# Windows, families and urgent requests


@bug(TOKENS)
def a_page_is_given_back_one_token_too_early(patch):
    patch.setattr(
        PageTables,
        "_num_out_of_sight",
        lambda self, at, out=PageTables._num_out_of_sight: out(self, at + 1 + self.pool.page_size),
    )


@bug(ACCOUNTS)
def a_page_out_of_sight_is_not_released(patch):
    def forget(self, request, drop=PageTables.drop_unseen):
        release, self.pool.release = self.pool.release, lambda page_ids: None
        drop(self, request)
        self.pool.release = release

    patch.setattr(PageTables, "drop_unseen", forget)


@bug(TOKENS)
def a_fork_begins_with_pages_that_its_parent_has_given_back(patch):
    inheritance = PageTables.inheritance

    def blind(self, request):
        parent = request.parent
        if parent is None:
            return inheritance(self, request)
        dropped, parent.num_dropped_pages = parent.num_dropped_pages, 0
        found = inheritance(self, request)
        parent.num_dropped_pages = dropped
        return found

    patch.setattr(PageTables, "inheritance", blind)


@bug(ACCOUNTS)
def a_stopped_request_is_served_in_its_old_row(patch):
    schedule = Scheduler.schedule

    def stale(self):
        running = list(self.running)
        plan = schedule(self)
        if plan is None:
            return None
        planned = {request.request_id for request, _, _ in plan.rows}
        rows = [
            (request, 0, 1)
            for request in running
            if request.status is RequestStatus.WAITING and request.request_id not in planned
        ]
        return plan._replace(rows=[*plan.rows, *rows])

    patch.setattr(Scheduler, "schedule", stale)


def failure(check_accounts: bool) -> Exception | None:
    """What the property says of the first of the random workloads that breaks it; None if it holds for all."""
    for seed in range(NUM_WORKLOADS):
        try:
            simulation.run(simulation.draw_workload(random.Random(seed).randint), check_accounts)
        except (AssertionError, ValueError, IndexError) as error:
            return error
    return None


@pytest.mark.parametrize("check_accounts", [ACCOUNTS, TOKENS])
def test_without_a_bug_the_property_holds(check_accounts):
    assert failure(check_accounts) is None


@pytest.mark.parametrize("name", BUGS)
def test_the_property_fails_if(name, monkeypatch):
    check_accounts, plant = BUGS[name]
    plant(monkeypatch)
    assert failure(check_accounts) is not None
