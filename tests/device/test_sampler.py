"""Drawing a token: the distribution, what a draw may depend on, and the numbers that must not break it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_oracle import assert_drawn_from, distribution
from sampling_rows import batch_of

from jpaged.device import sampler
from jpaged.host.batch import SamplingBatch
from jpaged.host.sampling_params import MAX_BANNED_IDS

VOCAB = 11
LOGITS = np.array([0.3, 2.1, -1.0, 2.1, 1.2, -3.0, 0.9, 1.2, -0.4, 1.9, 0.0], np.float32)

sample = jax.jit(sampler.sample)


def draw(logits, rows: list[dict], positions=None) -> tuple[np.ndarray, np.ndarray]:
    logits = np.asarray(logits, np.float32)
    positions = np.arange(len(rows)) if positions is None else np.broadcast_to(positions, len(rows))
    ids, logprobs, *_ = sample(logits, batch_of(rows, logits.shape[1]), positions.astype(np.int32))
    assert ids.dtype == jnp.int32 and logprobs.dtype == jnp.float32
    return np.asarray(ids), np.asarray(logprobs)


def draw_many(logits, rows: list[dict], times: int, first_position: int = 1) -> np.ndarray:
    """Ids [rows, times] of one batch in which every row stands at `times` positions. logits: one row, or one each."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (len(rows), np.shape(logits)[-1]))
    positions = np.tile(np.arange(first_position, first_position + times), len(rows))
    batch = batch_of(rows, logits.shape[1])
    repeated = SamplingBatch(*(np.repeat(field, times, axis=0) for field in batch))
    ids, *_ = sample(np.repeat(logits, times, axis=0), repeated, positions.astype(np.int32))
    return np.asarray(ids).reshape(len(rows), times)


# Temperatures and filters, alone and together. LOGITS has ties at ids 1 and 3 (the largest) and 4 and 7.
SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 4},  # of the equal ids 4 and 7 the first
    {"top_k": VOCAB},
    {"top_k": 1000},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"min_p": 1.0},  # both of the largest
    {"temperature": 0.6, "top_k": 6},
    {"temperature": 1.7, "top_p": 0.8},
    {"temperature": 2.5, "min_p": 0.4},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 5, "top_p": 0.999},  # of what top_k left, not of all
    {"top_k": 8, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.35},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.2},
    {"temperature": 0.5, "top_k": 3, "banned_ids": (1,)},
    {"top_p": 0.5, "banned_ids": (3, 9, 4)},
    {"temperature": 0.0, "banned_ids": (1,)},
    {"min_p": 0.9, "banned_ids": (1, 3)},
]


def test_draws_follow_the_distribution_of_their_row_in_a_batch_of_all_settings():
    rows = [setting | {"seed": 1000 + i} for i, setting in enumerate(SETTINGS)]
    ids = draw_many(LOGITS, rows, 2048)
    for setting, drawn in zip(SETTINGS, ids, strict=True):
        assert_drawn_from(drawn, distribution(LOGITS, **setting), str(setting))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 0.88},
        {"temperature": 1.0, "top_p": 0.8, "min_p": 0.5},
        {"temperature": 1.0, "top_k": 4},
    ],
)
def test_the_comparison_with_a_distribution_finds_a_wrong_one(wrong):
    right = {"temperature": 1.0, "top_p": 0.8}
    drawn = draw_many(LOGITS, [right], 2048)[0]
    assert_drawn_from(drawn, distribution(LOGITS, **right))
    with pytest.raises(AssertionError):
        assert_drawn_from(drawn, distribution(LOGITS, **wrong))


