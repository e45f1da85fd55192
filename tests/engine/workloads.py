"""Any workload through an engine: what a request generates depends on nothing but itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import engine_support as support
import numpy as np
import pytest

from jpaged.engine.engine import Engine
from jpaged.engine.outputs import CompletionOutput
from jpaged.host.sampling_params import SamplingParams

VOCAB_SIZE = 320
# Limits of the engines. Pools are made smaller by holding pages back, budgets and rows are shapes to compile.
SHAPES = (
    {
        "page_size": 4,
        "num_pages": 65,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_num_beams": 3,
        "swap_space": "36KiB",  # 12 pages
        "swap_disk_space": "36KiB",
        "preemption": "swap",
    },
    {
        "page_size": 8,
        "num_pages": 33,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 5,
        "swap_space": "1MiB",
        "preemption": "swap",
    },
    {"page_size": 16, "num_pages": 33, "max_num_seqs": 8, "max_num_batched_tokens": 32},
)
MAX_MODEL_LEN = 64
COMMON = tuple((31 * i * i + 5) % VOCAB_SIZE for i in range(45))  # what prompts may begin with


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes and when, if ever, it is forked and aborted, all in steps."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    step: int
    priority: int
    fork_step: int | None
    abort_step: int | None


@dataclass(frozen=True)
class Workload:
    shape: int
    num_pages: int  # that requests can hold
    arrivals: tuple[Arrival, ...]


def draw_workload(integer: Callable[[int, int], int]) -> Workload:
    """A workload from any source of whole numbers between two bounds, the bounds included."""

    def chance(percent: int) -> bool:
        return integer(1, 100) > 100 - percent

    shape = integer(0, len(SHAPES) - 1)
    page_size, most = SHAPES[shape]["page_size"], SHAPES[shape]["num_pages"] - 1
    at_least = MAX_MODEL_LEN // page_size
    urgent = chance(30)
    arrivals = []
    for _ in range(integer(1, 7)):
        max_tokens = integer(1, 24)
        start, stride = integer(0, VOCAB_SIZE - 1), integer(1, 60)
        prompt = tuple((start + stride * i * i) % VOCAB_SIZE for i in range(integer(1, 45)))
        if chance(50):
            common = integer(0, len(prompt))
            prompt = COMMON[:common] + prompt[common:]
        sampling = SamplingParams(
            temperature=integer(0, 3) / 2,
            top_k=integer(0, 1) * integer(1, 40),
            top_p=integer(5, 10) / 10,
            min_p=integer(0, 2) / 20,
            seed=integer(0, 2**64 - 1),
            n=integer(2, 3) if chance(25) else 1,
            max_tokens=max_tokens,
            min_tokens=integer(0, max_tokens) if chance(20) else 0,
            stop_token_ids=[integer(0, VOCAB_SIZE - 1) for _ in range(5)] if chance(30) else None,
            ignore_eos=chance(60),
            logprobs=True,
        )
        step = integer(0, 10)
        fork_step = step + integer(1, 20) if chance(25) else None
        abort_step = step + integer(0, 20) if chance(20) else None
        width = integer(2, 3)
        if chance(30) and shape == 0 and width * -(-(len(prompt) + max_tokens) // page_size) <= at_least:
            sampling = SamplingParams(num_beams=width, n=width, temperature=0, max_tokens=max_tokens)
        arrivals.append(Arrival(prompt, sampling, step, integer(-1, 1) if urgent else 0, fork_step, abort_step))
    num_pages = at_least + integer(0, 3) if chance(80) else integer(at_least, most)
    return Workload(shape, num_pages, tuple(arrivals))


@functools.cache
def engine(shape: int) -> Engine:
    built = support.build(support.tiny("llama"), max_model_len=MAX_MODEL_LEN, **SHAPES[shape])
    return built if shape == 0 else support.of_few_shapes(built)


@functools.cache
def alone(prompt: tuple[int, ...], sampling: SamplingParams, index: int) -> tuple[CompletionOutput, list[float]]:
    """One sample of a request by itself, in a large pool, and its log-probabilities."""
    output = support.serve(engine(0), [list(prompt)], sampling)[0]
    assert output.num_preemptions == 0
    return output.outputs[index], output.outputs[index].logprobs or []


@functools.cache
def forked_alone(prompt: tuple[int, ...], sampling: SamplingParams, num_tokens: int) -> tuple[list[int], str]:
    """What a fork of the first sample goes on with, after so many tokens, when nothing else is there."""
    large = engine(0)
    parent = large.add_request(list(prompt), sampling)
    while len(large._groups[parent].samples[0].request.output_token_ids) < num_tokens:
        large.step()
    (name,) = large.fork(parent)
    large.abort(parent)
    (sample,) = support.finish(large)[name].outputs
    return sample.token_ids, sample.finish_reason


def expect(workload: Workload) -> None:
    """Finds out what each request generates alone, before anything is tampered with."""
    for arrival in workload.arrivals:
        for index in range(arrival.sampling.n):
            alone(arrival.prompt, arrival.sampling, index)


def run(workload: Workload, served_by: Engine | None = None) -> int:
    """Serves a workload and asserts the property; returns the number of preemptions."""
    expect(workload)
    served_by = served_by or engine(workload.shape)
    before = served_by.stats.num_preemptions
    names = [str(i) for i in range(len(workload.arrivals))]
    finished, partial, aborted, forks, step = {}, {}, set(), {}, 0
    last = max(arrival.step for arrival in workload.arrivals)
    with support.small_pool(served_by, workload.num_pages):
        try:
            while step <= last or served_by.has_unfinished_requests():
                for name, arrival in zip(names, workload.arrivals, strict=True):
                    if arrival.step == step:
                        served_by.add_request(
                            list(arrival.prompt), arrival.sampling, request_id=name, priority=arrival.priority
                        )
                    if arrival.fork_step == step and name in served_by._groups and arrival.sampling.num_beams == 1:
                        parent = served_by._groups[name].samples[0].request
                        if parent.finish_reason is None:
                            (fork,) = served_by.fork(name)
                            forks[fork] = arrival, len(parent.output_token_ids)
                    if arrival.abort_step == step and served_by.abort(name):
                        aborted.add(name)
                for output in served_by.step():
                    assert output.request_id not in aborted, "a token came after the abort"
                    (finished if output.finished else partial)[output.request_id] = output
                step += 1
                assert step < 2000, "no progress"
        finally:
            for name in [*names, *forks]:  # whatever failed must not reach the next test
                served_by.abort(name)
    for name, (arrival, num_tokens) in forks.items():
        (sample,) = finished.pop(name).outputs
        partial.pop(name, None)
        expected = forked_alone(arrival.prompt, arrival.sampling, num_tokens)
        assert (sample.token_ids, sample.finish_reason) == expected, f"fork {name} has other tokens than alone"
    assert finished.keys() == set(names) - aborted
    for name, output in (partial | finished).items():
        arrival = workload.arrivals[int(name)]
        for sample in output.outputs:
            expected, logprobs = alone(arrival.prompt, arrival.sampling, sample.index)
            length = len(sample.token_ids)
            if name in finished:
                assert sample.token_ids == expected.token_ids, f"request {name} has other tokens than alone"
                assert (sample.finish_reason, sample.stop_reason) == (expected.finish_reason, expected.stop_reason)
                assert sample.score == pytest.approx(expected.score, abs=1e-4)
            else:
                assert sample.token_ids == expected.token_ids[:length], f"request {name} went another way"
            np.testing.assert_allclose(sample.logprobs or [], logprobs[:length], atol=1e-5, rtol=0)
    support.assert_idle(served_by)
    return served_by.stats.num_preemptions - before


def without_aborts(workload: Workload) -> Workload:
    arrivals = tuple(replace(arrival, abort_step=None, fork_step=None) for arrival in workload.arrivals)
    return replace(workload, arrivals=arrivals)
