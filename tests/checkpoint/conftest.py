"""Shared by the checkpoint tests: small checkpoints with something changed."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"


@pytest.fixture
def make_checkpoint(tmp_path) -> Callable[..., Path]:
    """A copy of a small checkpoint as one file, with config fields and tensors replaced (`...` removes one)."""
    numbers = itertools.count()

    def make(name: str = "llama", *, config: dict | None = None, tensors: dict | None = None, by_hand=False) -> Path:
        source, directory = CHECKPOINTS / name, tmp_path / f"checkpoint-{next(numbers)}"
        directory.mkdir()
        shutil.copy(source / "generation_config.json", directory)
        fields = json.loads((source / "config.json").read_text()) | (config or {})
        (directory / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
        published = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
        published = {k: v for k, v in (published | (tensors or {})).items() if v is not ...}
        (write_bfloat16 if by_hand else save_file)(published, directory / "model.safetensors")
        return directory

    return make


def write_bfloat16(tensors: dict[str, np.ndarray], file: Path) -> None:
    header, data = {}, b""
    for name, value in tensors.items():
        end = len(data) + value.nbytes
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": [len(data), end]}
        data += value.tobytes()
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
