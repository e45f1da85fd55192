"""Which ids pass top-k, top-p and min-p, without sorting the vocabulary."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_sizes import block_sizes
from pallas_kernels.checks import check_arrays, check_values, jax_arrays, need
from pallas_kernels.implementation import choose, in_32_bits
from pallas_kernels.keep_top import search

MAX_VOCAB = 2**24  # counts are kept in float32 too
COLDEST, HOTTEST = 1e-37, 1e37  # temperatures: nearer to the ends of float32, a CPU takes them or their inverse for 0


@in_32_bits
def keep_top(
    logits: Float[Array, "num_seqs vocab"],
    temperature: Float[Array, " num_seqs"],
    top_k: Int32[Array, " num_seqs"],
    top_p: Float[Array, " num_seqs"],
    min_p: Float[Array, " num_seqs"],
    *,
    largest: Float[Array, " num_seqs"] | None = None,
    implementation: str | None = None,
    interpret: Any = False,
) -> Bool[Array, "num_seqs vocab"]:
    """Which ids pass top-k, then top-p over what top-k left, then min-p. At least one does, whatever k and p.

    Ids are taken in the order of falling logits, equal logits in the order of rising ids. An id's weight is
    `exp((logit - largest) / temperature)`; it is weighed where it lies, so nothing is scaled or sorted first.

    top_k: the first so many ids pass; 0 is off.
    top_p: an id passes while the weights of those before it are less than `top_p` times the weights that top-k left.
        It is above 0; at least 1 is off.
    min_p: an id passes if its weight is at least so much, the largest weight being 1. It is at most 1; 0 is off.
    largest: the largest logit of each row, where the caller has it: a pass less.

    logits are float32, -inf for banned ids. temperature is above 0, and taken for 1e-37 below that and for 1e37 above
    that. Top-k is exact, and so are ties, save that logits nearer to 0 than float32's normal numbers (1.2e-38) may tie
    with 0. For top-p the weights are float32, and so are their sums, in an order that depends on the shapes alone: the
    result is that of real numbers unless, at an id where it ends, they are within 1e-5 of the total of `top_p` times
    the total. A row's result does not depend on the other rows. Of a row with NaN or +inf, the result means nothing.

    The result is two comparisons with one logit and one id a row, which XLA fuses into what uses it. Implementations
    find the two: "xla" by bisection over the bits of float32 (`search.py`), "triton" in mostly one pass over a row
    (`triton.py`). `reference.py`, by a sort, is the meaning.

    Raises ValueError for arguments that do not fit, NotImplementedError for an implementation that cannot serve them.
    """
    check_arrays(logits=logits)
    need(logits.ndim == 2 and logits.dtype == "float32", f"logits must be float32 [num_seqs, vocab], got {_of(logits)}")
    need(0 < logits.shape[1] < MAX_VOCAB, f"logits must have from 1 to {MAX_VOCAB - 1} columns, got {logits.shape[1]}")
    for name, array, dtype in (
        ("temperature", temperature, "float32"),
        ("top_k", top_k, "int32"),
        ("top_p", top_p, "float32"),
        ("min_p", min_p, "float32"),
        *([] if largest is None else [("largest", largest, "float32")]),
    ):
        check_arrays(**{name: array})
        need(
            array.shape == logits.shape[:1] and array.dtype == dtype,
            f"{name} must be {dtype} [num_seqs] {logits.shape[:1]}, got {_of(array)}",
        )
    for name, array, fits, rule in (
        ("temperature", temperature, temperature > 0, "above 0"),
        ("top_p", top_p, top_p > 0, "above 0"),
        ("min_p", min_p, (min_p >= 0) & (min_p <= 1), "from 0 to 1"),
    ):
        check_values(~fits, f"{name} has [{{number}}] in row {{at}}: give numbers {rule}", number=array)
    name, module, target = choose("keep_top", implementation, interpret, logits)
    if not logits.size:
        return jnp.zeros(logits.shape, bool)
    logits, largest, temperature, top_k, top_p, min_p = jax_arrays(
        "keep_top", logits, largest, temperature, top_k, top_p, min_p
    )
    largest = jnp.max(logits, axis=-1) if largest is None else largest
    temperature = jnp.clip(temperature, COLDEST, HOTTEST)
    rows = (logits, largest, temperature, top_k, top_p)
    if module is None:
        threshold, last_id = search.boundary(*rows)
    else:
        blocks = block_sizes("keep_top", name, target)
        threshold, last_id = module.boundary(*rows, interpret=interpret, **blocks)
    return passing(logits, largest, temperature, min_p, threshold, last_id)


def passing(logits, largest, temperature, min_p, threshold, last_id):
    """The ids up to the one with logit `threshold` and number `last_id`, less those that min-p drops."""
    threshold, last_id = threshold[:, None], last_id[:, None]
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    first = (logits > threshold) | ((logits == threshold) & (ids <= last_id))
    # Not compared where it is off: the weight of a logit of -inf may be NaN, at temperatures near the end of float32.
    weights = jnp.exp((logits - largest[:, None]) / temperature[:, None])
    return first & ((weights >= min_p[:, None]) | (min_p <= 0)[:, None])


def _of(array) -> str:
    return f"{array.dtype} {array.shape}"