def test_filters_keep_the_defined_ids_of_a_large_vocabulary():
    rng = np.random.default_rng(0)
    vocab = 1000  # not a multiple of the chunks in which draws are looked up
    rows = [
        {"temperature": float(rng.uniform(0.3, 2)), "top_k": int(rng.integers(0, 300))}
        | {"top_p": float(rng.choice([1.0, 0.5, 0.9])), "min_p": float(rng.choice([0.0, 0.02]))}
        for _ in range(12)
    ]
    # Logits of few different values: ties everywhere.
    logits = np.round(rng.standard_normal((12, vocab)) * 2, 1).astype(np.float32)
    ids = draw_many(logits, rows, 512)
    for row, (setting, drawn) in enumerate(zip(rows, ids, strict=True)):
        allowed = distribution(logits[row], **setting)
        assert (allowed[drawn] > 0).all(), setting
        kept = np.count_nonzero(allowed)
        if kept < 20:
            assert len(set(drawn)) == kept, setting


def test_draws_over_many_chunks_follow_the_distribution():
    logits = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    drawn = draw_many(logits, [{"seed": 5}], 16384)[0]
    assert_drawn_from(drawn // 8, distribution(logits).reshape(-1, 8).sum(1))
    assert drawn.max() > 900 and drawn.min() < 100


def test_top_p_stops_where_the_probability_is_reached_exactly():
    rows = [{"top_p": p, "seed": i} for i, p in enumerate((0.25, 0.5, 0.75, 1.0))]
    ids = draw_many(np.zeros(4), rows, 1024)
    assert [set(drawn) for drawn in ids] == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 512])
def test_the_whole_vocabulary_can_be_drawn_and_nothing_else(vocab):
    drawn = draw_many(np.zeros(vocab), [{}], 8192)[0]
    assert set(drawn) == set(range(vocab))


# Greedy


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals():
    logits = np.zeros((4, 300), np.float32)
    logits[0, [7, 200, 299]] = 2
    logits[1, 299] = 1e-3
    logits[3, :] = -5
    logits[3, [290, 250]] = -4
    ids, _ = draw(logits, [{"temperature": 0.0, "seed": i} for i in range(4)])
    np.testing.assert_array_equal(ids, [7, 299, 0, 250])


def test_greedy_rows_stay_greedy_beside_rows_that_draw():
    logits = np.random.default_rng(2).standard_normal((6, VOCAB))
    rows = [{"temperature": 0.0}, {"temperature": 5.0}, {"temperature": 0.0, "top_k": 3}] * 2
    for position in range(20):
        ids, _ = draw(logits, rows, position)
        np.testing.assert_array_equal(ids[[0, 2, 3, 5]], logits.argmax(1)[[0, 2, 3, 5]])


# Log-probabilities


def test_the_logprob_is_that_of_the_unmodified_logits():
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((len(SETTINGS), VOCAB)) * 3).astype(np.float32)
    ids, logprobs = draw(logits, SETTINGS)
    wide = logits.astype(np.float64)
    wanted = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, ids[:, None].astype(int), 1)[:, 0], atol=1e-5)
    ids, logprobs = draw(logits + 1e4, SETTINGS)  # a common offset changes nothing but the rounding
    np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, ids[:, None].astype(int), 1)[:, 0], atol=5e-3)


# What a draw depends on


def test_a_draw_depends_on_its_seed_and_position_alone():
    rng = np.random.default_rng(4)
    rows = [SETTINGS[i % len(SETTINGS)] | {"seed": int(rng.integers(2**63))} for i in range(40)]
    logits = rng.standard_normal((40, 300)).astype(np.float32)
    positions = rng.integers(1, 5000, 40)
    together, _ = draw(logits, rows, positions)
    for i in range(0, 40, 3):  # alone
        assert draw(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1])[0] == together[i]
    order = rng.permutation(40)  # in other places
    np.testing.assert_array_equal(draw(logits[order], [rows[i] for i in order], positions[order])[0], together[order])
    others = [rows[i] if i % 2 else {"temperature": 0.0} for i in range(40)]  # among others
    np.testing.assert_array_equal(draw(logits, others, positions)[0][1::2], together[1::2])
    noise = logits.copy()
    noise[::2] = rng.standard_normal((20, 300))
    np.testing.assert_array_equal(draw(noise, rows, positions)[0][1::2], together[1::2])


