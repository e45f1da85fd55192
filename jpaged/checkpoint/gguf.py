"""Owns reading GGUF files: the metadata and where the tensors lie. The `gguf` package knows the types and dequantises.

The header is read here because the package's reader maps the file and keeps a NumPy array for each of a vocabulary's
strings (3 s for 100,000 of them; here it is 0.1 s). Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import functools
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from jpaged.checkpoint.tensors import CheckpointError, StoredTensor, check_extent

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The metadata as plain Python values by name, and the tensors by name (shapes in NumPy's order, rows first)."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            if _take(file, 4) != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (pass the directory for safetensors)")
            (version,) = struct.unpack("<I", _take(file, 4))
            if version not in VERSIONS:
                raise CheckpointError(
                    f"{path}: GGUF version {version} is not supported, only {VERSIONS}: convert it again"
                )
            num_tensors, num_fields = struct.unpack("<QQ", _take(file, 16))
            fields = dict(_field(file) for _ in range(num_fields))
            infos = [_tensor_info(file) for _ in range(num_tensors)]
        except (EOFError, MemoryError, OverflowError):
            raise CheckpointError(f"{path}: truncated inside the header, at {size} bytes: download it again") from None
        except (UnicodeDecodeError, KeyError, struct.error) as error:
            raise CheckpointError(f"{path}: corrupt header ({error!r}): download it again") from None
        alignment = fields.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
    return fields, {info[0]: _stored(path, size, start, *info) for info in infos}


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _take(file, 8))
    return str(_take(file, length), "utf-8")


def _field(file: BinaryIO) -> tuple[str, Any]:
    name = _string(file)
    (kind,) = struct.unpack("<I", _take(file, 4))
    return name, _value(file, kind)


def _value(file: BinaryIO, kind: Any) -> Any:
    if kind == GGUFValueType.STRING:
        return _string(file)
    if kind == GGUFValueType.ARRAY:
        of, length = struct.unpack("<IQ", _take(file, 12))
        if of in SCALARS:
            dtype = np.dtype(SCALARS[of])
            return np.frombuffer(_take(file, length * dtype.itemsize), dtype).tolist()
        return [_value(file, of) for _ in range(length)]
    dtype = np.dtype(SCALARS[kind])
    return np.frombuffer(_take(file, dtype.itemsize), dtype)[0].item()


def _tensor_info(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _string(file)
    (num_dims,) = struct.unpack("<I", _take(file, 4))
    dims = struct.unpack(f"<{num_dims}Q", _take(file, 8 * num_dims))
    kind, offset = struct.unpack("<IQ", _take(file, 12))
    return name, tuple(reversed(dims)), kind, offset


def _stored(
    path: Path, size: int, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    try:
        kind = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, NotImplementedError):
        raise CheckpointError(
            f"{path}: tensor {name} is of type {getattr(kind, 'name', kind)}, which the gguf package does not "
            "dequantise: take a file of another quantisation"
        ) from None
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} cannot be of type {kind.name} (blocks of {block})"
        )
    shape = shape if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])
    row_bytes = shape[-1] // block * block_bytes
    decode = functools.partial(dequantize, qtype=kind)
    return check_extent(StoredTensor(name, path, start + offset, shape, row_bytes, kind.name, decode), size)
