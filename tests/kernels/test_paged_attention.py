"""The decode kernel against the oracle, on every implementation."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cases import DECODE_CASES, Case, caught, check_decode, decode_case, jitted, make_inputs

from pallas_kernels import paged_attention, ragged_paged_attention
from pallas_kernels.paged_attention import reference

SMALL = decode_case("small", 17, 33, 5, 40)


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_each_row_attends_to_its_own_context(case: Case, implementation):
    check_decode(partial(paged_attention, **implementation), case)


def test_the_results_of_a_row_do_not_depend_on_the_other_rows_or_the_order(implementation):
    q, *rest, _ = make_inputs(SMALL)
    k_pages, v_pages, tables, lens = rest
    kernel = jitted(partial(paged_attention, **implementation), **SMALL.options)
    order = np.array([2, 0, 3, 1])
    together = np.asarray(kernel(q, *rest))
    np.testing.assert_array_equal(kernel(q[order], k_pages, v_pages, tables[order], lens[order]), together[order])
    # The neighbours' contexts change; NaN is allowed to nobody's neighbour.
    lens = np.array([17, 0, 0, 1], np.int32)
    np.testing.assert_allclose(kernel(q, k_pages, v_pages, tables, lens)[0], together[0], rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("group", "num_kv_heads"), [(1, 3), (8, 1)])
def test_with_a_split_size_a_row_has_the_same_bits_in_any_batch_and_table(group, num_kv_heads, implementation):
    lens = (300, 17, 130, 1, 64, 0, 33, 96, 200)
    case = decode_case("nine", *lens, num_kv_heads=num_kv_heads, group=group)
    q, k_pages, v_pages, tables, lens, _ = make_inputs(case)
    q = np.insert(q, 5, 0, axis=0)  # of the row without a context
    attend = jitted(partial(paged_attention, **implementation), split_size=64, **case.options)
    together = np.asarray(attend(q, k_pages, v_pages, tables, lens))
    for rows, columns in (([0], 20), ([1], 20), ([1, 3, 5], 2), ([8, 1, 0, 7], 40)):
        table = np.pad(tables, [(0, 0), (0, 40)])[rows, :columns]
        out = np.asarray(attend(q[rows], k_pages, v_pages, table, lens[rows]))
        np.testing.assert_array_equal(out.view(np.uint32), together[rows].view(np.uint32))


@pytest.mark.parametrize("kernel", [paged_attention, ragged_paged_attention])
def test_queries_larger_than_the_type_of_the_pool_holds_are_served(kernel, implementation):
    case = decode_case("large", 17, 33, q_type="bf16", kv_type="f16", head_dim=64)
    q, k_pages, v_pages, *rest = make_inputs(case)
    rest = rest if kernel is ragged_paged_attention else rest[:2]
    out = [
        np.asarray(jitted(partial(kernel, **implementation), scale=0.3 / factor)(q * factor, k_pages, v_pages, *rest))
        for factor in (q.dtype.type(1), q.dtype.type(2**20))
    ]
    np.testing.assert_array_equal(out[1], out[0])


# What a faulty kernel would have made of its arguments.
BUGS = {
    "a window one too long": lambda a: {"sliding_window": a["sliding_window"] and a["sliding_window"] + 1},
    "a window one too short": lambda a: {"sliding_window": a["sliding_window"] and max(a["sliding_window"] - 1, 1)},
    "no window": lambda a: {"sliding_window": None},
    "no soft cap": lambda a: {"soft_cap": None},
    "the usual scale": lambda a: {"scale": a["q"].shape[-1] ** -0.5},
    "a scale off by a thousandth": lambda a: {"scale": a["scale"] * 1.001},
    "one token too many": lambda a: {"context_lens": a["context_lens"] + (a["context_lens"] > 0)},
    "one token too few": lambda a: {"context_lens": a["context_lens"] - (a["context_lens"] > 1)},
    "unwritten slots of the last page": lambda a: {"context_lens": -(-a["context_lens"] // 16) * 16},
    "the neighbouring page": lambda a: {"block_tables": a["block_tables"] ^ 1},
    "the first two pages exchanged": lambda a: {"block_tables": a["block_tables"][:, [1, 0, 2, 3]]},
    "another row's pages": lambda a: {"block_tables": a["block_tables"][::-1]},
    "query heads dealt out in turn": lambda a: {"q": a["q"][:, [0, 2, 1, 3]]},
    "keys for values": lambda a: {"v_pages": a["k_pages"]},
}
CATCHING = [
    decode_case("plain", 17, 33, 5, 40),
    decode_case("windowed", 17, 33, 5, 40, sliding_window=3),
    decode_case("capped", 17, 33, 5, 40, soft_cap=1.5),
]


@pytest.mark.parametrize("bug", BUGS)
def test_the_cases_catch_a_planted_bug(bug):
    assert caught(check_decode, paged_attention, CATCHING, BUGS[bug])


def test_the_cases_catch_a_missing_mask(monkeypatch):
    monkeypatch.setattr(reference, "MASKED", 0.0)
    assert caught(check_decode, lambda *args, **options: paged_attention(*args, **options), CATCHING)


def test_the_cases_pass_the_kernel_as_it_is():
    assert not caught(check_decode, paged_attention, CATCHING)