def test_an_unfiltered_row_draws_the_same_beside_rows_that_filter_or_ban():
    logits = np.random.default_rng(5).standard_normal((64, 300))
    plain = [{"seed": i} for i in range(64)]
    wanted, _ = draw(logits, plain)
    for neighbour in ({"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.5}, {"banned_ids": (0, 5)}, {"temperature": 0.0}):
        ids, _ = draw(logits, [row if i % 4 else row | neighbour for i, row in enumerate(plain)])
        keep = np.arange(64) % 4 > 0
        np.testing.assert_array_equal(ids[keep], wanted[keep])


def test_seeds_and_positions_lead_to_different_draws():
    logits = np.zeros(4096, np.float32)
    seeds = (0, 1, 2, 2**32, 2**32 + 1, 2**63, 2**64 - 1)
    ids = draw_many(logits, [{"seed": seed} for seed in seeds], 64)
    for i in range(len(seeds)):
        assert len(set(ids[i])) >= 58
        for j in range(i):
            assert (ids[i] == ids[j]).mean() < 0.1, (seeds[i], seeds[j])


def test_draws_at_neighbouring_positions_and_of_neighbouring_seeds_are_independent():
    logits, even = np.zeros(4, np.float32), np.full(16, 1 / 16)
    ids = draw_many(logits, [{"seed": 7}, {"seed": 8}], 8192)
    assert_drawn_from(4 * ids[0, :-1] + ids[0, 1:], even, "positions p and p + 1")
    assert_drawn_from(4 * ids[0] + ids[1], even, "seeds s and s + 1")
    assert_drawn_from(4 * ids[0, 1:] + ids[1, :-1], even, "seed + 1 at the position before")
    many = draw_many(logits, [{"seed": seed} for seed in range(8192)], 1)[:, 0]
    assert_drawn_from(many, np.full(4, 1 / 4), "one position, many seeds")


# Banned ids


def test_banned_ids_are_never_drawn_and_their_padding_bans_nothing():
    vocab = 300
    logits = np.zeros((3, vocab), np.float32)
    logits[:, [5, 299]] = 6
    full = tuple(range(MAX_BANNED_IDS))
    rows = [{"banned_ids": (5, 299)}, {"banned_ids": full}, {"banned_ids": (vocab, vocab + 1, 2**31 - 1)}]
    ids = draw_many(logits, rows, 4096)
    for row, setting, drawn in zip(logits, rows, ids, strict=True):
        assert_drawn_from(drawn, distribution(row, **setting), str(setting))
    assert 299 in ids[2] and 5 in ids[2]


def test_banned_ids_of_a_row_are_free_for_the_others():
    logits = np.tile(LOGITS, (3, 1))
    rows = [{"temperature": 0.0}, {"temperature": 0.0, "banned_ids": (1,)}, {"temperature": 0.0}]
    ids, _ = draw(logits, rows)
    np.testing.assert_array_equal(ids, [1, 3, 1])
    ids, _ = draw(logits, [row | {"temperature": 1.0, "top_k": 1} for row in rows])
    np.testing.assert_array_equal(ids, [1, 3, 1])


def test_an_id_without_weight_is_not_drawn_however_the_sums_are_rounded():
    # Targets around every boundary between chunks that begin and end with ids of no weight.
    look_up = jax.jit(sampler.look_up)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        weights = rng.exponential(size=(50, sampler.CHUNK)).astype(np.float32)
        weights[rng.random(weights.shape) < (0.3, 0.7, 0.99)[seed % 3]] = 0
        weights[:, :3] = weights[:, -3:] = 0
        sums = np.cumsum(weights.sum(1, dtype=np.float64))
        targets = sums[:-1, None] / sums[-1] + np.arange(-20, 20) / 2**23
        ids = look_up(
            np.broadcast_to(weights.reshape(1, -1), (targets.size, weights.size)), jnp.float32(targets.ravel())
        )
        assert (weights.ravel()[ids] > 0).all()


# Numbers that break things


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_nan_logits_give_an_id_of_the_vocabulary_and_do_not_touch_other_rows(setting):
    logits = np.random.default_rng(6).standard_normal((6, 300)).astype(np.float32)
    wanted, _ = draw(logits, [setting] * 6)
    broken = logits.copy()
    broken[1], broken[2, 7], broken[3], broken[4, 8] = np.nan, np.nan, -np.inf, np.inf
    ids, logprobs = draw(broken, [setting] * 6)
    assert ((ids >= 0) & (ids < 300)).all()
    np.testing.assert_array_equal(ids[[0, 5]], wanted[[0, 5]])
    assert np.isfinite(logprobs[[0, 5]]).all() and np.isnan(logprobs[[1, 2]]).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-37])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_smallest_temperatures_are_greedy(temperature, filters):
    logits = np.random.default_rng(7).standard_normal((16, 300)) * 10
    ids, logprobs = draw(logits, [filters | {"temperature": temperature, "seed": i} for i in range(16)])
    np.testing.assert_array_equal(ids, logits.argmax(1))
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize("temperature", [1e6, 1e30, 3e38])
def test_the_largest_temperatures_are_even_draws(temperature):
    drawn = draw_many(LOGITS, [{"temperature": temperature}], 4096)[0]
    assert_drawn_from(drawn, np.full(VOCAB, 1 / VOCAB))
    if temperature < 1e37:  # beyond, quotients are all zero and the order of the ids is all that is left
        drawn = draw_many(LOGITS, [{"temperature": temperature, "top_k": 3}], 4096)[0]
        assert_drawn_from(drawn, np.isin(np.arange(VOCAB), [1, 3, 9]) / 3)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 1e-3}])
