"""Beam searches without a model: what is drawn, what beams share, and the figures on reduced traces."""

import numpy as np
import pytest

from jpaged.simulation import sharing
from jpaged.simulation.beams import MEASURED, Likelihoods, Search, serve_beams
from jpaged.simulation.sharing import saved_by_beams, share_saved, simulate_beam_search
from jpaged.simulation.trace import ALPACA, SHAREGPT, Lengths, draw_trace

AMPLE = 100_000


@pytest.mark.parametrize("exponent", [2.0, 3.3])
def test_the_likeliest_token_leads_by_the_exponent(exponent):
    logprobs = Likelihoods(exponent, 0.0).draw(np.random.default_rng(0), 40_000, 6)
    assert np.all(np.diff(logprobs) < 0)
    assert np.mean(logprobs[:, 0] - logprobs[:, 1]) == pytest.approx(exponent, rel=0.02)
    assert np.mean(logprobs[:, 1] - logprobs[:, 3]) == pytest.approx(exponent * (1 / 2 + 1 / 3), rel=0.02)
    # Of the Poisson-Dirichlet distribution, the mean of the sum of squares is 1 - 1 / exponent.
    everything = Likelihoods(exponent, 0.0).draw(np.random.default_rng(0), 40_000, 32)
    assert np.mean(np.exp(2 * everything).sum(axis=1)) == pytest.approx(1 - 1 / exponent, rel=0.02)
    assert np.all(np.exp(everything).sum(axis=1) <= 1 + 1e-9)


def test_all_beams_reach_the_length_and_the_accounts_agree():
    trace = draw_trace(ALPACA, 4000, seed=1)
    seen, ended, count = {}, {}, 0
    for scheduler, num_waiting in serve_beams(trace, width=4, likelihoods=MEASURED, num_slots=2304):
        if count % 10 == 0:
            scheduler.check()
        count += 1
        assert num_waiting >= 0
        for request in scheduler.running:
            seen.setdefault(request.request_id.split("/")[0], set()).add(request.request_id)
            ended[request.request_id] = request
    assert scheduler.num_preemptions > 0
    assert scheduler.pool.num_used == 0 and num_waiting == 0
    assert all(len(beams) == (4 if trace[int(name)].output > 1 else 1) for name, beams in seen.items())
    assert len(seen) == len(trace)
    # Their last token is chosen when they end: none of them has it.
    assert {name: len(one.output_token_ids) for name, one in ended.items()} == {
        name: trace[int(name.split("/")[0])].output - 1 for name in ended
    }


def test_beams_share_their_prompts_pages_by_hand():
    # A prompt of two full pages, and two beams: their third pages are their own while they have no more in common.
    never = Likelihoods(3.3, 1.0)  # no beam that is behind comes to be ahead
    steps = serve_beams([Lengths(32, 4)], width=2, likelihoods=never, num_slots=AMPLE)
    held = [
        (scheduler.pool.num_used, [len(request.page_ids) for request in scheduler.running]) for scheduler, _ in steps
    ]
    assert held == [(2, [2]), (4, [3, 3]), (4, [3, 3]), (4, [3, 3])]


def test_a_request_whose_beams_may_not_fit_is_left_out():
    trace = [Lengths(1000, 200), Lengths(100, 20)]
    names = {
        request.request_id.split("/")[0]
        for scheduler, _ in serve_beams(trace, width=4, likelihoods=MEASURED, num_slots=2304)
        for request in scheduler.running
    }
    assert names == {"1"}


def test_so_many_searches_run_at_once_as_are_allowed():
    trace = draw_trace(ALPACA, 2000, seed=0)
    steps = serve_beams(trace, width=3, likelihoods=MEASURED, num_slots=AMPLE, max_searches=2)
    found = [(scheduler.num_running, num_waiting) for scheduler, num_waiting in steps]
    assert max(running for running, _ in found) == 6
    assert found[0] == (2, 3 * len(trace) - 2)


def kinds_alike(alike, monkeypatch):
    """How often another beam is of the kind of the best one."""
    shares, branch = [], Search.branch

    def noting(search, scheduler):
        shares.extend(kind == search.kinds[0] for kind in search.kinds[1:])
        return branch(search, scheduler)

    monkeypatch.setattr(Search, "branch", noting)
    trace = [Lengths(40, 85)] * 12
    for _ in serve_beams(trace, width=4, likelihoods=MEASURED._replace(alike=alike), num_slots=AMPLE):
        pass
    monkeypatch.undo()
    return np.mean(shares)


def test_beams_are_alike_as_often_as_measured(monkeypatch):
    assert kinds_alike(0.0, monkeypatch) == 0
    assert kinds_alike(MEASURED.alike, monkeypatch) == pytest.approx(0.22, abs=0.08)
    assert kinds_alike(1.0, monkeypatch) == 1


def test_beams_that_are_alike_stay_apart_and_share_less():
    trace = draw_trace(SHAREGPT, 12_000, seed=0)
    found = [saved_by_beams(4, trace, MEASURED._replace(alike=alike)) for alike in (0.0, 0.8, 1.0)]
    assert found[0] > found[1] + 0.03 and found[1] > found[2] + 0.03


# Kwon et al. 2023, figure 15: 37.6 to 55.2 % for Alpaca, 44.3 to 66.3 % for ShareGPT, with 2 to 6 beams.


@pytest.mark.parametrize(("spec", "low", "high"), [(ALPACA, 0.376, 0.552), (SHAREGPT, 0.443, 0.663)])
def test_beams_save_about_what_the_paper_found(spec, low, high, monkeypatch):
    monkeypatch.setattr(sharing, "NUM_SHARING", 12)
    trace = draw_trace(spec, 15_000, seed=0)
    assert saved_by_beams(2, trace, MEASURED) == pytest.approx(low, abs=0.07)
    assert high < saved_by_beams(6, trace, MEASURED) < high + 0.15


def test_beams_share_where_the_memory_is_full_too(monkeypatch):
    monkeypatch.setattr(sharing, "NUM_SHARING", 12)
    found = simulate_beam_search(4, ALPACA, 20_000, seed=0, num_slots=2304)
    assert found.num_preemptions > 0
    assert found.saved_full == pytest.approx(found.saved, abs=0.1)


def test_the_share_is_that_of_all_pages():
    saved = [
        share_saved(scheduler)
        for scheduler, _ in serve_beams([Lengths(32, 4)], width=2, likelihoods=MEASURED, num_slots=AMPLE)
    ]
    assert saved == pytest.approx([0, 2 / 6, 2 / 6, 2 / 6])
