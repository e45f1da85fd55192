"""The check for real GPUs runs to its end where there is none: whatever fails costs its own rows and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

import pallas_kernels

REPO = Path(__file__).parents[1]
sys.path.append(str(REPO / "scripts"))

from gpu_check_parts import arithmetic, attention, engine, memory, oracle, report, sampling, timing, worker  # noqa: E402
from gpu_check_parts.sampling import ALL, Filters, distribution  # noqa: E402
from gpu_check_parts.supervisor import Job, supervise  # noqa: E402
from gpu_check_parts.tasks import Built, Setup, Skipped, Task, like  # noqa: E402

pytestmark = pytest.mark.slow

PARTS = ["ceilings", "correctness", "attention", "memory", "sampling", "engine"]


def run_script(*options: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPO / "scripts" / "gpu_check.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


# The rehearsal


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("rehearsal")
    return folder, run_script("--rehearse", "--out", str(folder))


@pytest.mark.rehearsal
def test_a_rehearsal_has_a_row_for_every_promised_measurement_and_no_figures(rehearsal):
    folder, result = rehearsal
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = json.loads((folder / "gpu_check.json").read_text())["rows"]
    promised = {(t.part, name, t.implementation) for t in worker.all_tasks(PARTS) for name in t.names}
    assert {(row["part"], row["name"], row["implementation"]) for row in rows} == promised
    assert len(rows) == len(promised)
    assert not [row for row in rows if row["status"] not in ("rehearsed", "skipped", "refused")]
    assert not [row for row in rows if "seconds" in row or "error" in row]


def test_the_promises_are_all_that_is_to_be_known():
    promised = {(name, task.implementation) for task in worker.all_tasks(PARTS) for name in task.names}
    for batch, context, kernel in itertools.product((1, 16, 64, 256), (512, 4096, 32768), ("mosaic_gpu", "triton")):
        assert (f"decode {batch} × {context}", kernel) in promised
        assert (f"decode {batch} × {context}", "cuDNN, dense") in promised
    for tokens, kernel in itertools.product((2048, 8192, 32768), ("mosaic_gpu", "triton", "cuDNN, dense")):
        assert (f"prefill {tokens}", kernel) in promised
    for model, running in itertools.product(("8B", "0.6B"), (1, 16, 64, 256)):
        assert (f"{model}: decode, {running} running", "best") in promised
    rows = [name for name, _ in promised]
    for target in report.TARGETS:
        assert set(target.names) <= set(rows)
        assert target.most_of is None or target.most_of[0] in rows
    for kernel in ("paged_attention", "ragged_paged_attention", "write_kv", "copy_pages", "sample"):
        assert any(name.startswith(f"{kernel}: ") for name in rows)


@pytest.mark.rehearsal
def test_the_page_for_people_has_a_head_the_targets_and_every_row(rehearsal):
    folder, _ = rehearsal
    page = (folder / "gpu_check.md").read_text()
    for part in ("| date |", "| driver |", "| jax |", "| seed |", "A rehearsal", "## Targets", "## Failures: 0"):
        assert part in page, part
    rows = json.loads((folder / "gpu_check.json").read_text())["rows"]
    assert not [row["name"] for row in rows if f"| {row['name']} | {row['implementation']} |" not in page]


@pytest.mark.skipif("JAX_PLATFORMS" not in os.environ, reason="there may be a GPU")
def test_without_a_gpu_one_sentence_says_what_to_do(tmp_path):
    result = run_script("--out", str(tmp_path), JAX_PLATFORMS="cpu")
    assert result.returncode == 2
    assert result.stderr.strip().count("\n") == 0 and "--rehearse" in result.stderr


def test_an_unknown_part_is_refused(tmp_path):
    result = run_script("--parts", "attention,engines", "--out", str(tmp_path))
    assert result.returncode == 2 and "engines" in result.stderr


# Faults inside a worker


def rows_of(tasks: list[Task], **options) -> list[dict]:
    messages: list[dict] = []
    deadlines = options.pop("deadlines", dict.fromkeys(PARTS, time.time() + 1e6))
    setup = Setup(options.pop("rehearse", True), 1, 1 << 30)
    worker.work(setup, list(enumerate(tasks)), deadlines, messages.append, **options)
    return [message["row"] for message in messages if "row" in message]


@pytest.mark.parametrize("one_by_one", [None, "moving"])
def test_a_kernel_that_raises_costs_its_own_rows(monkeypatch, one_by_one):
    def broken(*_, **__):
        raise RuntimeError("the compiler is not pleased\nat all")

    tasks = [
        task for task in worker.all_tasks(["correctness"]) if task.group == "moving" and "float32" in task.names[0]
    ]
    assert {row["status"] for row in rows_of(tasks, one_by_one=one_by_one)} == {"rehearsed"}
    whole = [task for task in worker.all_tasks(["ceilings"])]
    monkeypatch.setattr(pallas_kernels, "write_kv", broken)
    rows = rows_of([*whole, *tasks, *whole], one_by_one=one_by_one)
    assert [row["status"] for row in rows] == ["rehearsed"] * 4 + ["failed"] * len(tasks) + ["rehearsed"] * 4
    assert {row["note"] for row in rows if row["status"] == "failed"} == {"RuntimeError: the compiler is not pleased"}


def test_a_kernel_that_is_wrong_fails(monkeypatch):
    right = pallas_kernels.paged_attention
    tasks = [task for task in worker.all_tasks(["correctness"]) if task.names[0] == "paged_attention: window 300"]
    for name, wrong in {
        "ignores the window": lambda **arrays: right(**arrays | {"sliding_window": None}),
        "is a bit off": lambda **arrays: right(**arrays) * 1.05,
        "reads one token too many": lambda **arrays: right(**arrays | {"context_lens": arrays["context_lens"] + 1}),
    }.items():
        monkeypatch.setattr(pallas_kernels, "paged_attention", wrong)
        rows = rows_of(tasks)
        assert {row["status"] for row in rows} == {"failed"}, name


def test_the_checks_of_the_sampler_hold_and_fail_where_it_is_wrong(monkeypatch):
    """Of all parts, since only a real card runs them otherwise."""
    tasks = [task for task in worker.all_tasks(["correctness", "sampling"]) if task.names[0].startswith("sample")]
    rows = rows_of(tasks)
    assert len(rows) == len(tasks) >= 12
    assert {row["status"] for row in rows} == {"rehearsed"}, [row for row in rows if row["status"] != "rehearsed"]
    right = sampling.sample

    def wrong(logits, *args):
        sampled = right(logits, *args)
        return sampled._replace(logprobs=sampled.logprobs - 0.01)

    monkeypatch.setattr(sampling, "sample", wrong)
    checked = [task for task in tasks if task.part == "correctness" and "drawn often" not in task.names[0]]
    assert {row["status"] for row in rows_of(checked)} == {"failed"}


def a_task(run, name: str = "a", **options) -> Task:
    return Task("memory", "g", (name,), "x", run, **options)


def good(setup, program):
    yield {"name": "a", "seconds": 1.0}


def test_what_a_task_raises_is_its_status():
    def raising(error):
        def run(setup, program):
            raise error

        return run

    refusal = NotImplementedError("paged_attention cannot be served by implementation='triton': the pool holds int8")
    errors = [Skipped("no room"), refusal, NotImplementedError("no rule for this primitive"), OSError("a\nb")]
    rows = rows_of([a_task(raising(error)) for error in errors])
    assert [row["status"] for row in rows] == ["skipped", "refused", "failed", "failed"]
    assert [row["note"] for row in rows][::3] == ["no room", "OSError: a"]
    (row,) = rows_of([a_task(raising(OSError("no cuDNN")), ours=False)])
    assert row["status"] == "skipped"
    (row,) = rows_of([a_task(lambda setup, program: iter(()))])
    assert row["status"] == "failed" and "promised" in row["note"]


def test_tasks_after_their_deadline_are_skipped():
    (row,) = rows_of([a_task(good)], deadlines={"memory": time.time() - 1})
    assert (row["status"], row["note"]) == ("skipped", "out of time")


def test_tasks_with_one_key_share_a_program():
    compiled = []

    class Function:
        def lower(self, *shapes):
            return self

        def compile(self):
            compiled.append(1)
            return jax.jit(lambda x: x)

    def build(setup):
        return Built("key", Function(), (like((1,), np.float32),))

    rows = rows_of([a_task(good, build=build), a_task(good, build=build)])
    assert [row["status"] for row in rows] == ["rehearsed"] * 2 and len(compiled) == 1


# A run with figures


def test_what_is_measured_has_figures(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 3e-3)
    monkeypatch.setattr(timing, "ROTATED_BYTES", 1 << 20)
    monkeypatch.setattr(memory, "MOVED_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "MATRIX", 64)
    monkeypatch.setattr(memory, "MOVES", [memory.Move("write_kv", 4)])
    small = attention.Decode(2, 64)
    monkeypatch.setattr(attention, "DECODES", [small])
    decode = [functools.partial(step, small, "xla") for step in (attention.run_decode, attention.build_decode)]
    monkeypatch.setattr(sampling, "NUM_SEQS", 2)
    monkeypatch.setattr(sampling, "VOCAB", 300)
    tiny = dataclasses.replace(engine.LLAMA_8B, **engine.TINY)
    monkeypatch.setattr(engine, "MODELS", {"8B": tiny})
    monkeypatch.setattr(engine, "FULL", engine.SMALL)
    tasks = [
        *memory.tasks(),
        Task("attention", "decode", (small.name,), "xla", *decode),
        *(task for task in sampling.tasks() if task.part == "sampling"),
        *engine.tasks(),
    ]
    rows = rows_of([task for task in tasks if task.implementation != "triton"], rehearse=False)
    profile = "8B: kernels of a step, 64 running"  # a CPU has none
    for row in rows:
        assert row["status"] == "ok", row
        if row["name"] != profile:
            assert row["seconds"] and ("bytes" in row or "flops" in row or "start" in row["name"]), row
    starts = [row["note"] for row in rows if "start" in row["name"]]
    assert starts[0] != starts[1] == "3 programs, 0 compiled"
    page = report.markdown({}, rows)
    assert "tokens/s" in page and "TFLOP/s" in page and "TB/s" in page
    without = [row["name"] for row in rows if report.share(row, report.ceilings(rows)) is None]
    assert without == ["8B: start, nothing compiled", profile, "8B: start, programs kept"]


PROFILE = """
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
          events { metadata_id: 1 duration_ps: 3000000 }
          events { metadata_id: 2 duration_ps: 4000000 }
          events { metadata_id: 1 duration_ps: 2000000 } }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "decode" } }
  event_metadata { key: 2 value { id: 2 name: "gemm" } }
}
planes { name: "/host:CPU" lines { name: "Stream of words" events { metadata_id: 1 duration_ps: 1 } }
         event_metadata { key: 1 value { id: 1 name: "python" } } }
