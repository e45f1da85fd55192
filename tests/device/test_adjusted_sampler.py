"""Drawing from adjusted logits: each adjustment by itself and all together, and that a row's are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import logits_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import assert_drawn_from
from sampling_rows import adjustments_of, batch_of

from jpaged.device import sampler
from jpaged.device.adjusted_sampler import NUM_TOPS, adjusted_logits, sample_adjusted
from jpaged.host.constraint import Constraint

VOCABS = (301, 33)  # of which neither fills the last word of a mask
HISTORY_LEN = 24
NUM_BIASED = 16
NUM_ROWS = 8

sample = jax.jit(sampler.sample)
# Not the one of the engine, which takes the scores away from its caller.
adjusted_sample = jax.jit(sample_adjusted)
adjust = jax.jit(adjusted_logits)


def packed(rows: list[dict[str, Any]], vocab: int, history_len: int = HISTORY_LEN):
    """What the samplers take for rows of `prompt`, `output` and settings. Where nothing else says id by id what may be
    drawn, ids that wait for `min_tokens` are banned ids, else they are in the masks."""
    masks: list[set[int] | None] = []
    given = []
    for row in rows:
        masked = "allowed_token_ids" in row or "bad_words" in row
        masks.append(oracle.drawable(vocab, **row) if masked else None)
        waits = not masked and len(row["output"]) < row.get("min_tokens", 0)
        given.append(row | ({"banned_ids": row["ending_ids"]} if waits else {}))
    positions = np.array([len(row["prompt"]) + len(row["output"]) for row in rows], np.int32)
    return batch_of(given, vocab), positions, adjustments_of(rows, masks, vocab, history_len, NUM_BIASED)


def draw(logits: np.ndarray, rows: list[dict[str, Any]], history_len: int = HISTORY_LEN):
    """What both samplers draw, the one that adjusts nothing first, and what is told."""
    sampling, positions, adjustments = packed(rows, logits.shape[1], history_len)
    plain = sample(logits, sampling, positions)
    drawn, told = adjusted_sample(plain.scores, sampling, positions, adjustments, sampler.Sampled(*plain[:2]))
    return jax.device_get((plain, drawn, told))


def check(logits: np.ndarray, rows: list[dict[str, Any]]) -> int:
    """Asserts what is drawn and told of each row; returns how many could not be told from their neighbours."""
    plain, drawn, told = draw(logits, rows)
    assert drawn.token_ids.dtype == told.ids.dtype == np.int32
    num_close = 0
    for i, row in enumerate(rows):
        what = {name: value for name, value in row.items() if name not in ("prompt", "output")}
        scores = oracle.adjusted(logits[i], **row)
        chances = oracle.probabilities(scores, **row)
        if oracle.is_close(scores, **row):
            num_close += 1
            continue
        assert chances[drawn.token_ids[i]] > 0 or is_near(scores, drawn.token_ids[i]), what
        values = oracle.logprobs(logits[i], scores, **row)
        np.testing.assert_array_equal(np.isfinite(told.all_logprobs[i]), np.isfinite(values), str(what))
        np.testing.assert_allclose(told.all_logprobs[i], values, atol=2e-5, rtol=2e-6, err_msg=str(what))
        np.testing.assert_allclose(drawn.logprobs[i], told.all_logprobs[i][drawn.token_ids[i]], err_msg=str(what))
        # Whatever rounding has done to the values, the likeliest of them are the first of their order.
        ids = oracle.likeliest(told.all_logprobs[i], NUM_TOPS)
        np.testing.assert_array_equal(told.ids[i], ids, str(what))
        np.testing.assert_array_equal(told.logprobs[i], told.all_logprobs[i][ids], str(what))
        if set(row) <= {"prompt", "output", "temperature", "top_k", "top_p", "min_p", "seed", "logprobs_mode"}:
            assert drawn.token_ids[i] == plain.token_ids[i], what
            if row.get("logprobs_mode") != "processed":
                np.testing.assert_allclose(drawn.logprobs[i], plain.logprobs[i], atol=1e-5)
    return num_close


def is_near(scores: np.ndarray, chosen: int) -> bool:
    """Whether a greedy choice is one of several that rounding could have made the largest."""
    return bool(scores.max() - scores[chosen] < 1e-5 * max(1, abs(scores.max())))


def rows_of(rng: np.random.Generator, vocab: int, each: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with sequences in which ids are repeated, within the prompt, within the output and across."""
    rows = []
    for i, one in enumerate(each):
        few = rng.integers(0, vocab, 6)
        prompt = rng.choice(few, int(rng.integers(1, 12))).tolist()
        output = rng.choice(few, int(rng.integers(0, 12))).tolist()
        rows.append({"prompt": prompt, "output": output, "seed": 100 + i} | one)
    return rows


