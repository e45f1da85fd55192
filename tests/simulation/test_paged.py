"""Paging, sharing and batching through the real scheduler: small cases by hand, and the bars on reduced traces."""

import pytest

from jpaged.simulation import paged
from jpaged.simulation.batching import compare_batching
from jpaged.simulation.contiguous import RESERVATIONS, simulate_contiguous
from jpaged.simulation.paged import serve, simulate_paged
from jpaged.simulation.sharing import simulate_parallel_sampling
from jpaged.simulation.study import DEFAULT_SLOTS, run_study
from jpaged.simulation.trace import ALPACA, SHAREGPT, Lengths, draw_trace, mixed_trace


@pytest.mark.parametrize("n", [1, 3])
def test_every_request_is_served_to_its_length_and_the_accounts_agree(n):
    trace = draw_trace(ALPACA, 10_000, seed=0)
    outputs, counted = {}, 0
    for scheduler, plan in serve(trace, num_slots=2304, page_size=16, n=n, prefix_caching=n > 1):
        assert len(plan.rows) == scheduler.num_running, "somebody runs and does not advance"
        if counted % 10 == 0:
            scheduler.pool.check(request.page_ids for request in scheduler.running)
        counted += 1
        for request, _, _ in plan.rows:
            outputs[request.request_id] = request
    assert scheduler.num_preemptions > 0
    assert {name: len(one.output_token_ids) for name, one in outputs.items()} == {
        f"{index}/{sample}": lengths.output for index, lengths in enumerate(trace) for sample in range(n)
    }
    assert scheduler.pool.num_used == 0


def test_samples_share_their_prompts_pages_by_hand():
    # A prompt of two full pages, and two samples of it: their third pages are their own.
    held = [
        (scheduler.pool.num_used, [len(request.page_ids) for request in scheduler.running])
        for scheduler, _ in serve([Lengths(32, 4)], num_slots=4096, page_size=16, n=2)
    ]
    assert held == [(2, [2]), (3, [3, 2]), (4, [3, 3]), (4, [3, 3]), (3, [3])]


def test_the_shares_by_hand(monkeypatch):
    # One request at a time in two pages of 4 slots (and the null page): it holds 5, 6, 7 tokens, of 7 that it will.
    monkeypatch.setattr(paged, "MAX_LEN", 8)
    use = simulate_paged(4, [Lengths(5, 3)] * 5, 12)
    assert use.concurrent == 1 and use.num_steps == 9
    assert use.utilization == pytest.approx(6 / 12)
    assert (use.reserved, use.internal) == (pytest.approx(1 / 12), pytest.approx(1 / 12))
    assert use.external == pytest.approx(4 / 12)
    assert use.filled == pytest.approx(6 / 8)
    assert (use.num_preemptions, use.recomputed) == (0, 0)


def test_pages_of_one_token_are_always_full():
    use = simulate_paged(1, draw_trace(ALPACA, 20_000, seed=0), 3000)
    assert (use.filled, use.reserved, use.internal) == (1, 0, 0)
    assert use.num_preemptions > 0 and 0 < use.recomputed < 1


def test_static_and_continuous_steps_by_hand():
    # Static: 4 steps for either pair. Continuous: rows of 4 + 1 + 1 and of 1 + 4 steps.
    trace = [Lengths(2, 4), Lengths(2, 1), Lengths(2, 4), Lengths(2, 1), Lengths(2, 1)]
    found = compare_batching("pairs", trace, num_rows=2)
    assert (found.static_steps, found.continuous_steps) == (9, 6)
    assert found.ratio == 1.5
    assert (found.static_busy, found.continuous_busy) == (pytest.approx(11 / 18), pytest.approx(11 / 12))


# The bars, those that Kwon et al. 2023 report: of the memory that requests use, the waste of pages of 16 is below 4 %.


@pytest.fixture(scope="module")
def sharegpt():
    return draw_trace(SHAREGPT, 70_000, seed=0)


def test_pages_of_16_waste_less_than_4_percent_of_the_memory_in_use(sharegpt):
    use = simulate_paged(16, sharegpt, DEFAULT_SLOTS)
    assert use.filled > 0.96
    assert use.utilization > 0.96, "of all memory too, with what is free and the null page"
    assert use.utilization + use.reserved + use.internal + use.external == pytest.approx(1)


def test_short_requests_waste_more_in_their_last_page():
    # Half a page of a request of some 95 tokens is 8 %: the bar of 4 % is for ShareGPT, and holds here with pages of 4.
    trace = draw_trace(ALPACA, 70_000, seed=0)
    assert 0.90 < simulate_paged(16, trace, DEFAULT_SLOTS).filled < 0.95
    assert simulate_paged(4, trace, DEFAULT_SLOTS).filled > 0.96


def test_contiguous_memory_holds_what_the_paper_found(sharegpt):
    # Figure 2: 20.4 % tokens, 13.3 % reserved, 57.3 % internal, 8.9 % external. The other two policies have a buddy
    # allocator there; with ours they come out better, and paging must still hold far more.
    use = simulate_contiguous("maximum", sharegpt, DEFAULT_SLOTS)
    found = use.utilization, use.reserved, use.internal, use.external
    assert found == pytest.approx((0.204, 0.133, 0.573, 0.089), abs=0.03)
    running = [simulate_contiguous(policy, sharegpt, DEFAULT_SLOTS).concurrent for policy in RESERVATIONS]
    assert running == sorted(running)
    assert simulate_paged(16, sharegpt, DEFAULT_SLOTS).concurrent > 1.5 * running[-1]


@pytest.mark.parametrize(("spec", "bar"), [(ALPACA, 0.06), (SHAREGPT, 0.16)], ids=["Alpaca", "ShareGPT"])
def test_sharing_saves_what_the_paper_found(spec, bar):
    found = [simulate_parallel_sampling(n, spec, 60_000, seed=0, num_slots=DEFAULT_SLOTS) for n in (2, 6)]
    assert found[1].saved > found[0].saved > bar / 2
    assert found[1].saved > bar
    assert all(0 < one.saved_full < 0.5 for one in found)


def test_continuous_batching_takes_half_the_steps_on_mixed_lengths():
    assert compare_batching("mixed", mixed_trace(500, seed=0), num_rows=32).ratio > 2


def test_a_study_refuses_what_it_cannot_simulate():
    for options, part in (
        ({"num_slots": 2303}, "slots must be at least 2304, got 2303"),
        ({"num_tokens": 0}, "tokens must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"num_tokens": 100}, "too short to keep the memory full"),
    ):
        with pytest.raises(ValueError, match=part):
            run_study(**options)
