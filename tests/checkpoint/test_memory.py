"""Loading takes the memory of the weights and little more, measured on a checkpoint far larger than its parts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")

MEASURED = """
import sys
from jpaged.checkpoint import load

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

import jax
jax.device_put(1.0)
load(sys.argv[2])  # everything is imported and started
before = memory("VmRSS")
params = load(sys.argv[1], dtype=sys.argv[3])
peak = memory("VmHWM") - before
print(peak, sum(leaf.nbytes for leaf in jax.tree.leaves(params)), max(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.parametrize(("stored", "dtype"), [("F16", "float32"), ("F32", "bfloat16")])
def test_the_host_never_holds_more_than_the_weights_and_the_largest_of_them(tmp_path, repo, stored, dtype):
    write_checkpoint(tmp_path, np.dtype({"F16": np.float16, "F32": np.float32}[stored]), stored)
    small = repo / "tests" / "data" / "checkpoints" / "llama"
    command = [sys.executable, "-c", MEASURED, tmp_path, small, dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repo)
    assert done.returncode == 0, done.stderr
    peak, on_device, largest = map(int, done.stdout.split())
    assert on_device > 140e6
    assert peak < on_device + 1.3 * largest, (peak / 1e6, on_device / 1e6, largest / 1e6)


def write_checkpoint(directory: Path, dtype: np.dtype, stored: str) -> None:
    d, ff, vocab, layers = 512, 4096, 40_000, 6
    config = dict(architectures=["LlamaForCausalLM"], hidden_size=d, intermediate_size=ff, num_hidden_layers=layers)
    config |= dict(num_attention_heads=8, num_key_value_heads=2, vocab_size=vocab, max_position_embeddings=64)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d), "model.norm.weight": (d,)}
    for i in range(layers):
        layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (d, d)}
        layer |= {"self_attn.k_proj": (d // 4, d), "self_attn.v_proj": (d // 4, d), "self_attn.o_proj": (d, d)}
        layer |= {"mlp.gate_proj": (ff, d), "mlp.up_proj": (ff, d), "mlp.down_proj": (d, ff)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)  # zeros that take no room on the disk