def alone(vocab: int) -> list[dict[str, Any]]:
    last = vocab - 1
    sequence = {"prompt": [4, 4, 4, 9, 7], "output": [7, 8, 7, 8, 8]}
    return [
        sequence | one
        for one in (
            {"repetition_penalty": 1.4},
            {"repetition_penalty": 0.5},
            {"frequency_penalty": 0.7},
            {"frequency_penalty": -1.5},
            {"presence_penalty": 2.0},
            {"presence_penalty": -0.6},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4},
            {"logit_bias": {0: 4.0, 31: -2.5, 32: 3.5, last: 5.0}},
            {"logit_bias": {8: 3.0}, "repetition_penalty": 2.0},  # the bias is not penalized
            {"logit_bias": {8: 100.0, 7: -100.0}},
            {"allowed_token_ids": [last]},
            {"allowed_token_ids": [0, 7, 31, 32, last]},
            {"bad_words": [[5], [8, 6], [8, 8, 10], [7, 8, 11], [9, 7, 12], [4, 9, 7, 7, 8, 7, 8, 8, 13], [last]]},
            {"ending_ids": [2, last], "min_tokens": 6},
            {"ending_ids": [2, last], "min_tokens": 5},
            {"allowed_token_ids": [2, 3, last], "ending_ids": [2, last], "min_tokens": 6},
            {"allowed_token_ids": [2, last], "ending_ids": [2, last], "min_tokens": 6},  # else nothing were left
            {"temperature": 0.3},
            {"top_k": 3},
            {"top_p": 0.6},
            {"min_p": 0.3},
            {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
            {"output": [], "frequency_penalty": 1.0},  # all are of the prompt
            {"output": [], "repetition_penalty": 1.5},
            {"prompt": [7], "output": [7], "frequency_penalty": 1.0, "presence_penalty": 0.25},
        )
    ]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_each_setting_alone_means_what_its_definition_says(vocab, mode):
    rng = np.random.default_rng(vocab)
    num_close = 0
    rows = [row | {"logprobs_mode": mode} for row in alone(vocab)]
    rows += [row | {"temperature": 0.0} for row in rows]
    rows += [row | {"logprobs_mode": mode} for row in rows_of(rng, vocab, [{}] * (-len(rows) % NUM_ROWS))]
    for first in range(0, len(rows), NUM_ROWS):
        logits = (2 * rng.standard_normal((NUM_ROWS, vocab))).astype(np.float32)
        num_close += check(logits, rows[first : first + NUM_ROWS])
    print(f"{num_close} of {len(rows)} rows are too close to an edge")
    assert num_close <= 2


