"""Prints what the host spends on a step: schedule, pack and update, without a device. Needs no accelerator and no JAX.

python scripts/bench_host.py [--num-seqs 256] [--repeats 200]

Nothing is shared in these workloads: `off` and `on` are without and with a prefix cache, which is then only a cost.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from time import thread_time  # other load on the machine does not count

import numpy as np

from jpaged.host.batch import Buckets, pack
from jpaged.host.page_pool import PagePool
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.scheduler import Scheduler

VOCAB_SIZE, PAGE_SIZE, MAX_MODEL_LEN = 32_000, 16, 8704
MIXED_BUDGET = 2048
PHASES = ("schedule", "pack", "update")
CACHE = {False: "off", True: "on"}


class Host:
    def __init__(self, num_seqs: int, budget: int, num_pages: int, prefix_caching: bool):
        self.scheduler = Scheduler(
            PagePool(num_pages, PAGE_SIZE),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            prefix_caching=prefix_caching,
        )
        self.buckets = Buckets.make(num_seqs, budget, MAX_MODEL_LEN, PAGE_SIZE)

    def add(self, request_id: int, prompt_len: int, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=max_tokens)
        prompt = [request_id % VOCAB_SIZE] * prompt_len
        self.scheduler.add(Request(str(request_id), prompt, sampling, request_id, frozenset({2}), max_tokens))

    def step(self) -> tuple[bool, int, list[float]] | None:
        """(whether it was a decode step, its tokens, seconds in schedule, pack and update); None when idle."""
        times = [thread_time()]
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        times.append(thread_time())
        batch, rows = pack(plan.rows, self.scheduler.rows, self.buckets, VOCAB_SIZE, decoding=plan.decoding)
        times.append(thread_time())
        sampled = np.full(len(batch.context_lens), 7, np.int32)
        logprobs = np.full(len(batch.context_lens), -1.5, np.float32)
        times.append(thread_time())
        self.scheduler.update(plan._replace(rows=rows), sampled, logprobs)
        times.append(thread_time())
        return (
            batch.query_starts is None,
            plan.num_tokens,
            [times[1] - times[0], times[2] - times[1], times[4] - times[3]],
        )


def report(label: str, steps: list[list[float]]) -> None:
    mean = np.mean(steps, axis=0) * 1e6
    p50, p99 = np.percentile(np.sum(steps, axis=1) * 1e6, (50, 99))
    parts = "  ".join(f"{name} {value:6.0f}" for name, value in zip(PHASES, mean, strict=True))
    print(f"{label:<44} mean {mean.sum():6.0f}  p50 {p50:6.0f}  p99 {p99:6.0f}   ({parts})")


def bench_decode(num_seqs: int, context_len: int, repeats: int, prefix_caching: bool) -> None:
    host = Host(num_seqs, num_seqs * context_len, 1 + num_seqs * -(-MAX_MODEL_LEN // PAGE_SIZE), prefix_caching)
    for index in range(num_seqs):
        host.add(index, context_len - index % PAGE_SIZE, repeats + 20)  # so that page borders spread over the steps
    host.step()  # the budget takes all prompts at once
    label = f"decode, {num_seqs} rows, contexts of {context_len}, {CACHE[prefix_caching]}"
    report(label, [host.step()[2] for _ in range(repeats)])


def bench_mixed(num_seqs: int, num_requests: int, prefix_caching: bool) -> None:
    host, rng = Host(num_seqs, MIXED_BUDGET, 1 + 4096, prefix_caching), random.Random(0)
    for index in range(num_requests):
        host.add(index, rng.randint(10, 1500), rng.randint(10, 400))
    steps = defaultdict(list)
    while step := host.step():
        is_decode, num_tokens, seconds = step
        kind = "decode steps" if is_decode else "full steps" if num_tokens == MIXED_BUDGET else "other mixed steps"
        steps[kind].append(seconds)
    num_preemptions = host.scheduler.num_preemptions
    print(f"mixed workload of {num_requests} requests, {CACHE[prefix_caching]}, {num_preemptions} preemptions:")
    for kind, seconds in sorted(steps.items()):
        report(f"  {len(seconds)} {kind}", seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=200, help="decode steps to measure")
    args = parser.parse_args()
    print("microseconds of CPU time a step")
    for context_len in (100, 8000):
        for prefix_caching in (False, True):
            bench_decode(args.num_seqs, context_len, args.repeats, prefix_caching)
    for prefix_caching in (False, True):
        bench_mixed(args.num_seqs, 600, prefix_caching)
