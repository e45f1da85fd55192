"""Which ids pass top-k, top-p and min-p: against the definition in float64, at ties, at the ends of float32, and with
bugs planted in the kernels, each of which must be found."""

from __future__ import annotations

import types
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import jit_quickly, jitted
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import implementation
from pallas_kernels.keep_top import keep_top, passing, reference, search
from pallas_kernels.keep_top import triton as triton_kernel
from pallas_kernels.target import INTERPRETED

pytestmark = pytest.mark.slow

SLACK = 2e-6  # of the total: tighter than promised, so that it seldom decides
SMALL = {"ahead": 5, "capacity": 64, "num_candidates": 7, "num_warps": 2}  # a list that often does not hold the answer


def lengths(logits, temperature, top_k, top_p) -> tuple[list[int], int, int]:
    """The definition: ids in their order, and the least and the most of them that top-k and top-p may keep."""
    wide = logits.astype(np.float64)
    order = sorted(range(len(wide)), key=lambda i: (-wide[i], i))
    with np.errstate(invalid="ignore"):
        weights = np.exp((wide[order] - wide.max()) / float(temperature))
    if top_k > 0:
        weights = weights[:top_k]
    if top_p >= 1:
        return order, len(weights), len(weights)
    before, total = np.cumsum(weights) - weights, weights.sum()
    least, most = (int((before < (float(top_p) + slack) * total).sum()) for slack in (-SLACK, SLACK))
    return order, max(least, 1), max(most, 1)


def check_row(kept, logits, temperature, top_k, top_p, min_p) -> bool:
    """Raise AssertionError unless `kept` follows the definition. Whether rounding left no choice."""
    order, least, most = lengths(logits, temperature, top_k, top_p)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / float(temperature))
    # Where rounding cannot decide it.
    passes, fails = weights >= min_p * (1 + 1e-5), weights < min_p * (1 - 1e-5)
    for length in range(least, most + 1):
        first = np.zeros(len(logits), bool)
        first[order[:length]] = True
        if not (kept & (~first | fails)).any() and not (~kept & first & passes).any():
            return least == most
    raise AssertionError(f"{kept.sum()} ids kept of {least} to {most}: k={top_k} p={top_p} min_p={min_p}")


def through(boundary, passing=passing, jit=jax.jit):
    """The public function by one way to find the last id."""

    def run(logits, temperature, top_k, top_p, min_p):
        largest = jnp.max(logits, axis=-1)
        return passing(logits, largest, temperature, min_p, *boundary(logits, largest, temperature, top_k, top_p))

    return jit(run)


def small_search(source: str | None = None):
    """`search.py` with so few chunks and rows that all of it is used by a small vocabulary."""
    module = types.ModuleType("search")
    exec(compile(source or Path(search.__file__).read_text(), search.__file__, "exec"), module.__dict__)
    module.CHUNK, module.NUM_CHUNKS, module.ROWS = 4, 8, 3
    return module


@cache
def ways() -> dict:
    kernel = partial(triton_kernel.boundary, interpret=True)
    return {
        "sort": through(reference.boundary),
        "xla": jax.jit(partial(keep_top, implementation="xla")),
        "xla, few chunks": through(small_search().boundary),
        "triton": jit_quickly(partial(keep_top, implementation="triton", interpret=True)),
        "triton, small list": through(partial(kernel, **SMALL), jit=jit_quickly),
    }


WAYS = ("sort", "xla", "xla, few chunks", "triton", "triton, small list")


