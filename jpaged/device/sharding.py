"""Owns the split of a model over devices: which axis of a weight and of the pool lies spread over the mesh axis `TP`.

Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): heads and the hidden axis of the MLP are
spread, so that a layer needs two sums over the devices, after `out` and after `down`. The vocabulary of the head is
spread too, its scores gathered once a step. All else is whole on every device. XLA makes the sums from the specs of the
arguments; the one `shard_map` is around the kernels, which XLA cannot split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

from jpaged.models.config import ModelConfig

TP = "tp"  # the name of the mesh axis for tensor parallelism

# The axis of a weight that is spread; the others, and weights that are not named, are whole.
HEAD = P(None, TP)
LAYER = {
    "q": P(None, TP),
    "k": P(None, TP),
    "v": P(None, TP),
    "out": P(TP),
    "gate": P(None, TP),
    "up": P(None, TP),
    "down": P(TP),
    "q_bias": P(TP),
    "k_bias": P(TP),
    "v_bias": P(TP),
    "gate_bias": P(TP),
    "up_bias": P(TP),
}
KV_PAGES = P(None, TP)  # by KV heads: each device holds its heads of every page


def weight_specs(weights: dict[str, Any]) -> dict[str, Any]:
    """The tree of `Params.weights` with a `PartitionSpec` in the place of each array."""
    return {
        name: tuple({key: LAYER.get(key, P()) for key in layer} for layer in value)
        if name == "layers"
        else (HEAD if name == "head" else P())
        for name, value in weights.items()
    }


def check_split(config: ModelConfig, devices: int) -> None:
    """Raise ValueError unless the model can be spread evenly over so many devices."""
    for name in ("num_q_heads", "num_kv_heads", "d_ff", "vocab_size"):
        size = getattr(config, name)
        if size % devices:
            raise ValueError(f"{name} ({size}) cannot be spread evenly over {devices} devices: take a divisor of it")


def over_heads(local: Callable[..., Any]) -> Callable[[tuple, tuple], Any]:
    """`local(*by_heads, *whole)`, on each device for its own heads when a mesh with `TP` is in force.

    Arrays of `by_heads` have their heads on axis 1, as have all results. `whole` may have None among it.
    """

    def call(by_heads: tuple, whole: tuple) -> Any:
        if get_abstract_mesh().shape.get(TP, 1) == 1:
            return local(*by_heads, *whole)
        return jax.shard_map(
            lambda by_heads, whole: local(*by_heads, *whole),
            in_specs=(P(None, TP), P()),
            out_specs=P(None, TP),
            check_vma=False,
        )(by_heads, whole)

    return call


def replicated(x):
    """`x`, whole on every device of the mesh in force, if there is one."""
    return jax.lax.with_sharding_constraint(x, P()) if get_abstract_mesh().shape.get(TP, 1) > 1 else x
