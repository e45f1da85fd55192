"""Reads the text of an optimized HLO module: what its instructions read, and whether they copy."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    shape: str
    opcode: str
    operands: list[str]
    rest: str


def instructions(entry: str) -> dict[str, Instruction]:
    """The instructions of a computation in the text of an HLO module, by name."""
    found = {}
    for line in entry.splitlines()[1:]:
        match = re.match(r"\s*(?:ROOT )?(%?[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line)
        if match:
            name, shape, opcode, rest = match.groups()
            operands = re.findall(r"%[\w.\-]+", rest.split("), ")[0])
            found[name] = Instruction(shape, opcode, operands, rest)
        if line.startswith("}"):
            break
    return found


def weights_read(entry: dict[str, Instruction], num_weights: int) -> int:
    """Bytes of weights that the instructions read. A lookup of rows in the embedding reads next to none of it."""
    origin = {}
    read = 0
    for name, i in entry.items():
        if i.opcode == "parameter":
            if int(i.rest.split(")")[0]) < num_weights:
                origin[name] = bytes_of(i.shape)
        elif i.opcode in ("bitcast", "copy-start") and i.operands[0] in origin:
            origin[name] = origin[i.operands[0]]
        elif i.opcode not in ("tuple", "get-tuple-element"):
            rows = bytes_of(i.shape)
            for operand in i.operands:
                size = origin.get(operand, 0)
                is_lookup = "gather" in name or "gather" in i.rest.split("metadata")[0] or "/embed/" in i.rest
                read += min(size, rows) if is_lookup else size
    return read


def pages_read(entry: dict[str, Instruction], pages: range) -> int:
    """Bytes of the pool, which is the parameters with the numbers `pages`, that the instructions are given to read. A
    kernel that writes in place is not counted: of what it is given, it touches the new tokens' slots alone."""
    sizes = {}  # of pages, under each name that they have
    in_place = {}  # by instruction and result: the operand that it is
    read = 0
    for name, i in entry.items():
        if i.opcode == "parameter":
            if int(i.rest.split(")")[0]) in pages:
                sizes[name] = bytes_of(i.shape)
        elif i.opcode == "get-tuple-element":
            origin = in_place.get((i.operands[0], re.search(r"index=(\d+)", i.rest)[1]))
            if origin in sizes:
                sizes[name] = sizes[origin]
        elif i.opcode == "bitcast":
            if i.operands[0] in sizes:
                sizes[name] = sizes[i.operands[0]]
        elif i.opcode != "tuple":
            aliases = i.rest.partition("output_to_operand_aliasing={")[2].split("}}")[0]
            written = {result: i.operands[int(n)] for result, n in re.findall(r"\{(\d*)\}: \((\d+)", aliases)}
            in_place |= {(name, result): operand for result, operand in written.items()}
            if written.get("") in sizes:
                sizes[name] = sizes[written[""]]
            read += sum(sizes.get(operand, 0) for operand in i.operands if operand not in written.values())
    return read


def copies_of(entry: dict[str, Instruction], page_shape: tuple[int, ...]) -> list[str]:
    """Names of instructions that make an array as large as one layer's keys, and are not the write into them."""
    size = product(page_shape)
    found = []
    for name, i in entry.items():
        if i.opcode in ("parameter", "bitcast", "tuple", "get-tuple-element", "while"):
            continue
        if any(product(s) == size for s in shapes_of(i.shape)):
            in_place = "output_to_operand_aliasing" in i.rest or "scatter" in name or "dynamic-update-slice" in name
            if i.opcode == "copy" or not in_place:
                found.append(f"{name} = {i.shape} {i.opcode}")
    return found


def shapes_of(shape: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in s.split(",") if n) for s in re.findall(r"\w+\[([\d,]*)\]", shape)]


def bytes_of(shape: str) -> int:
    """Bytes of an array or tuple as HLO writes its shape."""
    total = 0
    for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])  # bf16, s32, f8e4m3fn
        total += bits // 8 * product(int(n) for n in sizes.split(",") if n)
    return total


def product(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
