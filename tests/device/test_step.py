"""The step on hand-made batches: pages, chunks and padding change nothing, and the pool is updated in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.kv_pages import kv_pages_like, make_kv_pages
from jpaged.device.sampler import sample
from jpaged.device.step import jitted_step, next_logits, step
from jpaged.host.batch import Batch, SamplingBatch
from jpaged.host.sampling_params import MAX_BANNED_IDS
from jpaged.models.decoder import forward

PAGE_SIZE, PAGES_PER_SEQ, NUM_PAGES = 4, 12, 40
ROWS, TOKENS = 4, 32  # of a mixed batch; decode batches have ROWS rows
LENGTHS = (40, 23, 31)  # tokens of the three sequences
# Tokens that each sequence is given in each step: chunks that end inside a page, pauses, and then single tokens.
CHUNKS = [(7, 0, 13), (1, 11, 2), (20, 1, 0), (3, 9, 14), (5, 0, 0)] + [(1, 1, 1)] * 2 + [(1, 0, 0)] * 2

jitted_logits = jax.jit(next_logits, static_argnums=0, donate_argnums=2)
jitted_forward = jax.jit(forward)


def greedy(rows: int) -> SamplingBatch:
    zeros = np.zeros(rows, np.float32)
    seed, banned = np.zeros((rows, 2), np.uint32), np.full((rows, MAX_BANNED_IDS), 10**6, np.int32)
    return SamplingBatch(zeros, np.zeros(rows, np.int32), zeros + 1, zeros, seed, banned)


def make_batch(parts, page_tables, *, decode: bool, rope_lens=False, tokens=TOKENS, rows=ROWS) -> Batch:
    """parts: for each row (its number, all its tokens, start, tokens in this step); padded to `tokens` and `rows`."""
    tokens = rows if decode else tokens
    token_ids, positions, slots, lens = np.zeros((4, tokens), np.int32)
    tables, context_lens = np.zeros((rows, PAGES_PER_SEQ), np.int32), np.zeros(rows, np.int32)
    starts, at = [0], 0
    for i, (number, sequence, start, count) in enumerate(parts):
        for position in range(start, start + count):
            token_ids[at], positions[at], lens[at] = sequence[position], position, len(sequence)
            slots[at] = page_tables[number][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            at += 1
        starts.append(at)
        used = -(-(start + count) // PAGE_SIZE)
        tables[i, :used] = page_tables[number][:used]
        context_lens[i] = start + count
    starts = np.array(starts + [at] * (rows + 1 - len(starts)), np.int32)
    return Batch(
        token_ids,
        positions,
        slots,
        tables,
        context_lens,
        None if decode else starts,
        greedy(rows),
        lens if rope_lens else None,
    )


def page_tables(order: str) -> list[list[int]]:
    """Pages for the sequences: the null page is nobody's."""
    pages = {
        "ascending": np.arange(1, NUM_PAGES),
        "descending": np.arange(1, NUM_PAGES)[::-1],
        "shuffled": 1 + np.random.default_rng(0).permutation(NUM_PAGES - 1),
    }[order]
    return [list(pages[i * PAGES_PER_SEQ : (i + 1) * PAGES_PER_SEQ]) for i in range(len(LENGTHS))]


def sequences(vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, vocab, length).astype(np.int32) for length in LENGTHS]


def run(params, order: str, kv_dtype=jnp.float32) -> dict[tuple[int, int], np.ndarray]:
    """The logits after each step's last token, by (sequence, position), from a pool that begins as NaN."""
    config, kv_pages = params.config, make_kv_pages(params.config, NUM_PAGES, PAGE_SIZE, kv_dtype)
    kv_pages = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), kv_pages)
    tokens, tables, done, out = sequences(config.vocab_size), page_tables(order), [0, 0, 0], {}
    dynamic = config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
    for counts in CHUNKS:
        parts = [(i, tokens[i], done[i], count) for i, count in enumerate(counts) if count]
        batch = make_batch(parts, tables, decode=max(counts) == 1, rope_lens=dynamic)
        kv_pages, logits = jitted_logits(config, params.weights, kv_pages, batch)
        for row, (i, _, start, count) in enumerate(parts):
            done[i] = start + count
            out[i, done[i] - 1] = np.asarray(logits[row])
    assert done == list(LENGTHS)
    return out


def logprobs(logits) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


@pytest.mark.parametrize("name", ["llama", "mistral_sw8", "llama_rope_dynamic", "llama_tied_bias"])
def test_chunks_and_single_tokens_over_pages_give_the_logits_of_whole_sequences(name, load_tiny):
    params = load_tiny(f"checkpoints/{name}")
    paged = run(params, "shuffled")
    whole = [np.asarray(jitted_forward(params, tokens[None])[0]) for tokens in sequences(params.config.vocab_size)]
    assert len(paged) > 15
    for (i, position), logits in paged.items():
        np.testing.assert_allclose(logprobs(logits), logprobs(whole[i][position]), rtol=0, atol=1e-4)


def test_the_order_of_the_pages_changes_nothing(load_tiny):
    params = load_tiny("checkpoints/llama")
    first, *others = (run(params, order) for order in ("ascending", "descending", "shuffled"))
    for other in others:
        for key, logits in first.items():
            np.testing.assert_array_equal(other[key], logits)