"""


def test_the_profile_is_what_the_streams_of_the_device_ran():
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(PROFILE))
    assert timing.kernels_in([profile]) == [("decode", 2, pytest.approx(5e-6)), ("gemm", 1, pytest.approx(4e-6))]


# Faults of a worker: each job is a line of what the process does when it comes to it


WORKER = """
import json, os, sys, time
sys.path.append({scripts!r})
from gpu_check_parts.supervisor import speaker
send = speaker(int(sys.argv[1]))
deeds, numbers, one_by_one = json.loads(sys.argv[2])
if "compile" in [deeds[n] for n in numbers] and one_by_one is None:
    os._exit(9)
for number in numbers:
    deed = deeds[number]
    send({{"start": number}})
    if deed in ("die", "compile"):
        os._exit(7)
    if deed == "hang":
        time.sleep(100)
    row = {{"part": "memory", "name": str(number), "implementation": "x", "status": "ok"}}
    send({{"row": row, "task": number}})
    send({{"end": number}})
    if deed == "lose":
        os._exit(3)
send({{"done": True}})
"""


def supervised(*deeds: str, until: float = 1e6) -> tuple[list[str], int]:
    """The status of each job, and how many workers it took."""
    jobs = [Job("memory", "g", (str(i),), "x", 1.0) for i in range(len(deeds))]
    rows: dict[str, str] = {}
    workers = 0

    def spawn(numbers, one_by_one):
        nonlocal workers
        workers += 1
        read, write = os.pipe()
        source = WORKER.format(scripts=str(REPO / "scripts"))
        command = [sys.executable, "-c", source, str(write), json.dumps([deeds, numbers, one_by_one])]
        process = subprocess.Popen(command, pass_fds=(write,))
        os.close(write)
        return process, read

    def hear(message):
        if "row" in message:
            assert rows.setdefault(message["row"]["name"], message["row"]["status"]) == message["row"]["status"]

    assert supervise(jobs, spawn, hear, until=time.time() + until)
    return [rows[str(i)] for i in range(len(deeds))], workers


@pytest.mark.parametrize(
    ("deeds", "statuses", "workers"),
    [
        (["work", "work"], ["ok", "ok"], 1),
        (["work", "die", "work"], ["ok", "failed", "ok"], 2),
        (["work", "hang", "work"], ["ok", "failed", "ok"], 2),
        (["lose", "work"], ["ok", "ok"], 2),
        (["work", "compile", "work"], ["ok", "failed", "ok"], 3),
        (["die"], ["failed"], 1),
        (["lose", "lose", "work"], ["ok", "ok", "failed"], 2),
        (["die", "work", "die", "work"], ["failed", "ok", "failed", "failed"], 2),  # enough of its like have died
    ],
)
def test_a_worker_that_dies_or_hangs_costs_the_job_it_had_begun(deeds, statuses, workers):
    assert supervised(*deeds) == (statuses, workers)


def test_when_time_is_up_what_is_left_is_skipped(monkeypatch):
    monkeypatch.setattr("gpu_check_parts.supervisor.GRACE_SECONDS", 0.0)
    statuses, _ = supervised("hang", "work", until=0.3)
    assert statuses == ["skipped", "skipped"]


# The formulas


def test_bytes_and_flops_are_those_of_hand_calculations():
    # 64 rows of 4,096 tokens: 262,144 tokens, each 8 heads of 128 numbers of 2 bytes, twice; 64 x 32 x 128 in and out.
    assert arithmetic.decode_bytes(64, 64 * 4096, 32, 8, 128, 2) == 1_073_741_824 + 1_048_576
    assert arithmetic.decode_bytes(1, 512, 32, 8, 128, 1) == 1_048_576 + 16_384
    assert arithmetic.pairs(4, 4) == 1 + 2 + 3 + 4
    assert arithmetic.pairs(2, 5) == 4 + 5
    # 8,192 tokens: 33,558,528 pairs, 32 heads of 128 numbers, two products of a multiplication and an addition.
    assert arithmetic.attention_flops([(8192, 8192)], 32, 128) == 549_822_922_752
    assert arithmetic.attention_flops([(1, 3), (2, 2)], 1, 1) == 4 * (3 + 1 + 2)
    assert arithmetic.matmul_flops(8192) == 1_099_511_627_776
    assert arithmetic.copy_bytes(10) == 20
    # 256 tokens: keys and values of 8 x 128 numbers, 2 bytes read and 2 or 1 written.
    assert arithmetic.write_bytes(256, 8, 128, 2, 2) == 2_097_152
    assert arithmetic.write_bytes(256, 8, 128, 2, 1) == 1_572_864
    # A page of 16 tokens: 32 KiB of keys, as much of values, read and written.
    assert arithmetic.copy_pages_bytes(1, 8, 16, 128, 2) == 131_072
    assert arithmetic.sample_bytes(256, 151_936) == 155_582_464
    # A token of the 8B model takes 131,072 bytes of pool.
    assert arithmetic.step_bytes(1000, 10, 32, 8, 128, 2) == 1000 + 1_310_720
    assert arithmetic.prefill_flops(7, [(2, 2)], 3, 1, 1) == 2 * 7 * 2 + 3 * 4 * 3


def test_the_weights_of_a_step_are_those_of_the_model():
    model = engine.LLAMA_8B
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    shapes = engine.weight_shapes(model)
    arrays = {name: np.broadcast_to(np.int16(0), shape) for name, shape in shapes.items() if name != "layers"}
    layers = [{name: np.broadcast_to(np.int16(0), shape) for name, shape in one.items()} for one in shapes["layers"]]
    params = engine.Params(arrays | {"layers": tuple(layers)}, model)
    assert engine.layer_numbers(params) == 32 * layer == 6_979_321_856
    assert engine.read_bytes(params) == 2 * (32 * layer + 65 * 4096 + 4096 * 128_256)


def a_row(name: str, implementation: str = "triton", part: str = "attention", **values) -> dict:
    return {"part": part, "name": name, "implementation": implementation, "status": "ok", **values}


def test_shares_and_targets_follow_the_measured_ceilings():
    rows = [
        a_row("copy", "a kernel", "ceilings", seconds=1.0, bytes=3e12),
        a_row("copy", "the copy engine", "ceilings", seconds=1.0, bytes=4e12),
        a_row("bfloat16 product", "xla", "ceilings", seconds=2.0, flops=1.6e15),
        a_row("decode 64 × 4096", "mosaic_gpu", seconds=1e-3, bytes=3.6e9),
        a_row("decode 64 × 4096", "cuDNN, dense", seconds=1e-3, bytes=3.99e9),
        a_row("prefill 8192", seconds=1e-3, flops=4e11),
        a_row("8B: decode, 256 running", "best", "engine", seconds=20e-3, bytes=4e10),
        a_row("sample 256 × 151936, greedy", "xla", "sampling", seconds=0.5e-3, bytes=1.5e8),
        a_row("sample 256 × 151936, all filters", "xla", "sampling", seconds=0.7e-3, bytes=1.5e8),
    ]
    assert report.ceilings(rows) == {"copy": 4e12, "bfloat16 product": 8e14}
    assert report.share(rows[3], report.ceilings(rows)) == pytest.approx(0.9)
    assert report.share(rows[5], report.ceilings(rows)) == pytest.approx(0.5)
    assert report.share(rows[5], {}) is None
    found = [report.reached(target, rows) for target in report.TARGETS]
    assert found[0] == (pytest.approx(0.9), True)
    assert found[1] == (None, None)
    assert found[4] == (pytest.approx(0.5), False)
    assert found[-2] == (pytest.approx(0.025), True) and found[-1] == (pytest.approx(0.035), False)
    assert "3.6 TB/s" in report.line(rows[3], report.ceilings(rows)) and "90.0%" in report.markdown({}, rows)


# The definitions


def test_the_oracle_is_the_softmax_of_what_a_query_sees():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 4, 2)), rng.standard_normal((5, 2, 2)), rng.standard_normal((5, 2, 2))
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    out, _ = oracle.attention(q, k, v, scale=0.7, sliding_window=2, soft_cap=1.5, sinks=sinks)
    for i, head in itertools.product(range(3), range(4)):
        seen = [t for t in range(5) if 2 + i - 2 < t <= 2 + i]
        scores = [1.5 * np.tanh(0.7 * q[i, head] @ k[t, head // 2] / 1.5) for t in seen]
        total = sum(np.exp(scores)) + np.exp(float(sinks[head]))
        wanted = sum(np.exp(s) * v[t, head // 2] for s, t in zip(scores, seen)) / total
        np.testing.assert_allclose(out[i, head], wanted, rtol=1e-6)


def test_the_distribution_is_that_of_the_filters_in_their_order():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    one = Filters("", 1.0, top_k=3)
    np.testing.assert_allclose(distribution(logits, one)[0], [0, 4 / 9, 2 / 9, 3 / 9])
    np.testing.assert_allclose(distribution(logits, one._replace(top_p=0.5))[0], [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_allclose(distribution(logits, one._replace(min_p=0.6))[0], [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_array_equal(distribution(logits, Filters("", 0.0))[0], [0, 1, 0, 0])
    assert not distribution(logits, ALL)[1].any()
    assert distribution(logits, one._replace(top_p=4 / 9))[1].any(), "a border that rounding decides is not seen"
