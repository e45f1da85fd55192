"""Owns what a GPU's multiprocessor holds, what a compiled kernel takes of it, and the bounds that it must keep."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

KEEP_IN_FLIGHT = 32 * 1024  # bytes an SM that a kernel bound by memory needs to hide its latency


@dataclass(frozen=True)
class Card:
    """Limits of a streaming multiprocessor (SM), from the CUDA programming guide's table of compute capabilities."""

    name: str
    capability: str
    num_cores: int
    shared_memory: int  # bytes an SM
    shared_memory_per_block: int  # bytes that one thread block may ask for
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32

    def blocks_per_core(self, registers: int, threads: int, shared_memory: int) -> int:
        """Thread blocks that are resident on an SM at once, by what one of them takes."""
        warps = -(-threads // 32)
        per_warp = -(-registers * 32 // 256) * 256  # registers are given out in units of 256 a warp
        by_registers = self.registers // (per_warp * warps) if registers else self.blocks
        by_memory = self.shared_memory // (shared_memory + 1024)  # the system keeps 1 KiB a block
        return min(by_registers, by_memory, self.threads // (warps * 32), self.blocks)


CARDS = {
    "h200": Card("h200", "9.0", 132, 233472, 232448),
    "a100": Card("a100", "8.0", 108, 167936, 166912),
}


class Use(NamedTuple):
    """What one GPU kernel takes, as its assembler says."""

    kernel: str
    registers: int
    spilled_bytes: int
    threads: int
    shared_memory: int


def threads_of(ptx: str) -> dict[str, int]:
    """Threads a block of each kernel, from the launch bounds in its PTX."""
    return {
        name: int(x) * int(y or 1) * int(z or 1)
        for name, x, y, z in re.findall(
            r"\.entry (\w+)\s*\([^)]*\)[^{]*?\.(?:maxntid|reqntid) (\d+)(?:, (\d+))?(?:, (\d+))?", ptx
        )
    }


def parse(log: str, threads: dict[str, int]) -> list[Use]:
    """What `ptxas -v` says of each kernel."""
    found = []
    for part in re.split(r"(?=Compiling entry function)", log):
        name = re.match(r"Compiling entry function '(\S+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        if name is None or registers is None:
            continue
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", part))
        static = re.search(r"(\d+) bytes smem", part)
        memory = int(static[1]) if static else 0
        found.append(Use(name[1], int(registers[1]), spilled, threads.get(name[1], 0), memory))
    return found


def broken_bounds(row: dict[str, Any], card: Card) -> list[str]:
    """The bounds that a compiled kernel breaks."""
    broken = []
    if row["spilled_bytes"]:
        broken.append(f"{row['spilled_bytes']} bytes of registers are spilled")
    if row["shared_memory"] > card.shared_memory_per_block:
        broken.append(f"{row['shared_memory']} bytes of shared memory, the card has {card.shared_memory_per_block}")
    if row["blocks_per_core"] < 1:
        broken.append("not one thread block fits on an SM")
    if row["in_flight"] is not None and row["in_flight"] < KEEP_IN_FLIGHT:
        broken.append(f"{row['in_flight']} bytes in flight an SM, {KEEP_IN_FLIGHT} are needed to hide the latency")
    return broken