@st.composite
def rows_of_all_kinds(draw_one, vocab: int):
    """A batch in which each row asks for something else, or for nothing."""
    rng = np.random.default_rng(draw_one(st.integers(0, 2**32 - 1)))
    ids = st.integers(0, vocab - 1)
    kinds: dict[str, Any] = {
        "repetition_penalty": st.sampled_from([0.3, 0.9, 1.1, 1.9, 5.0]),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100, width=32), min_size=1, max_size=NUM_BIASED),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=40),
        "temperature": st.sampled_from([0.0, 0.5, 0.8, 1.3, 3.0]),
        "top_k": st.integers(1, vocab),
        "top_p": st.sampled_from([0.2, 0.7, 0.95]),
        "min_p": st.sampled_from([0.01, 0.1, 0.5]),
    }
    each: list[dict[str, Any]] = []
    for _ in range(NUM_ROWS):
        names = draw_one(st.sets(st.sampled_from([*kinds, "bad_words", "min_tokens"]), max_size=7))
        row = {name: draw_one(kinds[name]) for name in sorted(names) if name in kinds}
        row["logprobs_mode"] = draw_one(st.sampled_from(["raw", "processed"]))
        if draw_one(st.integers(0, 3)) == 0:
            row = {"temperature": draw_one(kinds["temperature"]), "logprobs_mode": row["logprobs_mode"]}
        elif "min_tokens" in names:
            row |= {"min_tokens": draw_one(st.integers(0, 14)), "ending_ids": rng.permutation(vocab)[:5].tolist()}
        each.append(row)
    rows = rows_of(rng, vocab, each)
    for row, one in zip(rows, each, strict=True):
        if rng.random() < 0.3 and "frequency_penalty" in one:
            ends = [row["output"][len(row["output"]) - n :] for n in range(4)]
            row["bad_words"] = [[*end, int(rng.integers(vocab))] for end in ends] + [rng.integers(0, vocab, 2).tolist()]
    # Some with ties and ids that the model itself never draws.
    logits = (draw_one(st.sampled_from([0.5, 3.0])) * rng.standard_normal((NUM_ROWS, vocab))).astype(np.float32)
    if draw_one(st.booleans()):
        logits = np.round(logits * 2) / 2
    for i, row in enumerate(rows):
        if rng.random() < 0.3 and not {"allowed_token_ids", "bad_words", "min_tokens"} & set(row):
            logits[i, rng.permutation(vocab)[: vocab // 2]] = -np.inf
    return logits, rows


@pytest.mark.parametrize("vocab", VOCABS)
def test_any_settings_together_mean_what_their_definitions_say(vocab):
    counts = [0, 0]

    @settings(max_examples=25)
    @given(rows_of_all_kinds(vocab))
    def runs(batch):
        counts[0] += check(*batch)
        counts[1] += NUM_ROWS

    runs()
    print(f"{counts[0]} of {counts[1]} rows are too close to an edge")
    assert counts[0] < counts[1] / 10


def test_draws_follow_the_distribution_that_the_adjustments_leave():
    vocab, times = 33, 2048
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(vocab).astype(np.float32)
    rows = [*alone(vocab), {"prompt": [3], "output": []}]
    rows = [row | {"top_k": 12} if i % 3 == 0 else row for i, row in enumerate(rows)]
    many = [row | {"seed": times * i + j} for i, row in enumerate(rows) for j in range(times)]
    sampling, positions, adjustments = packed(rows, vocab)
    sampling, positions, adjustments = jax.tree.map(
        lambda field: np.repeat(field, times, axis=0), (sampling, positions, adjustments)
    )
    sampling = sampling._replace(seed=batch_of(many, vocab).seed)
    plain = sample(np.broadcast_to(logits, (len(many), vocab)), sampling, positions)
    drawn, _ = adjusted_sample(plain.scores, sampling, positions, adjustments, sampler.Sampled(*plain[:2]))
    for row, ids in zip(rows, np.asarray(drawn.token_ids).reshape(len(rows), times), strict=True):
        assert_drawn_from(ids, oracle.probabilities(oracle.adjusted(logits, **row), **row), str(row))


def test_rows_that_ask_for_nothing_keep_what_the_step_has_drawn():
    rows = rows_of(np.random.default_rng(3), 301, alone(301)[:4])
    logits = np.random.default_rng(4).standard_normal((4, 301)).astype(np.float32)
    sampling, positions, adjustments = packed(rows, 301)
    asks = np.array([True, False, True, False])
    step = sampler.Sampled(np.full(4, 300, np.int32), np.full(4, -1.5, np.float32))
    drawn, told = adjusted_sample(
        sample(logits, sampling, positions).scores, sampling, positions, adjustments._replace(asks=asks), step
    )
    all_ask, told_all = adjusted_sample(
        sample(logits, sampling, positions).scores, sampling, positions, adjustments, step
    )
    np.testing.assert_array_equal(drawn.token_ids, np.where(asks, all_ask.token_ids, 300))
    np.testing.assert_array_equal(drawn.logprobs, np.where(asks, all_ask.logprobs, -1.5))
    np.testing.assert_array_equal(told.all_logprobs, told_all.all_logprobs)
    assert not np.any(all_ask.token_ids[asks] == 300)


def test_a_neutral_row_draws_the_same_as_from_unadjusted_logits():
    vocab = 301
    rng = np.random.default_rng(6)
    neutral = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05, "temperature": 2.0},
        {"ending_ids": [0, 7, 300], "min_tokens": 50},
        {"temperature": 0.0, "ending_ids": [0, 7, 300], "min_tokens": 50},
    ]
    others = rows_of(rng, vocab, [row for row in alone(vocab) for _ in range(2)])
    for run in range(20):
        rows = rows_of(rng, vocab, [*neutral, others[run]])
        logits = (4 * rng.standard_normal((NUM_ROWS, vocab))).astype(np.float32)
        logits[:, [7, 300]] = logits.max(axis=-1, keepdims=True) + 1
        logits[0, 100:] = -np.inf
        logits = np.roll(logits, run, axis=0)
        plain, drawn, _ = draw(logits, rows)
        np.testing.assert_array_equal(drawn.token_ids[:-1], plain.token_ids[:-1])
        np.testing.assert_allclose(drawn.logprobs[:-1], plain.logprobs[:-1], atol=1e-5)


