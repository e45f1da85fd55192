"""Owns the process that touches the device: it runs tasks one by one and says what it does, a line of JSON each."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from gpu_check_parts.supervisor import DEVICE_LOST, speaker
from gpu_check_parts.tasks import TYPES, Setup, Skipped, Task, first_line, like
from pallas_kernels import default_implementation

MODULES = ("memory", "correctness", "moving", "attention", "sampling", "engine")

# How our kernels say that they do not serve a call. Other NotImplementedErrors come from compilers, and are failures.
REFUSAL = "cannot be served by"

Send = Callable[[dict[str, Any]], None]


def all_tasks(parts: list[str]) -> list[Task]:
    """The tasks of these parts, in their order. A module that cannot be imported costs no other one's."""
    tasks = []
    for name in MODULES:
        try:
            tasks += import_module(f"gpu_check_parts.{name}").tasks()
        except Exception as error:
            tasks.append(_broken(name, error))
    return sorted((task for task in tasks if task.part in parts), key=lambda task: parts.index(task.part))


def _broken(module: str, error: Exception) -> Task:
    def run(setup: Setup, program: Any) -> Any:
        raise error

    part = "correctness" if module == "moving" else module
    return Task(part, module, (f"the tasks of {module}",), "all", run)


def be_worker(pipe: int) -> int:
    """What a worker process does: the orders come on standard input, the answers go through the pipe."""
    orders = json.load(sys.stdin)
    send = speaker(pipe)
    rehearse = orders["rehearse"]
    if rehearse:
        jax.config.update("jax_disable_most_optimizations", True)  # nothing is timed: compile fast
    try:
        platform = jax.devices()[0].platform
    except RuntimeError as error:
        print(error, file=sys.stderr)
        platform = "none"
    if platform != "gpu" and not rehearse:
        send({"no_device": True})
        return 0
    device = describe_device()
    send({"head": device | {"implementation=None is": default_kernels()}})
    tasks = all_tasks(orders["parts"])
    setup = Setup(rehearse, orders["seed"], (1 << 30) if rehearse else device["memory"])
    numbered = [(number, tasks[number]) for number in orders["numbers"]]
    if not work(setup, numbered, orders["deadlines"], send, orders["one_by_one"]):
        return DEVICE_LOST
    send({"done": True})
    return 0


def _row(task: Task, name: str, **values: Any) -> dict[str, Any]:
    return {"part": task.part, "name": name, "implementation": task.implementation, **values}


def work(
    setup: Setup, tasks: list[tuple[int, Task]], deadlines: dict[str, float], send: Send, one_by_one: str | None = None
) -> bool:
    """Run the numbered tasks; False if the device was lost on the way.

    `deadlines`: for each part when, by `time.time`, nothing more of it is begun. The programs of a group are compiled
    together, in threads; those of the group `one_by_one` each within its task, so that a compiler which takes the
    process with it takes only one.
    """
    for (part, group), neighbours in itertools.groupby(tasks, key=lambda item: (item[1].part, item[1].group)):
        members = list(neighbours)
        setup.kept.clear()
        programs: dict[int, Future] = {}
        if group != one_by_one and time.time() < deadlines[part]:
            programs = compile_together(setup, members, send, deadlines[part])
        for number, task in members:
            if time.time() > deadlines[part]:
                for name in task.names:
                    send({"row": _row(task, name, status="skipped", note="out of time"), "task": number})
                continue
            send({"start": number})
            lost = not run_one(setup, number, task, programs.pop(number, None), send)
            send({"end": number})
            if lost:
                return False
    return True


def compile_together(setup: Setup, members: list[tuple[int, Task]], send: Send, deadline: float) -> dict[int, Future]:
    """For each task its program. Returns when all are there, or have failed."""
    by_key: dict[Any, Future] = {}
    programs: dict[int, Future] = {}
    lock = threading.Lock()

    def compiled(task: Task) -> Any:
        if time.time() > deadline:
            raise Skipped("out of time")
        built = task.build(setup)
        with lock:
            mine = built.key not in by_key
            future = by_key.setdefault(built.key, Future())
        if mine:
            try:
                future.set_result(built.compile())
            except Exception as error:
                future.set_exception(error)
            send({"alive": True})
        return future.result()

    threads = min(12, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        for number, task in members:
            if task.build is not None:
                programs[number] = pool.submit(compiled, task)
    return programs


def run_one(setup: Setup, number: int, task: Task, program: Future | None, send: Send) -> bool:
    """Send the rows of a task, whatever happens; False if the device does not answer any more."""
    left = list(task.names)

    def rest(**values: Any) -> None:
        for name in left:
            send({"row": _row(task, name, **values), "task": number})

    try:
        compiled = None
        if task.build is not None:
            compiled = program.result() if program is not None else task.build(setup).compile()
        for values in task.run(setup, compiled):
            left.remove(values["name"])
            values = {key: value for key, value in values.items() if value is not None}
            status = "rehearsed" if setup.rehearse else "ok"
            if "failed" in values:
                status, values["note"] = "failed", values.pop("failed")
            elif setup.rehearse:
                values = {key: value for key, value in values.items() if key in ("name", "bytes", "flops")}
            send({"row": _row(task, values.pop("name"), status=status, **values), "task": number})
        assert not left, f"rows were promised that did not come: {left}"
    except Skipped as reason:
        rest(status="skipped", note=str(reason))
    except Exception as error:
        if isinstance(error, NotImplementedError) and REFUSAL in str(error):
            rest(status="refused", note=first_line(error))
            return True
        traceback.print_exc()
        rest(status="failed" if task.ours else "skipped", note=f"{type(error).__name__}: {first_line(error)}")
        return device_answers()
    return True


def device_answers() -> bool:
    """An illegal access ends a process's use of the device: then another process has to go on."""
    try:
        return float(jnp.ones(4).sum()) == 4
    except Exception:
        return False


def describe_device() -> dict[str, Any]:
    """What the head of the results says of the device and its software."""
    device = jax.devices()[0]
    facts: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "capability": getattr(device, "compute_capability", None),
        "cores": getattr(device, "core_count", None),
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "runtime": str(getattr(device.client, "platform_version", "")).replace("\n", ", "),
    }
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "nvidia-cudnn-cu13", "nvidia-cublas", "numpy"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def default_kernels() -> dict[str, str]:
    """What `implementation=None` stands for on this device, for the heads and pages that are timed here."""
    q = like((64, 32, 128), TYPES["bf16"])
    found = {}
    for kind in ("bf16", "e4m3"):
        pages, tables = like((64, 8, 16, 128), TYPES[kind]), like((64, 4), jnp.int32)
        calls = {"paged_attention": (q, pages, tables), "ragged_paged_attention": (q, pages, tables)}
        calls |= {"write_kv": (pages, q), "copy_pages": (pages,)}
        for kernel, arrays in calls.items():
            try:
                found[f"{kernel}, {kind} pool"] = default_implementation(kernel, *arrays)
            except Exception as error:  # a kernel that cannot be imported is no reason to stop here
                found[f"{kernel}, {kind} pool"] = f"none: {first_line(error)}"
    return found