def test_a_bfloat16_pool_gives_nearly_the_same(load_tiny):
    params = load_tiny("checkpoints/llama")
    exact, rounded = run(params, "ascending"), run(params, "ascending", jnp.bfloat16)
    off = np.array([np.abs(logprobs(rounded[key]) - logprobs(exact[key])) for key in exact])
    assert 0 < off.mean() < 0.01 and off.max() < 0.1


def test_a_step_writes_its_own_slots_and_the_null_page_alone(load_tiny):
    params = load_tiny("checkpoints/llama")
    config = params.config
    rng = np.random.default_rng(2)
    before = jax.tree.map(
        lambda pages: rng.standard_normal(pages.shape).astype(np.float32),
        make_kv_pages(config, NUM_PAGES, PAGE_SIZE, jnp.float32),
    )
    batch = make_batch(
        [(0, sequences(320)[0], 6, 7), (1, sequences(320)[1], 3, 1)], page_tables("shuffled"), decode=False
    )
    after, _ = jitted_logits(config, params.weights, jax.tree.map(jnp.asarray, before), batch)
    own = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
    own[0] = True
    own.reshape(-1)[batch.slot_mapping] = True
    assert own[1:].sum() == 8
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = (np.asarray(new) != old).any(axis=(1, 3))
        np.testing.assert_array_equal(changed[1:], own[1:])
        assert not changed[0, 1:].any()  # padding stands in slot 0


# The step as a whole


def sampling(rows: int, temperature: float) -> SamplingBatch:
    seeds = np.stack([np.arange(rows), 7 + np.arange(rows)], 1).astype(np.uint32)
    return greedy(rows)._replace(temperature=np.full(rows, temperature, np.float32), seed=seeds)


@pytest.mark.parametrize("decode", [True, False])
def test_a_step_draws_from_the_last_logits_at_the_position_after_the_context(decode, load_tiny):
    params = load_tiny("checkpoints/llama")
    config, tokens, tables = params.config, sequences(320), page_tables("shuffled")

    def pool():
        return make_kv_pages(config, NUM_PAGES, PAGE_SIZE, jnp.float32)

    counts = (1, 1, 1) if decode else (5, 1, 9)
    batch = make_batch([(i, tokens[i], 0, n) for i, n in enumerate(counts)], tables, decode=decode)
    _, logits = jitted_logits(config, params.weights, pool(), batch)
    for temperature in (0.0, 1.5):
        batch = batch._replace(sampling=sampling(ROWS, temperature))
        _, (ids, logprob, *_) = jitted_step(config, params.weights, pool(), batch)
        wanted_ids, wanted_logprob, *_ = jax.jit(sample)(logits, batch.sampling, batch.context_lens)
        np.testing.assert_array_equal(ids[:3], wanted_ids[:3])
        np.testing.assert_allclose(logprob[:3], wanted_logprob[:3], atol=1e-5)
        shifted, *_ = jax.jit(sample)(logits, batch.sampling, batch.context_lens + 1)
        assert (temperature == 0) == bool((shifted[:3] == ids[:3]).all())
        if temperature == 0:
            np.testing.assert_array_equal(ids[:3], np.argmax(logits[:3], -1))


# In place


def assert_in_place(function, params, batch: Batch, num_pages: int = 8192) -> None:
    """Raise AssertionError unless the compiled step writes the pool where it lies and needs little beside it."""
    like = kv_pages_like(params.config, num_pages, 16, jnp.float32)
    pool_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(like))
    memory = function.lower(params.config, params.weights, like, batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes, "the pool is copied"
    assert memory.temp_size_in_bytes < pool_bytes / 50, f"{memory.temp_size_in_bytes} bytes beside {pool_bytes}"


def both_batches(tokens):
    tables = page_tables("ascending")
    return {
        "decode": make_batch([(0, tokens[0], 8, 1), (1, tokens[1], 5, 1)], tables, decode=True),
        "mixed": make_batch([(0, tokens[0], 8, 9), (1, tokens[1], 5, 1)], tables, decode=False),
    }


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_the_pool_is_updated_in_place(kind, load_tiny):
    params = load_tiny("checkpoints/llama")
    batch = both_batches(sequences(320))[kind]
    assert_in_place(jitted_step, params, batch)
    kv_pages = make_kv_pages(params.config, NUM_PAGES, PAGE_SIZE, jnp.float32)
    where = [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(kv_pages)]
    after, _ = jitted_step(params.config, params.weights, kv_pages, batch)
    assert [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(after)] == where
    assert all(pages.is_deleted() for pages in jax.tree.leaves(kv_pages))


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_a_step_that_copies_the_pool_is_found_out(kind, load_tiny):
    params = load_tiny("checkpoints/llama")
    batch = both_batches(sequences(320))[kind]
    with pytest.raises(AssertionError, match="copied"):
        assert_in_place(jax.jit(step, static_argnums=0), params, batch)

    def step_over_a_stacked_pool(config, weights, kv_pages, batch):
        stacked = jax.lax.optimization_barrier(jnp.stack([pages for pair in kv_pages for pages in pair]))
        pairs = tuple((stacked[2 * i], stacked[2 * i + 1]) for i in range(config.num_layers))
        return step(config, weights, pairs, batch)

    with pytest.raises(AssertionError, match="beside"):
        assert_in_place(jax.jit(step_over_a_stacked_pool, static_argnums=0, donate_argnums=2), params, batch)
