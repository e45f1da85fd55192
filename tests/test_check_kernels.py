"""The check of compiled kernels: that it reads what compilers say, and fails on each bound."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

SPILLING = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_attention' for 'sm_90a'
ptxas info    : Function properties for paged_attention
    24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compiling entry function 'combine' for 'sm_90a'
ptxas info    : Function properties for combine
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
"""
PTX = """
.visible .entry paged_attention(
	.param .u64 .ptr .global .align 1 paged_attention_param_0,
	.param .u32 paged_attention_param_1
)
.reqntid 128
{
	ret;
}
.visible .entry combine(.param .u64 p)
.maxntid 32, 4, 1
.minnctapersm 1
{ ret; }
"""
ENTRY = """
ENTRY %main.1 (p0: bf16[8,4], p1: bf16[4,4], p2: bf16[9,2,16,4]) -> (bf16[9,2,16,4], f32[2,4]) {
  %p0.1 = bf16[8,4]{1,0} parameter(0), metadata={op_name="weights['embed']"}
  %p1.1 = bf16[4,4]{1,0} parameter(1)
  %p2.1 = bf16[9,2,16,4]{3,2,1,0} parameter(2)
  %ids = s32[2]{0} parameter(3)
  %gather_fusion = bf16[2,4]{1,0} fusion(%p0.1, %ids), kind=kLoop, calls=%f, metadata={op_name="jit(step)/embed/gather"}
  %bits = bf16[16]{0} bitcast(%p1.1)
  %dot = f32[2,4]{1,0} custom-call(%gather_fusion, %bits), custom_call_target="__cublas$gemm"
  %write = bf16[9,2,16,4]{3,2,1,0} custom-call(%p2.1, %dot), output_to_operand_aliasing={{}: (0, {})}
  %attention = f32[2,4]{1,0} custom-call(%dot, %write), custom_call_target="mosaic_gpu_v2"
  ROOT %t = (bf16[9,2,16,4]{3,2,1,0}, f32[2,4]{1,0}) tuple(%write, %dot)
}
"""


@pytest.fixture
def compiled(repo, monkeypatch):
    monkeypatch.syspath_prepend(repo / "scripts")
    from compiled import hlo, limits, table

    return argparse.Namespace(hlo=hlo, limits=limits, table=table)


def test_what_the_assembler_says_is_read(compiled):
    threads = compiled.limits.threads_of(PTX)
    assert threads == {"paged_attention": 128, "combine": 128}
    assert compiled.limits.parse(SPILLING, threads) == [
        ("paged_attention", 168, 36, 128, 512),
        ("combine", 30, 0, 128, 0),
    ]


@pytest.mark.parametrize(
    ("card", "registers", "threads", "shared", "blocks"),
    [
        ("h200", 80, 128, 38 * 1024, 5),  # by shared memory: 39 of 228 KiB
        ("a100", 80, 128, 38 * 1024, 4),
        ("h200", 168, 128, 0, 3),  # by registers: 5,376 a warp
        ("h200", 255, 384, 0, 0),  # 3 warpgroups with 255 each do not fit
        ("h200", 16, 1024, 0, 2),  # by threads
        ("h200", 16, 32, 0, 32),  # by blocks
    ],
)
def test_thread_blocks_an_sm_follow_from_what_one_takes(compiled, card, registers, threads, shared, blocks):
    assert compiled.limits.CARDS[card].blocks_per_core(registers, threads, shared) == blocks


GOOD = dict(spilled_bytes=0, shared_memory=100_000, blocks_per_core=2, in_flight=40_000)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spilled_bytes": 4}, "spilled"),
        ({"shared_memory": 232_449}, "shared memory"),
        ({"blocks_per_core": 0}, "not one"),
        ({"in_flight": 32_767}, "in flight"),
    ],
)
def test_a_kernel_that_breaks_a_bound_is_found(compiled, change, word):
    card = compiled.limits.CARDS["h200"]
    assert not compiled.limits.broken_bounds(GOOD, card)
    (problem,) = compiled.limits.broken_bounds(GOOD | change, card)
    assert word in problem


