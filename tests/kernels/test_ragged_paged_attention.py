"""The kernel for chunks and mixed batches against the oracle, and against the decode kernel."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cases import RAGGED_CASES, Case, caught, check_ragged, jitted, make_inputs

from pallas_kernels import paged_attention, ragged_paged_attention
from pallas_kernels.paged_attention import reference as decode_reference
from pallas_kernels.ragged_paged_attention import reference

BY_NAME = {case.name: case for case in RAGGED_CASES}


@pytest.mark.parametrize("case", RAGGED_CASES, ids=lambda case: case.name)
def test_each_query_attends_to_the_tokens_before_it_in_its_row(case: Case, implementation):
    check_ragged(partial(ragged_paged_attention, **implementation), case)


def test_the_cases_fill_whole_blocks_and_more():
    queries = {n for _, n in BY_NAME["more queries than a block"].rows}
    block = reference.QUERIES
    assert {block - 1, block, block + 1} < queries and max(queries) > 2 * block


@pytest.mark.parametrize("name", ["single queries between long rows", "window 20", "bfloat16"])
def test_each_query_gets_what_the_decode_kernel_gives_at_its_position(name, implementation):
    case = BY_NAME[name]
    inputs = make_inputs(case)
    out = jitted(partial(ragged_paged_attention, **implementation), **case.options)(*inputs)
    queries = np.diff(inputs.query_starts)
    row = np.repeat(np.arange(len(queries)), queries)
    num_tokens = len(row)
    lens = inputs.context_lens[row] - inputs.query_starts[row + 1] + np.arange(num_tokens, dtype=np.int32) + 1
    decode = jitted(partial(paged_attention, **implementation), **case.options)
    alone = decode(inputs.q[:num_tokens], inputs.k_pages, inputs.v_pages, inputs.block_tables[row], lens)
    bound = 2**-6 if case.q_type == "bf16" else 2e-6
    np.testing.assert_allclose(
        np.asarray(out[:num_tokens], np.float32), np.asarray(alone, np.float32), rtol=bound, atol=bound
    )


def test_the_results_do_not_depend_on_the_padding(implementation):
    case = BY_NAME["chunks that begin inside a page"]
    q, k_pages, v_pages, tables, lens, starts = make_inputs(case)
    kernel = jitted(partial(ragged_paged_attention, **implementation), **case.options)
    num_tokens = starts[-1]
    out = kernel(q, k_pages, v_pages, tables, lens, starts)
    padded = kernel(
        np.pad(q[:num_tokens], [(0, 50), (0, 0), (0, 0)], constant_values=np.nan),
        k_pages,
        v_pages,
        np.pad(tables, [(0, 3), (0, 5)]),
        np.pad(lens, (0, 3)),
        np.pad(starts, (0, 3), mode="edge"),
    )
    np.testing.assert_allclose(padded[:num_tokens], out[:num_tokens], rtol=1e-5, atol=1e-6)


# What a faulty kernel would have made of its arguments.
BUGS = {
    "a window one too long": lambda a: {"sliding_window": a["sliding_window"] and a["sliding_window"] + 1},
    "a window one too short": lambda a: {"sliding_window": a["sliding_window"] and a["sliding_window"] - 1},
    "no window": lambda a: {"sliding_window": None},
    "no soft cap": lambda a: {"soft_cap": None},
    "the usual scale": lambda a: {"scale": a["q"].shape[-1] ** -0.5},
    "one token too many": lambda a: {"context_lens": a["context_lens"] + 1},
    "one token too few": lambda a: {"context_lens": a["context_lens"] - (a["context_lens"] > 17)},
    "chunks that forget what came before": lambda a: {"context_lens": a["query_starts"][1:] - a["query_starts"][:-1]},
    "the neighbouring page": lambda a: {"block_tables": a["block_tables"] ^ 1},
    "another row's pages": lambda a: {"block_tables": a["block_tables"][::-1]},
    "a query given to the row before": lambda a: {"query_starts": a["query_starts"] + np.int32([0, 1, 0, 0, 0])},
    "keys for values": lambda a: {"v_pages": a["k_pages"]},
}
ROWS = ((40, 13), (17, 1), (17, 17), (33, 5))
CATCHING = [Case("plain", ROWS), Case("windowed", ROWS, sliding_window=3), Case("capped", ROWS, soft_cap=1.5)]


@pytest.mark.parametrize("bug", BUGS)
def test_the_cases_catch_a_planted_bug(bug):
    assert caught(check_ragged, ragged_paged_attention, CATCHING, BUGS[bug])


def test_the_cases_catch_a_missing_causal_mask(monkeypatch):
    monkeypatch.setattr(decode_reference, "MASKED", 0.0)
    assert caught(check_ragged, lambda *args, **options: ragged_paged_attention(*args, **options), CATCHING)


def test_the_cases_pass_the_kernel_as_it_is():
    assert not caught(check_ragged, ragged_paged_attention, CATCHING)
