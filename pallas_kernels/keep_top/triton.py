"""Owns `keep_top` in Pallas' Triton lowering: one program finds the threshold of one row, mostly in one pass over it.

Why not XLA's fusion of the plain version: a step of a bisection reads all logits again, and a batch of them does not
fit in L2 (256 rows of 151,936 are 155 MB; an H200 has 50). That is up to 25 reads of the logits for each filter, and
more to write and read what XLA gathers and weighs. Here it is about one read for both filters:

1. Guess a threshold that some `5/8 * capacity` logits pass, from a sample of the row: 4,096 numbers, in runs of 32 so
   that whole sectors are loaded.
2. One pass over the row. Logits from the guess on are packed, in the order of their ids, into a list of `capacity`
   numbers and their ids, in global memory and so in L1; the weights of all are summed for top-p.
3. The list is one tile in registers. Bisection over the bits of float32 (see `search.py`), with several candidates a
   step, finds the threshold of top-k, then that of top-p, without reading any memory.

Where the list does not hold the answer (more logits passed the guess than it has room for, or it ends before top-k or
top-p do), the same bisection goes on over the whole row, a pass for each step. Nothing but time depends on the guess.

Layout: the logits are read where they lie, a row is contiguous. A tile has one logit a thread; `ahead` tiles are loaded
before those that came before them are used. Packing needs a running count over each tile: three of them share one
running sum, in bits of their own. Counts are int32, weights and their sums float32: a sum over the row is kept in a
tile of partial sums and added up at the end. Rows that filter nothing cost the start of a program.

Source: thresholds by search instead of sorting, as in FlashInfer's sampling kernels, Ye et al. 2025 (arXiv:2501.01005);
guessing a pivot from a sample, Floyd and Rivest 1975 (doi.org/10.1145/360680.360691).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

RUN = 32  # neighbouring logits of the sample
SAMPLE = 4096  # logits in it
FIELDS, BITS = 3, 10  # counts of a tile in one number
LOWEST = -0x7F800001  # the key of -inf


class Row(NamedTuple):
    """One program's row: its logits, and what its weights are relative to."""

    logits: Any  # reference to those of all rows, one after the other
    index: Any
    start: Any  # where the row's begin
    vocab: int
    threads: int  # and as many logits in a tile
    ahead: int  # tiles that are loaded before they are used
    largest: Any
    inverse_temperature: Any

    def weigh(self, logits):
        return jnp.exp((logits - self.largest) * self.inverse_temperature)

    def load(self, ids):
        return plt.load(self.logits.at[self.start + ids], mask=ids < self.vocab, other=-jnp.inf)

    def fold(self, turn, start):
        """`turn(ids, logits, carry)` over the row, some tiles (lists) at once. Ids may be past the vocabulary."""
        tile = jnp.arange(self.threads, dtype=jnp.int32)

        def ids(i):
            return [(i * self.ahead + j) * self.threads + tile for j in range(self.ahead)]

        def step(i, state):
            loaded, carry = state
            return [self.load(place) for place in ids(i + 1)], turn(ids(i), loaded, carry)

        steps = pl.cdiv(self.vocab, self.ahead * self.threads)
        return lax.fori_loop(0, steps, step, ([self.load(place) for place in ids(0)], start))[1]

    def measure(self, candidates, weigh, passes=jnp.greater_equal):
        """For each candidate, how many logits pass it, or with `weigh` the sum of their weights. -inf passes none."""
        dtype = jnp.float32 if weigh else jnp.int32

        def turn(_, loaded, sums):
            for logits in loaded:
                values = self.weigh(logits) if weigh else jnp.ones(logits.shape, dtype)
                sums = [total + jnp.where(passes(logits, c), values, 0) for total, c in zip(sums, candidates)]
            return sums

        return [jnp.sum(total) for total in self.fold(turn, [jnp.zeros(self.threads, dtype) for _ in candidates])]


class Wanted(NamedTuple):
    """What the row's filters ask for."""

    by_k: Any  # bool: top-k drops ids
    k: Any
    by_p: Any  # bool: top-p may drop ids
    p: Any
    total: Any  # sum of the row's weights