def test_pages_are_counted_for_each_instruction_that_is_given_them_and_does_not_write_them_in_place(compiled):
    size = 9 * 2 * 16 * 4 * 2

    def read(entry):
        return compiled.hlo.pages_read(compiled.hlo.instructions(entry), range(2, 3))

    assert read(ENTRY) == size
    assert read(ENTRY.replace("%attention", "%more = f32[2]{0} fusion(%write)\n  %attention", 1)) == 2 * size
    two = ENTRY.replace("%write = bf16[9,2,16,4]{3,2,1,0}", "%both = (bf16[9,2,16,4]{3,2,1,0}, f32[2])")
    two = two.replace("{{}: (0, {})}", "{{0}: (0, {})}\n  %write = bf16[9,2,16,4] get-tuple-element(%both), index=0")
    assert read(two) == size
    assert read(two.replace("index=0", "index=1")) == 0, "what the kernel made beside them is not of the pool"
    assert read(ENTRY.replace(", output_to_operand_aliasing={{}: (0, {})}", "")) == size, "copied, then read as a copy"


def test_weights_are_counted_once_for_each_instruction_that_reads_them(compiled):
    entry = compiled.hlo.instructions(ENTRY)
    looked_up, product = 2 * 2 * 4, 2 * 4 * 4
    assert compiled.hlo.weights_read(entry, num_weights=2) == looked_up + product
    again = ENTRY.replace("  ROOT", '  %dot2 = f32[2,4]{1,0} custom-call(%bits), custom_call_target="x"\n  ROOT')
    assert compiled.hlo.weights_read(compiled.hlo.instructions(again), 2) == looked_up + 2 * product


def test_a_copy_of_the_pool_is_found(compiled):
    pool = (9, 2, 16, 4)
    assert compiled.hlo.copies_of(compiled.hlo.instructions(ENTRY), pool) == []
    for copy in ("copy(%p2.1)", "fusion(%p2.1), kind=kLoop, calls=%f", 'custom-call(%p2.1), custom_call_target="x"'):
        text = ENTRY.replace("  ROOT", f"  %another = bf16[18,16,4]{{2,1,0}} {copy}\n  ROOT")
        (found,) = compiled.hlo.copies_of(compiled.hlo.instructions(text), pool)
        assert found.startswith("%another")


def test_the_table_goes_between_its_markers_and_holds_the_worst(compiled, tmp_path):
    path = tmp_path / "kernels.md"
    path.write_text(f"before\n{compiled.table.BEGIN}\nold\n{compiled.table.END}\nafter\n")
    common = dict(
        kernel="k", implementation="triton", card="h200", head_dim=64, kv_dtype="bfloat16", broken=[], threads=1
    )
    rows = [
        common | GOOD | {"registers": 90, "jax": "1"},
        common | GOOD | {"registers": 80, "in_flight": 36 * 1024, "jax": "2"},
        common | {"refused": "no", "jax": "2"},
    ]
    for _ in range(2):
        compiled.table.write_table(path, rows)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    assert "| `k` triton | H200 | 64 | bfloat16 | 2 | 90 | 0 | 97.7 KiB | 2 | 36 KiB |" in text


def test_a_compiler_that_dies_costs_one_program(repo, tmp_path):
    """A stand-in for the process that compiles, which aborts at its second job."""
    script = tmp_path / "check.py"
    script.write_text(
        "import sys, os, json, runpy\n"
        f"sys.path.insert(0, {str(repo / 'scripts')!r})\n"
        "import check_kernels\n"
        "def work(options):\n"
        "    print(4, flush=True)\n"
        "    for number in sys.stdin:\n"
        "        if int(number) == 1:\n"
        "            print('assertion failed', file=sys.stderr, flush=True)\n"
        "            os.abort()\n"
        "        print(json.dumps({'name': number.strip(), 'broken': []}), flush=True)\n"
        "    return 0\n"
        "check_kernels.work = work\n"
        f"check_kernels.__file__ = {str(script)!r}\n"
        "sys.exit(check_kernels.main())\n"
    )
    out = tmp_path / "rows.json"
    result = subprocess.run([sys.executable, script, "--json", out], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    rows = json.loads(out.read_text())
    assert sorted(row["name"] for row in rows) == ["0", "2", "3", "job 1"]
    (broken,) = [row for row in rows if row["broken"]]
    assert "died" in broken["broken"][0] and "assertion failed" in broken["broken"][0]
