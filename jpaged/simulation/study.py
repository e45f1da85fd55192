"""Owns the memory study: which policies, page sizes, samples, beams and batches are simulated on which traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .batching import Batching, compare_batching
from .contiguous import RESERVATIONS, simulate_contiguous
from .paged import PAGE_SIZE, simulate_paged
from .sharing import Sensitivity, Sharing, simulate_beam_search, simulate_parallel_sampling, simulate_sensitivity
from .trace import ALPACA, MAX_LEN, SHAREGPT, draw_trace, mixed_trace
from .usage import MemoryUse

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_SAMPLES = (2, 4, 6)
NUM_BEAMS = (2, 4, 6)
NUM_ROWS = 32  # of the comparison of batching
SPECS = (SHAREGPT, ALPACA)

DEFAULT_SLOTS = 15_728  # 12 GiB for OPT-13B in float16, as in Kwon et al. 2023, table 1
MIN_SLOTS = MAX_LEN + PAGE_SIZES[-1]  # the longest request in the largest pages, and the null page
DEFAULT_TOKENS = 200_000


@dataclass(frozen=True)
class Study:
    """What was simulated, by trace, and what came out. `sharing` names the method of each entry."""

    num_tokens: int
    num_slots: int
    seed: int
    page_size: int  # of `sharing` and `batching`; what stands for paging in a comparison
    seconds: float
    memory: dict[str, list[MemoryUse]]
    sharing: dict[str, list[Sharing]]
    sensitivity: dict[str, list[Sensitivity]]  # of what beams share
    batching: list[Batching]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_study(
    num_tokens: int = DEFAULT_TOKENS,
    num_slots: int = DEFAULT_SLOTS,
    seed: int = 0,
    tell: Callable[[str], None] = lambda what: None,
) -> Study:
    """Simulates everything on traces of about `num_tokens` tokens each. `tell` hears what is being done.

    Raises ValueError if the memory does not hold the longest request, or the traces do not fill it.
    """
    if num_slots < MIN_SLOTS:
        raise ValueError(
            f"slots must be at least {MIN_SLOTS}, got {num_slots}: the longest request, {MAX_LEN} tokens, must fit in "
            f"pages of {PAGE_SIZES[-1]} beside the null page"
        )
    for name, value, low in (("tokens", num_tokens, 1), ("seed", seed, 0)):
        if value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")
    started = time.perf_counter()
    memory: dict[str, list[MemoryUse]] = {}
    sharing: dict[str, list[Sharing]] = {}
    sensitivity: dict[str, list[Sensitivity]] = {}
    batching: list[Batching] = []
    for spec in SPECS:
        trace = draw_trace(spec, num_tokens, seed)
        tell(f"{spec.name}: contiguous memory")
        memory[spec.name] = [simulate_contiguous(policy, trace, num_slots) for policy in RESERVATIONS]
        for page_size in PAGE_SIZES:
            tell(f"{spec.name}: pages of {page_size}")
            memory[spec.name].append(simulate_paged(page_size, trace, num_slots))
        sharing[spec.name] = []
        for n in NUM_SAMPLES:
            tell(f"{spec.name}: {n} samples of a prompt")
            sharing[spec.name].append(simulate_parallel_sampling(n, spec, num_tokens, seed, num_slots))
        for width in NUM_BEAMS:
            tell(f"{spec.name}: {width} beams")
            sharing[spec.name].append(simulate_beam_search(width, spec, num_tokens, seed, num_slots))
        tell(f"{spec.name}: beams of other models")
        sensitivity[spec.name] = simulate_sensitivity(spec, num_tokens, seed)
    tell("static and continuous batches")
    mixed = mixed_trace(max(num_tokens // 350, 1), seed)  # a request has 350 tokens
    batching.append(compare_batching("short and long", mixed, NUM_ROWS))
    batching += [compare_batching(spec.name, draw_trace(spec, num_tokens, seed), NUM_ROWS) for spec in SPECS]
    seconds = time.perf_counter() - started
    return Study(num_tokens, num_slots, seed, PAGE_SIZE, seconds, memory, sharing, sensitivity, batching)