def boundary(logits, largest, temperature, top_k, top_p, *, interpret, ahead, capacity, num_candidates, num_warps):
    num_seqs, vocab = logits.shape
    shapes = [((num_seqs,), jnp.float32), ((num_seqs,), jnp.int32)]
    shapes += [((num_seqs, capacity + 32 * num_warps), jnp.float32), ((num_seqs, capacity + 32 * num_warps), jnp.int32)]
    # Loaded, not computed: Triton would see how they are aligned and give each thread four neighbouring logits. Packing
    # would then take six exchanges through shared memory.
    starts = np.arange(num_seqs, dtype=np.int32) * vocab
    threshold, last_id, *_ = pl.pallas_call(
        functools.partial(
            kernel,
            vocab=vocab,
            threads=32 * num_warps,
            ahead=ahead,
            capacity=capacity,
            num_candidates=num_candidates,
            interpret=interpret,
        ),
        grid=(num_seqs,),
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="keep_top",
    )(logits.reshape(-1), starts, largest, temperature, top_k, top_p)
    return threshold, last_id


def unsupported(target, logits) -> str | None:
    """Why the kernel cannot serve these logits on `target`, or None."""
    if target.capability < (8, 0):
        return f"compute capability {'.'.join(map(str, target.capability))}, where it needs 8.0"
    if logits.size + 2**16 >= 2**31:
        return f"{logits.size} logits, more than its offsets of 32 bits reach"
    return None


def kernel(
    logits_ref,
    starts_ref,
    largest_ref,
    temperature_ref,
    top_k_ref,
    top_p_ref,
    threshold_ref,
    last_id_ref,
    few_ref,
    few_ids_ref,
    *,
    vocab,
    threads,
    ahead,
    capacity,
    num_candidates,
    interpret,
):
    i = pl.program_id(0)
    row = Row(logits_ref, i, starts_ref[i], vocab, threads, ahead, largest_ref[i], 1 / temperature_ref[i])
    k, p = top_k_ref[i], top_p_ref[i]
    by_k, by_p = (k > 0) & (k < vocab), p < 1

    def search():
        high = _key(row.largest) + 1
        guess = _guess(row, high, capacity)
        count, total = _pack(row, guess, few_ref, few_ids_ref, capacity)
        if not interpret:
            plt.debug_barrier()  # what the program's other threads have packed is read
        place = jnp.arange(capacity, dtype=jnp.int32)
        packed = place < count
        few = plt.load(few_ref.at[i, place], mask=packed, other=-jnp.inf)
        weights = jnp.where(packed, row.weigh(few), 0)
        wanted = Wanted(by_k, k, by_p, p, total)
        enough = jnp.where(by_k, count >= k, jnp.sum(weights) >= p * total)

        def in_list():
            def measure(candidates, weigh, passes=jnp.greater_equal):
                values = weights if weigh else packed.astype(jnp.int32)
                return [jnp.sum(jnp.where(passes(few, c), values, 0)) for c in candidates]

            threshold, ties = _search(row, measure, wanted, _key(guess), high, num_candidates=1)
            equal = packed & (few == threshold)
            running = jnp.cumsum(equal.astype(jnp.int32))
            ids = plt.load(few_ids_ref.at[i, place], mask=equal, other=0)
            last_id = jnp.sum(jnp.where(equal & (running == ties), ids, 0))
            return threshold, jnp.where(jnp.max(running) >= ties, last_id, vocab)

        def in_row():
            threshold, ties = _search(row, row.measure, wanted, LOWEST, high, num_candidates)
            return threshold, _nth_equal(row, threshold, ties)

        return lax.cond(enough & (count <= capacity), in_list, in_row)

    # A largest logit of NaN equals nothing: such a row has no order.
    filters = (by_k | by_p) & (row.largest == row.largest)
    threshold_ref[i], last_id_ref[i] = lax.cond(filters, search, lambda: _no_limit(row))


