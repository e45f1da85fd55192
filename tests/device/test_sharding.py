"""The split of a model over devices."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P
from split_step import CONFIG

from jpaged.device.params import weight_shapes
from jpaged.device.sharding import HEAD, LAYER, TP, check_split, weight_specs


def test_a_step_over_four_devices_gives_what_one_gives_with_two_sums_a_layer():
    flags = "--xla_force_host_platform_device_count=4"
    script = Path(__file__).with_name("split_step.py")
    result = subprocess.run(
        [sys.executable, script], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
    )
    assert result.returncode == 0 and "the same" in result.stdout, result.stderr[-3000:]


def test_every_matrix_of_a_layer_is_spread_and_every_spread_weight_exists():
    shapes = weight_shapes(CONFIG)
    specs = weight_specs(shapes)
    layer = shapes["layers"][0]
    assert LAYER.keys() <= layer.keys()
    whole = {name for name in layer if name not in LAYER}
    assert whole == {"attn_norm", "mlp_norm", "out_bias", "down_bias"}
    for name, spec in [*LAYER.items(), ("head", HEAD)]:
        shape = layer.get(name) or shapes[name]
        assert shape[spec.index(TP)] % 4 == 0
    assert specs["embed"] == specs["final_norm"] == P()


@pytest.mark.parametrize("name", ["num_kv_heads", "d_ff", "vocab_size"])
def test_a_model_that_cannot_be_spread_evenly_is_refused(name):
    check_split(CONFIG, 4)
    config = replace(CONFIG, **{name: {"num_kv_heads": 2, "d_ff": 50, "vocab_size": 65}[name]})
    with pytest.raises(ValueError, match=rf"{name} \(\d+\).*4 devices"):
        check_split(config, 4)