def test_adjustments_of_a_row_change_nothing_of_another():
    vocab = 301
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((NUM_ROWS, vocab)).astype(np.float32)
    for run in range(0, len(alone(vocab)) - NUM_ROWS, 3):
        rows = rows_of(rng, vocab, alone(vocab)[run : run + NUM_ROWS])
        rows[2] |= {"logprobs_mode": "processed"}
        _, drawn, told = draw(logits, rows)
        for changed in range(NUM_ROWS):
            other = [{"prompt": [1], "output": []} if i == changed else row for i, row in enumerate(rows)]
            _, again, told_again = draw(logits, other)
            same = np.arange(NUM_ROWS) != changed
            np.testing.assert_array_equal(again.token_ids[same], drawn.token_ids[same])
            np.testing.assert_allclose(again.logprobs[same], drawn.logprobs[same], atol=1e-6)
            np.testing.assert_allclose(told_again.all_logprobs[same], told.all_logprobs[same], atol=1e-6)


def test_padding_of_the_history_counts_for_nothing():
    vocab = 301
    rng = np.random.default_rng(8)
    rows = rows_of(rng, vocab, [{"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5}] * 8)
    rows[0] |= {"output": []}
    rows[1] |= {"prompt": [vocab - 1], "output": [vocab - 1]}  # the id before the padding's
    rows[2] |= {"prompt": [0], "output": [0]}
    rows[3] |= {"prompt": [9], "output": []}
    logits = rng.standard_normal((8, vocab)).astype(np.float32)
    for history_len in (HISTORY_LEN, 40):
        _, positions, adjustments = packed(rows, vocab, history_len)
        found = adjust(logits, positions, adjustments)
        wanted = np.stack([oracle.adjusted(one, **row) for one, row in zip(logits, rows, strict=True)])
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_mask_of_a_constraint_has_the_ids_that_its_definition_leaves():
    rng = np.random.default_rng(9)
    for vocab in (5, 31, 32, 33, 64, 301):
        for _ in range(60):
            few = rng.integers(0, vocab, 3)
            rule: dict[str, Any] = {"ending_ids": rng.integers(0, vocab, 2).tolist(), "min_tokens": 4}
            rule["bad_words"] = [rng.choice(few, rng.integers(1, 5)).tolist() for _ in range(4)]
            if rng.random() < 0.7:
                rule["allowed_token_ids"] = rng.integers(0, vocab, rng.integers(1, 9)).tolist()
            output = rng.choice(few, rng.integers(0, 8)).tolist()
            constraint = Constraint(
                vocab,
                allowed=rule.get("allowed_token_ids"),
                bad_words=rule["bad_words"],
                ending_ids=frozenset(rule["ending_ids"]),
                min_tokens=rule["min_tokens"],
            )
            mask = np.zeros((vocab + 31) // 32, np.uint32)
            constraint.fill(mask, output)
            found = {32 * i + bit for i, word in enumerate(mask.tolist()) for bit in range(32) if word >> bit & 1}
            assert found == oracle.drawable(vocab, output, **rule), (rule, output)


def test_the_likeliest_of_many_chunks_are_in_the_vocabulary_and_in_their_order():
    vocab = sampler.CHUNK * (NUM_TOPS + 6) + 7
    rng = np.random.default_rng(10)
    values = np.full((6, vocab), -np.inf, np.float32)
    values[0] = rng.standard_normal(vocab)
    values[1] = rng.integers(0, 3, vocab)
    values[2] = 0
    values[3, [-1, -3, -7]] = 1, 2, 1  # nothing but ids of the last chunk, which the vocabulary does not fill
    values[4, ::700] = 1
    values[4, rng.integers(0, vocab, 9)] = 2
    values[5, rng.permutation(vocab)[: vocab // 2]] = rng.standard_normal(vocab // 2)
    ids, found = jax.jit(sampler.largest_of, static_argnums=1)(values, NUM_TOPS)
    wanted = np.stack([oracle.likeliest(row, NUM_TOPS) for row in values])
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_array_equal(found, np.take_along_axis(values, wanted, axis=1))


# Against other software


@pytest.fixture(scope="module")
def processors():
    """Cases that went through the logits processors of transformers."""
    with np.load(Path(__file__).parents[1] / "data" / "sampling.npz") as stored:
        arrays = dict(stored)
    rows = [
        json.loads(str(one)) | {"prompt": prompt.tolist(), "output": output.tolist(), "logprobs_mode": "processed"}
        for one, prompt, output in zip(arrays["settings"], arrays["prompts"], arrays["outputs"], strict=True)
    ]
    return rows, arrays["logits"][arrays["rows"]], arrays["adjusted"], arrays["processed"]


def test_the_definitions_are_those_of_transformers(processors):
    for row, logits, adjusted, processed in zip(*processors, strict=True):
        scores = oracle.adjusted(logits, **row)
        np.testing.assert_allclose(scores, adjusted, atol=1e-5, rtol=1e-6, err_msg=str(row))
        found = oracle.logprobs(logits, scores, **row)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(processed), str(row))
        np.testing.assert_allclose(found, processed, atol=2e-5, err_msg=str(row))


def test_what_is_drawn_from_is_what_transformers_leaves(processors):
    number = len(processors[0])
    for first in range(0, number, NUM_ROWS):
        index = [i % number for i in range(first, first + NUM_ROWS)]
        rows, logits, adjusted, processed = ([values[i] for i in index] for values in processors)
        _, positions, adjustments = packed(rows, len(logits[0]))
        _, drawn, told = draw(np.stack(logits), rows)
        found = np.array(adjust(np.stack(logits), positions, adjustments))
        for row, scores in zip(rows, found, strict=True):
            if row.get("min_tokens", 0) > len(row["output"]):  # these are not always in the masks
                scores[row["ending_ids"]] = -np.inf
        np.testing.assert_allclose(found, np.stack(adjusted), atol=1e-5, rtol=1e-6)
        np.testing.assert_array_equal(np.isfinite(told.all_logprobs), np.isfinite(processed))
        np.testing.assert_allclose(told.all_logprobs, np.stack(processed), atol=2e-5)
        assert np.isfinite(told.all_logprobs[np.arange(NUM_ROWS), drawn.token_ids]).all()