def _guess(row: Row, high, capacity: int):
    """A threshold that about `5/8 * capacity` logits pass."""
    if row.vocab <= capacity:
        return jnp.float32(-jnp.inf)
    place = jnp.arange(SAMPLE, dtype=jnp.int32)
    sample = row.load(place // RUN * (row.vocab // (SAMPLE // RUN)) + place % RUN)
    rank = max(SAMPLE * capacity * 5 // 8 // row.vocab, 1)

    def measure(candidates, weigh):
        return [jnp.sum((sample >= c).astype(jnp.int32)) for c in candidates]

    return _bisect(measure, False, rank, LOWEST, high, num_candidates=1)


def _pack(row: Row, guess, few_ref, few_ids_ref, capacity: int):
    """Write the logits from `guess` on and their ids, as many as there is room for. How many they are; all weights."""
    nowhere = capacity + jnp.arange(row.threads, dtype=jnp.int32)

    def turn(ids, loaded, carry):
        count, total = carry
        for place in range(0, row.ahead, FIELDS):
            tiles = range(place, min(place + FIELDS, row.ahead))
            passes = [(loaded[j] >= guess) & (ids[j] < row.vocab) for j in tiles]
            # One running sum for several tiles, each in bits of its own: the sums are what takes the time.
            flags = sum(flag.astype(jnp.int32) << BITS * field for field, flag in enumerate(passes))
            running = jnp.cumsum(flags)
            counts = jnp.max(running)
            for field, j in enumerate(tiles):
                at = count + ((running >> BITS * field) & (2**BITS - 1)) - 1
                fits = passes[field] & (at < capacity)
                # A place of its own even for what is not stored: interpret mode writes back what it reads there.
                at = jnp.where(fits, at, nowhere)
                plt.store(few_ref.at[row.index, at], loaded[j], mask=fits)
                plt.store(few_ids_ref.at[row.index, at], ids[j], mask=fits)
                count += (counts >> BITS * field) & (2**BITS - 1)
                total += jnp.where(ids[j] < row.vocab, row.weigh(loaded[j]), 0)
        return count, total

    count, total = row.fold(turn, (jnp.int32(0), jnp.zeros(row.threads, jnp.float32)))
    return count, jnp.sum(total)


def _search(row: Row, measure, wanted: Wanted, low, high, num_candidates: int):
    """The logit of the last id that passes, and how many ids with this logit do."""

    def by_k():
        at = _bisect(measure, False, wanted.k, low, high, num_candidates)
        ties = wanted.k - measure([at], False, jnp.greater)[0]
        return at, ties, measure([at], True, jnp.greater)[0] + ties.astype(jnp.float32) * row.weigh(at)

    at_k, ties_k, total = lax.cond(wanted.by_k, by_k, lambda: (*_no_limit(row), wanted.total))

    def by_p():
        target = wanted.p * total
        at = _bisect(measure, True, target, low, high, num_candidates)
        missing = target - measure([at], True, jnp.greater)[0]
        ties = jnp.clip(jnp.ceil(missing / row.weigh(at)), 1, row.vocab)
        return at, ties.astype(jnp.int32)

    at_p, ties_p = lax.cond(wanted.by_p, by_p, lambda: _no_limit(row))
    ties = jnp.where(at_p > at_k, ties_p, jnp.where(at_p < at_k, ties_k, jnp.minimum(ties_k, ties_p)))
    return jnp.maximum(at_k, at_p), ties


def _no_limit(row: Row):
    # Triton's lowering takes no constants as the results of a branch.
    zero = row.start * 0
    return zero.astype(jnp.float32) - jnp.inf, zero + row.vocab


def _bisect(measure, weigh: bool, target, low, high, num_candidates: int):
    """The largest float at which `measure` is at least `target`; its key is in [low, high)."""
    bits = num_candidates.bit_length()
    assert num_candidates == 2**bits - 1, "candidates cut an interval into a power of two"

    def step(state):
        low, high = state
        stride = jnp.maximum((high >> bits) - (low >> bits), 1)
        keys = [jnp.minimum(low + stride * (j + 1), high - 1) for j in range(num_candidates)]
        for key, measured in zip(keys, measure([_float(key) for key in keys], weigh)):
            reached = measured >= target
            low, high = jnp.where(reached, jnp.maximum(low, key), low), jnp.where(reached, high, jnp.minimum(high, key))
        return low, high

    state = jnp.int32(low), jnp.int32(high)
    found = _float(lax.while_loop(lambda state: state[1] > state[0] + 1, step, state)[0])
    return jnp.where(found == 0, 0.0, found)  # also where numbers next to zero are taken for it


def _nth_equal(row: Row, value, n):
    """The n-th id, counted from 1, whose logit is `value`; the size of the vocabulary where there are fewer."""

    def turn(ids, loaded, carry):
        count, found = carry
        for place, logits in zip(ids, loaded):
            equal = (logits == value) & (place < row.vocab)
            running = count + jnp.cumsum(equal.astype(jnp.int32))
            count, found = jnp.max(running), found + jnp.where(equal & (running == n), place, 0)
        return count, found

    count, found = row.fold(turn, (jnp.int32(0), jnp.zeros(row.threads, jnp.int32)))
    return jnp.where(count >= n, jnp.sum(found), row.vocab)


def _key(x):
    """A whole number for each float, in the same order."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # zero has one key, not two
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _float(key):
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)
