"""Memory in one piece: the allocator, and the policies by hand."""

import random

import pytest

from jpaged.simulation.contiguous import RESERVATIONS, FirstFit, simulate_contiguous
from jpaged.simulation.trace import ALPACA, Lengths, draw_trace


def test_a_piece_comes_from_the_first_hole_that_is_large_enough():
    memory = FirstFit(10)
    assert [memory.acquire(size) for size in (3, 2, 4)] == [0, 3, 5]
    memory.release(0, 3)
    memory.release(5, 4)
    assert memory.holes == [(0, 3), (5, 5)]
    assert memory.acquire(4) == 5
    assert memory.acquire(4) is None, "five slots are free, but not in one piece"
    assert memory.acquire(3) == 0


def test_neighbouring_holes_become_one():
    memory = FirstFit(9)
    for _ in range(3):
        memory.acquire(3)
    for start in (0, 6, 3):
        memory.release(start, 3)
    assert memory.holes == [(0, 9)]


def test_pieces_and_holes_are_always_the_whole_memory():
    draws, memory, pieces = random.Random(0), FirstFit(100), {}
    for _ in range(2000):
        size = draws.randint(1, 30)
        if pieces and draws.random() < 0.5:
            start = draws.choice(list(pieces))
            memory.release(start, pieces.pop(start))
        elif (start := memory.acquire(size)) is not None:
            pieces[start] = size
        parts = sorted([*pieces.items(), *memory.holes])
        assert [start for start, _ in parts] == [sum(size for _, size in parts[:i]) for i in range(len(parts))]
        assert sum(size for _, size in parts) == 100
        assert all(sum(a) < b[0] for a, b in zip(memory.holes, memory.holes[1:])), "two holes touch"


@pytest.mark.parametrize(
    ("lengths", "maximum", "power_of_two", "oracle"),
    [(Lengths(10, 25), 2048, 42, 34), (Lengths(1, 1), 2048, 2, 1), (Lengths(7, 64), 2048, 71, 70)],
)
def test_what_is_reserved_for_a_request(lengths, maximum, power_of_two, oracle):
    # The paper's example: for 25 output tokens, 32 are reserved.
    assert [reserve(lengths) for reserve in RESERVATIONS.values()] == [maximum, power_of_two, oracle]


def test_no_reservation_is_longer_than_any_request_or_shorter_than_its_own():
    for lengths in (Lengths(1024, 1024), Lengths(1, 2047), Lengths(900, 1100)):
        assert lengths.num_slots <= RESERVATIONS["power of two"](lengths) <= 2048


def test_the_shares_by_hand():
    # Two requests at a time, of which each fills 4, 5, 6 and 7 of its 2048 slots in turn; 1000 slots are left over.
    use = simulate_contiguous("maximum", [Lengths(4, 4)] * 10, 5096)
    assert use.concurrent == 2 and use.num_steps == 12  # not those of the first two nor of the last two
    assert use.utilization == pytest.approx(2 * 5.5 / 5096)
    assert use.reserved == pytest.approx(2 * 1.5 / 5096)
    assert use.internal == pytest.approx(2 * 2041 / 5096)
    assert use.external == pytest.approx(1000 / 5096)
    assert use.filled == pytest.approx(5.5 / 2048)


def test_the_oracle_wastes_no_slot_for_good():
    trace = draw_trace(ALPACA, 20_000, seed=0)
    oracle, guess = (simulate_contiguous(policy, trace, 3000) for policy in ("oracle", "power of two"))
    assert oracle.internal == 0 < guess.internal
    assert oracle.external > 0
    assert oracle.concurrent > guess.concurrent


def test_a_trace_that_does_not_fill_the_memory_is_refused():
    with pytest.raises(ValueError, match="too short to keep the memory full, it has 3 sequences: give more tokens"):
        simulate_contiguous("oracle", [Lengths(4, 4)] * 3, 10_000)
