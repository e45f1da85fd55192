"""Owns `StoredTensor`, a tensor that still lies in its file, and `CheckpointError`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file, the tensor where there is one, and the cure."""


class StoredTensor(NamedTuple):
    """Where a published tensor lies. A vector is one row."""

    name: str
    file: Path
    offset: int  # bytes from the start of the file
    shape: tuple[int, ...]
    row_bytes: int
    stored_as: str  # the file's name for the element type
    # uint8 [rows, row_bytes] -> floats [rows, columns]; None: they are no floats
    decode: Callable[[np.ndarray], np.ndarray] | None

    @property
    def num_rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1


def read_rows(tensor: StoredTensor, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows `start` to `stop` as floats, `[rows, columns]`.

    By file reads, not by mapping the file: mapped pages would count as memory of this process, and would change under
    our arrays when somebody rewrites the file.
    """
    stop = tensor.num_rows if stop is None else stop
    raw = np.empty((stop - start, tensor.row_bytes), np.uint8)
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset + start * tensor.row_bytes)
        if file.readinto(raw.data.cast("B")) != raw.nbytes:
            raise CheckpointError(
                f"{tensor.file}: ends inside tensor {tensor.name}: the file changed while it was loaded"
            )
    assert tensor.decode is not None, f"{tensor.name} holds {tensor.stored_as}, no floats"
    return tensor.decode(raw)


def check_extent(tensor: StoredTensor, file_size: int) -> StoredTensor:
    """`tensor`, after making sure that it ends before its file does."""
    end = tensor.offset + tensor.num_rows * tensor.row_bytes
    if end > file_size:
        raise CheckpointError(
            f"{tensor.file}: truncated, tensor {tensor.name} ends at byte {end} of {file_size}: download it again"
        )
    return tensor