def rows(vocab: int, seed: int = 0):
    """Rows of every kind with filters of every kind: logits, temperature, top_k, top_p, min_p."""
    rng = np.random.default_rng(seed)
    settings = [
        (1.0, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.0, vocab - 1, 1.0, 0.0),
        (1.0, vocab, 0.9, 0.0),
        (1.0, vocab + 7, 1.0, 0.0),
        (1.0, 0, 1e-30, 0.0),
        (1.0, 0, 0.5, 0.0),
        (2.0, 0, 0.9, 0.0),
        (1.0, 0, 0.999, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.0, 0, 1.0, 1.0),
        (1.5, 7, 0.6, 0.0),
        (1.0, max(vocab // 3, 1), 0.95, 0.02),
        (0.3, 20, 0.8, 0.3),
        (1e-4, 3, 0.9, 0.0),
        (1.0, 17, 1.0, 0.0),
        (1.0, 33, 1.0, 0.0),
    ]
    kinds = [
        rng.standard_normal(vocab) * 3,
        np.round(rng.standard_normal(vocab) * 2) / 2 - 20,  # ties everywhere, all negative
        np.round(rng.standard_normal(vocab)) * 0.0 + rng.integers(0, 2, vocab) * -0.0,  # equal, zeros of both signs
        np.where(rng.random(vocab) < 0.3, -np.inf, rng.standard_normal(vocab) * 8),
        np.where(np.arange(vocab) == vocab // 2, 4.0, -np.inf),  # one left
        rng.standard_normal(vocab) * 1e-3 - 1e4,  # float32 has few values there
    ]
    logits = np.array([kind for kind in kinds for _ in settings], np.float32)
    temperature, top_k, top_p, min_p = zip(*settings * len(kinds))
    return (
        logits,
        np.array(temperature, np.float32),
        np.array(top_k, np.int32),
        np.array(top_p, np.float32),
        np.array(min_p, np.float32),
    )


def check(run, arguments, decided=0.8) -> None:
    kept = np.asarray(run(*arguments))
    found = [check_row(kept[i], *(argument[i] for argument in arguments)) for i in range(len(kept))]
    assert np.mean(found) > decided, "the slack must not be what decides"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab", [11, 300])
def test_the_ids_that_pass_are_those_of_the_definition(way, vocab):
    check(ways()[way], rows(vocab))


@pytest.mark.parametrize(("way", "vocab"), [("xla", 9001), ("triton", 5003), ("xla", 50257)])
def test_large_vocabularies_that_are_a_multiple_of_nothing(way, vocab):
    arguments = rows(vocab, seed=1)
    some = [0, 2, 7, 8, 12, 13, 18 + 5, 18 + 8, 18 + 13, 36 + 8, 54 + 9, 90 + 8]
    check(ways()[way], [argument[some] for argument in arguments], decided=0.3)  # a weight is as small as the slack


@pytest.mark.parametrize("way", WAYS)
def test_of_equal_logits_the_lowest_ids_pass(way):
    logits = np.array([[2, 5, 2, 2, 7, 2, 1, 2, 2, 0, 2]] * 11, np.float32)
    k = np.arange(11, dtype=np.int32)
    kept = ways()[way](logits, np.ones(11, np.float32), k, np.ones(11, np.float32), np.zeros(11, np.float32))
    order = [4, 1, 0, 2, 3, 5, 7, 8, 10, 6, 9]
    for row in range(1, 11):
        assert set(np.flatnonzero(kept[row])) == set(order[:row])
    assert kept[0].all()


@pytest.mark.parametrize("way", WAYS)
def test_top_p_ends_where_the_probability_is_reached_exactly(way):
    p = np.array([1e-30, 0.25, 0.5, 0.75, 0.8125, 1], np.float32)
    one = np.ones(6, np.float32)
    kept = ways()[way](np.zeros((6, 16), np.float32), one, np.zeros(6, np.int32), p, 0 * one)
    np.testing.assert_array_equal(kept.sum(1), [1, 4, 8, 12, 13, 16])
    assert all(row[: row.sum()].all() for row in np.asarray(kept))


FEW = st.lists(st.sampled_from([-np.inf, -3.0, -1.0, -0.0, 0.0, 1e-3, 2.0, 2.5]), min_size=11, max_size=11)


@pytest.mark.parametrize("way", ["xla", "xla, few chunks", "triton, small list"])
@settings(max_examples=40)
@given(st.lists(st.tuples(FEW, st.integers(0, 12), st.floats(2**-7, 1, width=32)), min_size=4, max_size=4))
def test_any_row_follows_the_definition(way, drawn):
    logits = np.array([row[0] for row in drawn], np.float32)
    logits[:, 3] = np.maximum(logits[:, 3], -3)  # a row without any id has no distribution
    k, p = np.array([row[1] for row in drawn], np.int32), np.array([row[2] for row in drawn], np.float32)
    arguments = logits, np.ones(4, np.float32), k, p, np.zeros(4, np.float32)
    kept = np.asarray(ways()[way](*arguments))
    for i in range(4):
        check_row(kept[i], *(argument[i] for argument in arguments))


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_mean_nothing_end_and_do_not_touch_the_others(way):
    arguments = rows(300)
    wanted = np.asarray(ways()[way](*arguments))
    broken = arguments[0].copy()
    broken[1::8], broken[3::8, 7], broken[5::8], broken[7::8, 8] = np.nan, np.nan, -np.inf, np.inf
    kept = np.asarray(ways()[way](broken, *arguments[1:]))
    np.testing.assert_array_equal(kept[::2], wanted[::2])


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("way", ["xla, few chunks", "triton, small list"])
def test_a_row_does_not_depend_on_the_others_to_the_last_bit(way):
    boundary = small_search().boundary if "xla" in way else partial(triton_kernel.boundary, interpret=True, **SMALL)
    boundary = jax.jit(boundary) if "xla" in way else jit_quickly(boundary)
    logits, temperature, k, p, _ = rows(300)
    alone = [np.asarray(x) for x in boundary(logits, logits.max(1), temperature, k, p)]
    order = np.random.default_rng(0).permutation(len(logits))
    moved = boundary(logits[order], logits[order].max(1), temperature[order], k[order], p[order])
    for one, other in zip(alone, moved):
        np.testing.assert_array_equal(one[order].view(np.int32), np.asarray(other).view(np.int32))
    noise, others = logits.copy(), k.copy()
    noise[::2] = np.random.default_rng(1).standard_normal((len(logits) // 2, 300))
    others[::2] = 0
    changed = boundary(noise, noise.max(1), temperature, others, p)
    for one, other in zip(alone, changed):
        np.testing.assert_array_equal(one[1::2].view(np.int32), np.asarray(other)[1::2].view(np.int32))


# (file, what stands there, what is planted)
BUGS = {
    "one too few for top-k": ("search", "_count(logits >= c) >= rows.k", "_count(logits >= c) >= rows.k - 1"),
    "ties by the highest id": ("search", "sums[:, -1] >= n, id_, vocab", "sums[:, -1] >= n, vocab - 1 - id_, vocab"),
    "all ties pass": ("search", "sums[:, -1] >= n, id_, vocab", "sums[:, -1] > vocab, id_, vocab"),
    "top-p of the total before top-k": ("search", "target = rows.p * total", "target = rows.p * rows.total"),
    "negative numbers in the order of their bits": ("search", "bits < 0, bits ^ 0x7FFFFFFF", "bits < 0, bits ^ 0"),
    "one pass too few": ("search", "state[1] > state[0] + 1)", "state[1] > state[0] + 2)"),
    "rows of the first chunks taken for found": ("search", "& ~enough", "& enough"),
    "min-p of the total": ("__init__", "weights >= min_p", "weights / weights.sum(-1, keepdims=True) >= min_p"),
    "the list is taken for the row": ("triton", "lax.cond(enough & (count <= capacity)", "lax.cond(count == count"),
    "a count that starts at 1": ("triton", "& (2**BITS - 1)) - 1", "& (2**BITS - 1))"),
    "weights at or above the threshold": (
        "triton",
        "target - measure([at], True, jnp.greater)",
        "target - measure([at], True)",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    name, right, wrong = BUGS[bug]
    source = Path(search.__file__).with_name(f"{name}.py").read_text()
    assert source.count(right) == 1
    source = source.replace(right, wrong)
    if name == "search":
        run = through(small_search(source).boundary)
    else:
        module = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
        if name == "triton":
            run = through(partial(module.boundary, interpret=True, **SMALL), jit=jit_quickly)
        else:
            run = through(reference.boundary, module.passing)
    with pytest.raises(AssertionError):
        check(run, rows(300))


# The public function


def call(**changes):
    names = ("logits", "temperature", "top_k", "top_p", "min_p")
    return keep_top(**(dict(zip(names, [argument[:3] for argument in rows(11)])) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits": np.zeros(11, np.float32)}, ("logits", "(11,)")),
        ({"logits": np.zeros((3, 11), np.float16)}, ("logits", "float16")),
        ({"logits": np.zeros((3, 0), np.float32)}, ("logits", "got 0")),
        ({"top_k": np.zeros(3, np.float32)}, ("top_k", "int32", "float32")),
        ({"top_p": np.zeros(2, np.float32)}, ("top_p", "(3,)", "(2,)")),
        ({"temperature": np.ones((3, 1), np.float32)}, ("temperature", "(3, 1)")),
        ({"min_p": np.zeros(3, np.int32)}, ("min_p", "int32")),
        *(({"temperature": np.float32([1, x, 1])}, ("temperature", str(x), "row 1")) for x in (0.0, -1.0, np.nan)),
        *(({"top_p": np.float32([1, x, 1])}, ("top_p", str(x), "row 1", "above 0")) for x in (0.0, -0.5, np.nan)),
        *(({"min_p": np.float32([0, x, 0])}, ("min_p", str(x), "row 1", "0 to 1")) for x in (-0.5, 1.5, np.nan)),
        ({"implementation": "cuda"}, ("implementation", "'cuda'", "xla")),
        ({"implementation": "xla", "interpret": True}, ("interpret", "xla")),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError) as caught:
        call(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("way", ["xla", "triton"])
def test_temperatures_at_the_ends_of_float32_are_those_next_to_them(way):
    logits = np.tile(np.where(np.arange(11) % 2, -np.inf, np.arange(11)), (8, 1)).astype(np.float32)
    temperature = np.array([1e-45, 1e-38, 1e-37, 1e-30, 1e30, 1e37, 1e38, np.inf], np.float32)
    for top_k, top_p, min_p, hot in ((0, 0.9, 0.0, 6), (0, 1.0, 0.5, 6), (3, 0.5, 0.1, 2)):
        filters = np.full(8, top_k, np.int32), np.full(8, top_p, np.float32), np.full(8, min_p, np.float32)
        kept = np.asarray(ways()[way](logits, temperature, *filters))
        assert not kept[:, 1::2].any(), "banned ids pass"
        np.testing.assert_array_equal(kept.sum(1), [1] * 4 + [hot] * 4)


@pytest.mark.parametrize("way", ["xla", "triton"])
def test_the_largest_logits_change_nothing_if_the_caller_has_them(way):
    arguments = rows(300)
    given = partial(keep_top, implementation=way, interpret=way == "triton")
    kept = jitted(given)(*arguments, largest=arguments[0].max(1))
    np.testing.assert_array_equal(kept, ways()[way](*arguments))


@pytest.mark.parametrize(("name", "word"), [("triton", "cpu"), ("mosaic_gpu", "xla")])
def test_a_named_implementation_that_cannot_serve_says_so(name, word):
    with pytest.raises(NotImplementedError) as caught:
        call(implementation=name)
    assert word in str(caught.value) and name in str(caught.value)


def test_the_choice_follows_the_target(monkeypatch):
    def chosen(capability, size=300):
        target = INTERPRETED._replace(capability=capability)
        monkeypatch.setattr(implementation, "current_target", lambda: target)
        return implementation.default_implementation("keep_top", jax.ShapeDtypeStruct((size, 2**20), np.float32))

    assert chosen((9, 0)) == chosen((8, 0)) == "triton"
    assert chosen((7, 5)) == chosen((9, 0), 2048) == "xla"