def test_extreme_logits_are_drawn_as_their_probabilities_say(filters):
    vocab = 300
    huge, few, wide = np.zeros(vocab), np.full(vocab, -np.inf), np.full(vocab, -3e38)
    huge[77] = 1e4
    few[[3, 298]] = 0.5, 1.5
    wide[[0, 299]] = 3e38
    rows = [filters | {"seed": 1}] * 3
    ids = draw_many([huge, few, wide], rows, 2048)
    assert set(ids[0]) == {77}
    assert_drawn_from(
        ids[1], distribution([0.5, 1.5], **filters)[[0] * 298 + [1, 1]] * np.isin(np.arange(300), [3, 298])
    )
    assert set(ids[2]) == {0, 299}
    _, logprobs = draw([huge, few], rows[:2])
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize(("vocab", "number"), [(5, 3), (5, 9), (256, 12), (257, 12), (3000, 12), (3000, 1)])
def test_candidates_are_the_likeliest_ids_best_first_and_of_equal_ones_the_lowest(vocab, number):
    rng = np.random.default_rng(vocab)
    logits = np.stack([rng.normal(size=vocab), rng.integers(0, 3, vocab), np.zeros(vocab)]).astype(np.float32)
    rows = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0, "banned_ids": [0, 2]}]
    draws = jax.jit(sampler.sample, static_argnames="num_candidates")
    found = draws(logits, batch_of(rows, vocab), np.arange(3, dtype=np.int32), num_candidates=number)
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    logprobs[2, [0, 2]] = -np.inf
    order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :number]
    wanted = np.take_along_axis(logprobs, order, axis=-1)
    seen = np.isfinite(wanted)
    np.testing.assert_array_equal(np.where(seen, found.candidate_ids, 0), np.where(seen, order, 0))
    np.testing.assert_allclose(np.where(seen, found.candidate_logprobs, 0), np.where(seen, wanted, 0), atol=1e-5)
    assert (np.asarray(found.candidate_logprobs)[~seen] == -np.inf).all()
