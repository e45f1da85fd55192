"""The property of `workloads` is worth its name: it fails under each of these bugs, planted on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import workloads

from jpaged.engine import engine as engine_module
from jpaged.engine.compile import CompiledSteps

pytestmark = pytest.mark.planted

NUM_WORKLOADS = 12
BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


class Row(NamedTuple):
    request: Any
    start: int
    num_tokens: int


def bug(plant):
    BUGS[plant.__name__] = plant
    return plant


def change_batch(patch, change) -> None:
    """Plants a bug in the batch: `change(batch, rows, page_size)` gives the fields to replace."""
    pack = engine_module.pack

    def changed(rows, table, buckets, *args, **options):
        batch, rows = pack(rows, table, buckets, *args, **options)
        named = [Row(*row) for row in rows]
        return batch._replace(**change(batch, named, buckets.page_size)), rows

    patch.setattr(engine_module, "pack", changed)


def change_results(patch, change) -> None:
    """Plants a bug in what a step returns: `change(token_ids, batch)`."""
    call = CompiledSteps.__call__

    def changed(self, weights, kv_pages, batch):
        kv_pages, sampled = call(self, weights, kv_pages, batch)
        return kv_pages, sampled._replace(token_ids=change(np.asarray(sampled.token_ids), batch))

    patch.setattr(CompiledSteps, "__call__", changed)


def each_token(rows):
    """(place in the batch, row, position) of each token."""
    positions = [(row, row.start + i) for row in rows for i in range(row.num_tokens)]
    return [(at, row, position) for at, (row, position) in enumerate(positions)]


@bug
def slots_are_shifted_after_a_preemption(patch):
    def change(batch, rows, page_size):
        slots = batch.slot_mapping.copy()
        for at, row, _ in each_token(rows):
            slots[at] += row.request.num_preemptions > 0
        return {"slot_mapping": slots}

    change_batch(patch, change)


@bug
def the_last_prompt_token_is_not_written(patch):
    def change(batch, rows, page_size):
        slots = batch.slot_mapping.copy()
        for at, row, position in each_token(rows):
            if position == row.request.num_prompt_tokens - 1:
                slots[at] = 0
        return {"slot_mapping": slots}

    change_batch(patch, change)


@bug
def a_token_comes_from_the_row_beside_it(patch):
    change_results(patch, lambda token_ids, batch: np.roll(token_ids, 1))


@bug
def chunked_rows_give_the_token_after_their_first(patch):
    def change(batch, rows, page_size):
        if batch.query_starts is None:
            return {}
        starts = batch.query_starts.copy()
        for i, row in enumerate(rows):
            if row.start and row.num_tokens > 1:
                starts[i + 1] = starts[i] + 1
        return {"query_starts": starts}

    change_batch(patch, change)


@bug
def decoding_rows_do_not_see_the_token_before(patch):
    def change(batch, rows, page_size):
        lens = batch.context_lens.copy()
        if batch.query_starts is None:
            lens[: len(rows)] = np.maximum(lens[: len(rows)] - 1, 1)
        return {"context_lens": lens}

    change_batch(patch, change)


@bug
def seeds_go_by_the_row(patch):
    def change(batch, rows, page_size):
        seeds = np.zeros_like(batch.sampling.seed)
        seeds[:, 1] = np.arange(len(seeds))
        return {"sampling": batch.sampling._replace(seed=seeds)}

    change_batch(patch, change)


@bug
def filters_of_the_first_row_serve_all(patch):
    def change(batch, rows, page_size):
        sampling = batch.sampling
        first = {
            name: np.full_like(getattr(sampling, name), getattr(sampling, name)[0])
            for name in ("temperature", "top_k", "top_p", "min_p")
        }
        return {"sampling": sampling._replace(**first)}

    change_batch(patch, change)


@bug
def positions_go_on_after_a_preemption(patch):
    """As if what was computed before it still counted."""

    def change(batch, rows, page_size):
        positions = batch.positions.copy()
        for at, row, position in each_token(rows):
            if row.request.num_preemptions and position >= row.request.num_prompt_tokens:
                positions[at] += row.request.num_preemptions
        return {"positions": positions}

    change_batch(patch, change)


@bug
def the_last_page_of_a_block_table_is_stale(patch):
    def change(batch, rows, page_size):
        tables = batch.block_tables.copy()
        for i, row in enumerate(rows):
            held = len(row.request.page_ids)
            if held > 1 and row.start % page_size == 0:
                tables[i, held - 1] = 0
        return {"block_tables": tables}

    change_batch(patch, change)


@bug
def padding_is_written_to_a_page_in_use(patch):
    def change(batch, rows, page_size):
        slots = batch.slot_mapping.copy()
        slots[sum(row.num_tokens for row in rows) :] = rows[0].request.page_ids[0] * page_size
        return {"slot_mapping": slots}

    change_batch(patch, change)


def is_found() -> bool:
    for seed in range(NUM_WORKLOADS):
        try:
            workloads.run(workloads.without_aborts(workloads.draw_workload(random.Random(seed).randint)))
        except AssertionError as error:
            assert "tokens than alone" in str(error), "found by something else than its tokens"
            return True
    return False


@pytest.fixture(scope="module", autouse=True)
def expected():
    """What each request gives alone, from the engine as it is."""
    for seed in range(NUM_WORKLOADS):
        workloads.expect(workloads.draw_workload(random.Random(seed).randint))


@pytest.fixture(autouse=True)
def empty_caches(expected):
    """What was computed with a bug is for nobody to find."""
    yield
    for shape in range(len(workloads.SHAPES)):
        workloads.engine(shape).reset_prefix_cache()


@pytest.mark.parametrize("name", BUGS)
def test_the_property_finds_the_bug(name, monkeypatch):
    BUGS[name](monkeypatch)
    assert is_found()


def test_without_a_bug_there_is_nothing_to_find():
    assert not is_found()
