"""`keep_top` in plain XLA without a sort: thresholds found by bisection over the bits of float32.

Floats in their order are whole numbers in theirs (`_key`), so halving an interval of keys finds in at most 33 steps
the largest threshold at which a count (top-k) or a sum of weights (top-p) still reaches its target: exactly, whatever
the logits. A step is one pass over the numbers that are left to look at.

Few are. The 64 chunks of 64 ids with the largest maxima hold every logit above the least of those maxima. Where top-k
and top-p end among them, as with k up to 64 they do, the 4,096 numbers of these chunks are all that is searched. Rows
that end elsewhere are searched as a whole, eight at a time: the work follows how many there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # neighbouring ids that are taken together
NUM_CHUNKS = 64  # of them, those that are searched first
ROWS = 8  # of the rows that need more, those that are searched together
FAR = 32.0  # exp(-32) is next to nothing: where a threshold is first looked for


class Rows(NamedTuple):
    """What is known of each row beside its logits."""

    largest: Any  # float32: its largest logit
    temperature: Any  # float32
    by_k: Any  # bool: top-k drops ids
    k: Any  # float32, and exact: a vocabulary has fewer than 2^24 ids
    by_p: Any  # bool: top-p may drop ids
    p: Any  # float32
    total: Any  # float32: the sum of all weights

    def weigh(self, logits):
        shape = (-1,) + (1,) * (logits.ndim - 1)
        return jnp.exp((logits - self.largest.reshape(shape)) / self.temperature.reshape(shape))


def boundary(logits, largest, temperature, top_k, top_p):
    """The last id that top-k and top-p keep, by falling logits and then by rising ids: (its logit, the id).

    Where all ids pass that have this logit, the id is any number from the last one on. Where nothing is dropped, the
    logit is -inf.
    """
    num_seqs, vocab = logits.shape
    by_k, by_p = (top_k > 0) & (top_k < vocab), top_p < 1

    def search():
        rows = Rows(largest, temperature, by_k, top_k.astype(jnp.float32), by_p, top_p, largest)
        rows = rows._replace(total=jnp.sum(rows.weigh(logits), axis=-1))
        threshold, ties = _thresholds(logits, rows)
        return threshold, _nth_equal(logits, threshold, ties)

    def nothing():
        return jnp.full(num_seqs, -jnp.inf, jnp.float32), jnp.full(num_seqs, vocab, jnp.int32)

    return lax.cond(jnp.any(by_k | by_p), search, nothing)


def _thresholds(logits, rows: Rows):
    """The logit of the last id that passes, and how many ids with this logit do."""
    num_seqs, vocab = logits.shape
    lowest = jnp.broadcast_to(_key(jnp.float32(-jnp.inf)), (num_seqs,))
    if vocab <= 2 * CHUNK * NUM_CHUNKS:
        found = jnp.full(num_seqs, -jnp.inf, jnp.float32), jnp.full(num_seqs, jnp.inf, jnp.float32)
        left = rows.by_k | rows.by_p
    else:
        chunks = jnp.pad(logits, [(0, 0), (0, -vocab % CHUNK)], constant_values=-jnp.inf).reshape(num_seqs, -1, CHUNK)
        maxima, index = lax.top_k(jnp.max(chunks, axis=-1), NUM_CHUNKS)
        few = jnp.take_along_axis(chunks, index[:, :, None], axis=1).reshape(num_seqs, -1)
        floor = maxima[:, -1]
        within = few >= floor[:, None]
        enough_k = _count(within) >= rows.k
        enough_p = jnp.sum(jnp.where(within, rows.weigh(few), 0), axis=-1) >= rows.p * rows.total
        enough = jnp.where(rows.by_k, enough_k, enough_p)
        found = _search(few, rows._replace(by_k=rows.by_k & enough, by_p=rows.by_p & enough), _key(floor))
        left = (rows.by_k | rows.by_p) & ~enough

    together = min(ROWS, num_seqs)
    order = jnp.pad(jnp.argsort(~left), (0, -num_seqs % together), constant_values=num_seqs)

    def turn(i, found):
        index = lax.dynamic_slice_in_dim(order, i * together, together)
        mine = jax.tree.map(lambda row: row.at[index].get(mode="clip"), (logits, rows, lowest))
        index = jnp.where(left.at[index].get(mode="clip"), index, num_seqs)
        new = _search(*mine)
        return jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), found, new)

    return lax.fori_loop(0, -(-jnp.sum(left) // together), turn, found)


def _search(logits, rows: Rows, low):
    """`_thresholds` among `logits`, which hold all that is above the threshold. `low`: the key of a lower bound."""
    weights = rows.weigh(logits)
    high = _key(rows.largest) + 1
    guess = _key(rows.largest - FAR * rows.temperature)

    def sum_over(chosen):
        return jnp.sum(jnp.where(chosen, weights, 0), axis=-1)

    at_k = _bisect(lambda c: _count(logits >= c) >= rows.k, jnp.where(rows.by_k, low, high - 1), high, guess)
    above = logits > at_k[:, None]
    ties_k = rows.k - _count(above)
    total = jnp.where(rows.by_k, sum_over(above) + ties_k * rows.weigh(at_k), rows.total)

    target = rows.p * total
    at_p = _bisect(lambda c: sum_over(logits >= c) >= target, jnp.where(rows.by_p, low, high - 1), high, guess)
    missing = target - sum_over(logits > at_p[:, None])
    ties_p = jnp.maximum(jnp.ceil(missing / rows.weigh(at_p)), 1)

    at_k, ties_k = jnp.where(rows.by_k, at_k, -jnp.inf), jnp.where(rows.by_k, ties_k, jnp.inf)
    at_p, ties_p = jnp.where(rows.by_p, at_p, -jnp.inf), jnp.where(rows.by_p, ties_p, jnp.inf)
    ties = jnp.where(at_p > at_k, ties_p, jnp.where(at_p < at_k, ties_k, jnp.minimum(ties_k, ties_p)))
    return jnp.maximum(at_k, at_p), ties


def _bisect(reaches, low, high, guess):
    """The largest float at which `reaches`, which falls from True to False, is True; its key is in [low, high)."""

    def step(state):
        low, high, guess = state
        reached = reaches(_float(guess)[:, None])
        low, high = jnp.where(reached, guess, low), jnp.where(reached, high, guess)
        return low, high, (low & high) + ((low ^ high) >> 1)  # the middle, without an overflow

    state = low, high, jnp.clip(guess, low + 1, high - 1)
    found = _float(lax.while_loop(lambda state: jnp.any(state[1] > state[0] + 1), step, state)[0])
    return jnp.where(found == 0, 0.0, found)  # also where numbers next to zero are taken for it


def _key(x):
    """A whole number for each float, in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _float(key):
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def _count(chosen):
    return jnp.sum(chosen.astype(jnp.float32), axis=-1)


def _nth_equal(logits, value, n):
    """The n-th id, counted from 1, whose logit is `value`; the size of the vocabulary where there are fewer."""
    num_seqs, vocab = logits.shape
    equal = jnp.pad(logits == value[:, None], [(0, 0), (0, -vocab % CHUNK)]).reshape(num_seqs, -1, CHUNK)
    counts = _count(equal)
    sums = jnp.cumsum(counts, axis=-1)
    chunk = jnp.argmax(sums >= n[:, None], axis=-1)[:, None]
    left = n[:, None] - jnp.take_along_axis(sums - counts, chunk, axis=-1)
    inside = jnp.take_along_axis(equal, chunk[:, :, None], axis=1)[:, 0]
    id_ = chunk[:, 0] * CHUNK + jnp.argmax(jnp.cumsum(inside, axis=-1) >= left, axis=-1)
    return jnp.where(sums[:, -1] >= n, id_, vocab).astype(jnp.int32)
