"""The decode kernel written in Triton itself, in Triton's own interpreter: against the oracle, and with planted bugs.

It needs Triton 3.6, NumPy before 2.4, and a variable that must be there before anything imports Triton, from which it
takes the compiler for as long as the process lives, so that no fixture sets it:

    TRITON_INTERPRET=1 pytest tests/kernels/test_jax_triton.py

`paged_attention` runs as on a Hopper, up to the call of `jax_triton.triton_call`. A stand-in for that interprets the
kernel on copies of the arrays: to read anything but arguments is an error, to write anything but results is one too,
and results are NaN until they are written. Two things are worked around:

- The interpreter knows no closures: the kernels are taken out of `kernels` into the module around it.
- It multiplies bfloat16 as whole numbers, and truncates to it: both are mended.

What it cannot show is what compilers make of the kernels, such as a tile that the tensor cores don't take.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import textwrap
import types
import warnings
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import cases
import jax
import ml_dtypes
import numpy as np
import pytest
from cases import DECODE_CASES, EIGHT_BITS, SCALE, TYPES, Case, caught, check_decode, decode_case

from pallas_kernels import implementation, paged_attention
from pallas_kernels.paged_attention import jax_triton
from pallas_kernels.target import INTERPRETED

pytestmark = pytest.mark.slow

BF16 = np.dtype(ml_dtypes.bfloat16)
ONE_CORE = INTERPRETED._replace(num_cores=1)  # one split a row
SOME_CORES = INTERPRETED._replace(num_cores=18)  # three splits a row for six rows of two KV heads
MANY_CORES = INTERPRETED  # a split a block, in small batches


def why_not() -> str | None:
    """Why the kernels cannot be interpreted here, or None."""
    needed = jax_triton.NEEDS["triton"]
    try:
        found = version("triton")
    except PackageNotFoundError:
        return f"the package triton is not installed, {needed} is needed"
    if not found.startswith(f"{needed}."):
        return f"triton {found}, where {needed} is needed"
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return f"NumPy {np.__version__}, where the interpreter of Triton {needed} needs one before 2.4"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET=1 is not in the environment"
    return None


class Tensor:
    """What the interpreter asks of a tensor."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class Memory:
    """The arrays of the kernel that runs: no other address may be used."""

    def __init__(self):
        self.inputs: list[np.ndarray] = []
        self.outputs: list[np.ndarray] = []

    def check(self, arrays: list[np.ndarray], addresses: np.ndarray, mask: np.ndarray) -> None:
        used = addresses[np.broadcast_to(mask, addresses.shape)]
        inside = np.zeros(used.shape, bool)
        for array in arrays:
            begin = array.ctypes.data
            inside |= (used >= begin) & (used < begin + array.nbytes)
        assert inside.all(), "an access outside of every array"


@contextmanager
def mended_interpreter(monkeypatch, memory: Memory):
    import triton.language as tl
    from triton.runtime import interpreter

    builder, executor, handle = interpreter.InterpreterBuilder, interpreter.GridExecutor, interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store

    def numbers(x) -> np.ndarray:
        return x.data.view(BF16) if x.dtype.scalar == tl.bfloat16 else x.data

    def cast(self, x, to):
        if to.scalar == tl.bfloat16:
            return handle(numbers(x).astype(BF16).view(np.uint16), to.scalar)
        return handle(numbers(x).astype(interpreter._get_np_dtype(to)), to.scalar)

    def dot(self, x, y, total, input_precision, max_num_imprecise_acc):
        x, y = (numbers(factor).astype(np.float32) for factor in (x, y))
        return handle(x @ y + total.data, total.dtype.scalar)

    def checked_load(self, at, mask, *rest):
        memory.check(memory.inputs, at.data, mask.data)
        return load(self, at, mask, *rest)

    def checked_store(self, at, value, mask, *rest):
        memory.check(memory.outputs, at.data, mask.data)
        return store(self, at, value, mask, *rest)

    monkeypatch.setattr(builder, "cast_impl", cast)
    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    # What takes most of the time: checks for overflow whose result is not looked at, and that every call of a function
    # patches the language anew.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    monkeypatch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
    # Nothing is on a device, from which it would be fetched and to which it would be returned.
    monkeypatch.setattr(executor, "_init_args_hst", lambda self, args, options: (args, options))
    monkeypatch.setattr(executor, "_restore_args_dev", lambda *_: None)
    try:
        yield
    finally:
        scope.restore()


def triton_call(
    memory, *arrays, kernel, out_shape, grid, num_warps, num_stages, compute_capability, **constants
) -> jax.Array | tuple[jax.Array, ...]:
    """As `jax_triton.triton_call`, on a CPU."""
    assert compute_capability == 90 and num_warps > 0 and num_stages > 0
    shapes, structure = jax.tree.flatten(out_shape)
    memory.inputs = [np.array(x) for x in arrays]
    memory.outputs = [np.full(shape.shape, np.nan, shape.dtype) for shape in shapes]
    tensors = [Tensor(array) for array in (*memory.inputs, *memory.outputs)]
    inspect.signature(kernel.fn).bind(*tensors, **constants)  # the interpreter drops a constant that it does not know
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0 to a scalar", DeprecationWarning)
            kernel[grid](*tensors, **constants)
    except Exception as error:  # what was raised in the kernel is wrapped once or more
        while error.__cause__ is not None:
            error = error.__cause__
        raise error from None
    return structure.unflatten([jax.numpy.asarray(x) for x in memory.outputs])


@pytest.fixture
def use(monkeypatch, tmp_path_factory):
    """Has `paged_attention` run the kernels for a device, as they are or with a piece of the text replaced."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    memory = Memory()
    package = types.ModuleType("jax_triton")
    package.triton_call = partial(triton_call, memory)
    monkeypatch.setitem(sys.modules, "jax_triton", package)

    def load(target, bug: tuple[str, str] | None = None) -> None:
        source = inspect.getsource(jax_triton)
        if bug is not None:
            assert source.count(bug[0]) == 1, f"{bug[0]!r} is {source.count(bug[0])} times in the kernel"
            source = source.replace(*bug)
        before, body = source.split("@cache\ndef kernels() -> Kernels:\n")
        body = textwrap.dedent(body).replace("return Kernels(", "KERNELS = Kernels(")
        path = tmp_path_factory.mktemp("kernels") / "jax_triton.py"  # the interpreter reads the text of its functions
        path.write_text(f"{before}{body}\n\ndef kernels():\n    return KERNELS\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.version = jax_triton.NEEDS.get  # the package jax-triton is not needed
        module.current_target = lambda: target
        monkeypatch.setattr(implementation, "current_target", lambda: target)
        monkeypatch.setattr(implementation, "_module", lambda *_: module)

    with mended_interpreter(monkeypatch, memory), jax.disable_jit():  # the stand-in takes numbers
        yield load


def kernel(**options):
    return partial(paged_attention, implementation="jax_triton", **options)


def is_served(case: Case) -> bool:
    """Whether queries and pool are of one type, or the pool of eight bits and the queries of sixteen."""
    return case.q_type != "f32" if case.kv_type in EIGHT_BITS else case.q_type == case.kv_type


@pytest.mark.parametrize("case", [c for c in DECODE_CASES if is_served(c)], ids=lambda case: case.name)
def test_the_shared_cases_agree_with_the_oracle(case: Case, use):
    use(MANY_CORES)
    check_decode(kernel(), case)


LENS = (1, 15, 16, 17, 0, 400)
HEADS = ((1, 16), (4, 64), (7, 80))  # group, head_dim
PAIRS = (("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), *(("bf16", kind) for kind in EIGHT_BITS))
SPLITS = {"one split": (ONE_CORE, None), "three splits": (SOME_CORES, None), "splits of 192": (MANY_CORES, 192)}


def cut_case(splits: str, name: str, **options):
    return pytest.param(decode_case(name, *LENS, **options), *SPLITS[splits], id=f"{name}, {splits}")


FEATURES = dict(sliding_window=210, soft_cap=1.5, sinks=True, free_before_window=True, group=4, head_dim=16)
CASES = [
    # Every two of types, heads and splits meet.
    *(
        cut_case(list(SPLITS)[(i + j) % 3], f"{kv}, {g} of {d}", q_type=q, kv_type=kv, group=g, head_dim=d)
        for i, (q, kv) in enumerate(PAIRS)
        for j, (g, d) in enumerate(HEADS)
    ),
    *(cut_case(splits, "all at once", **FEATURES) for splits in SPLITS),
    *(cut_case(splits, "all at once, int8", q_type="bf16", kv_type="int8", **FEATURES) for splits in SPLITS),
]
LONG = decode_case("more splits than are combined in one turn", 1200, 40, num_kv_heads=1, group=1, head_dim=16)


@pytest.mark.parametrize(("case", "target", "split_size"), [*CASES, pytest.param(LONG, MANY_CORES, None, id=LONG.name)])
def test_every_way_to_cut_a_row_agrees_with_the_oracle(case: Case, target, split_size, use):
    use(target)
    check_decode(kernel(split_size=split_size), case)


def test_scales_serve_pools_of_any_type(use):
    use(MANY_CORES)
    k_scale, v_scale = np.array([[0.5, 4], [8, 0.25]], np.float32)

    def scaled(arrays: dict) -> dict:
        k_pages, v_pages = (arrays[f"{x}_pages"] / scale[:, None, None] for x, scale in zip("kv", (k_scale, v_scale)))
        return dict(k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale)

    check_decode(kernel(), decode_case("scaled", 130, 33), scaled)


@pytest.mark.parametrize("power", [-40, 40])
def test_queries_out_of_the_range_of_float16_meet_a_pool_of_eight_bits(power, use):
    use(ONE_CORE)
    case = decode_case("range", 40, 17, q_type="bf16", kv_type="e4m3", head_dim=16)
    unit = 2.0**power
    check_decode(kernel(), case, lambda a: {"q": a["q"] * BF16.type(unit), "scale": SCALE / unit})


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_float16_queries_meet_a_pool_of_eight_bits(kind, use, monkeypatch):
    use(MANY_CORES)
    monkeypatch.setitem(cases.BOUNDS, ("f16", kind), 2**-10)
    check_decode(kernel(), decode_case("float16 queries", 130, 17, q_type="f16", kv_type=kind, head_dim=16))


@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_every_number_of_eight_bits_is_read_exactly(kind, use):
    use(ONE_CORE)
    # The value of a row's only token is its result. Pairs of every number with some others, in both orders.
    low, high = (x.ravel() for x in np.meshgrid(*(np.arange(0, 256, step, np.uint8) for step in (1, 17))))
    pairs = np.concatenate([np.stack([low, high], 1), np.stack([high, low], 1)])
    values = pairs.reshape(-1, 1, 1, 256).view(TYPES[kind])
    tables = np.arange(len(values), dtype=np.int32)[:, None]
    q = np.zeros((len(values), 1, 256), np.float16)
    one = np.ones(1, np.float32)
    attend = kernel(scale=1.0, k_scale=one, v_scale=one)
    out = attend(q, np.zeros_like(values), values, tables, np.ones(len(values), np.int32))
    wanted = values[:, 0].astype(np.float32)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.asarray(out)[number], wanted[number])


# What is wrong, the text of the kernels, and what it is replaced by.
BUGS = {
    "a window one too long": ("first = tl.maximum(length - WINDOW, 0)", "first = tl.maximum(length - WINDOW - 1, 0)"),
    "the page before": ("page_ids = page_ids_of(tables, row, block + 1,", "page_ids = page_ids_of(tables, row, block,"),
    "another row's pages": ("tables + row * PAGES_PER_SEQ", "tables"),
    "scores without a mask": ("scores = tl.where(seen[None, :], scores, masked)", "pass"),
    "unwritten values": ("v = tl.load(v_pages + offset, mask=mask, other=0)", "v = tl.load(v_pages + offset)"),
    "results for heads that there are none": (
        "low.to(out.dtype.element_ty), mask=q_mask)",
        "low.to(out.dtype.element_ty))",
    ),
    "a sum that keeps its old scale": ("total = total * keep + tl.sum(weights, 1)", "total += tl.sum(weights, 1)"),
    "results that keep their old scale": ("v, low * keep[:, None],", "v, low,"),
    "another head's keys and values": ("NUM_KV_HEADS + kv_head) * PAGE_SIZE", "NUM_KV_HEADS) * PAGE_SIZE"),
    "another head's queries": ("q_head = kv_head * group + head", "q_head = kv_head + head"),
    "a soft cap off by one": ("(power + 1)", "power"),
    "sinks dropped": ("mask=head < group, other=masked) - top)", "mask=head < 0, other=masked) - top)"),
    "sinks dropped behind splits": ("total += tl.exp2(tl.load(sinks + head) - top)", "pass"),
    "splits added up as they are": ("weights = tl.exp2(some_tops - new_top)", "weights = tl.exp2(some_tops * 0)"),
    "splits that keep their old scale": ("acc = acc * keep +", "acc = acc +"),
    "a split that nobody made": ("live = split < count", "live = split <= count"),
    "the first splits in every turn": ("split = turn * COMBINED + tl", "split = tl"),
    "splits of a fixed size that overlap": ("end, start + SPLIT_BLOCKS)", "end, start + SPLIT_BLOCKS + 1)"),
    "shares that overlap": ("(split + 1) * blocks // count", "((split + 1) * blocks + count - 1) // count"),
    "odd columns like even ones": ("tl.store(out_at + 1, high", "tl.store(out_at + 1, low"),
    "keys without their scale": ("factor = factor * tl.load(k_scale + kv_head)", "pass"),
    "values without their scale": ("value_factor = value_factor * tl.load(v_scale + kv_head)", "pass"),
    "queries without their unit": ("factor = factor * unit", "pass"),
}
CATCHING = [
    (decode_case("plain", 130, 17, 33, 0, 0, 0, head_dim=16), SOME_CORES, None),
    (decode_case("windowed, with sinks", 130, 17, 33, head_dim=16, sliding_window=21, sinks=True), ONE_CORE, None),
    (decode_case("capped, with sinks", 130, 17, head_dim=16, soft_cap=1.5, sinks=True), MANY_CORES, 64),
    (decode_case("int8", 260, 17, q_type="bf16", kv_type="int8", head_dim=16), MANY_CORES, None),
    (LONG, MANY_CORES, None),
]


def is_caught(use, bug: tuple[str, str] | None) -> bool:
    for case, target, split_size in CATCHING:
        use(target, bug)
        if caught(check_decode, kernel(split_size=split_size), [case]):
            return True
    return False


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug, use):
    assert is_caught(use, BUGS[bug])


def test_the_kernels_pass_as_they_are(use):
    assert not is_caught(use, None)


@pytest.mark.parametrize(
    ("installed", "q_type", "kv_type", "words"),
    [
        ({}, "bfloat16", "bfloat16", ("jax-triton is not installed", "0.3")),
        ({"jax-triton": "0.3.1"}, "bfloat16", "bfloat16", ("triton is not installed", "3.6")),
        ({"jax-triton": "0.4.1", "triton": "3.6.0"}, "bfloat16", "bfloat16", ("jax-triton 0.4.1", "0.3")),
        ({"jax-triton": "0.3.1", "triton": "3.60.0"}, "bfloat16", "bfloat16", ("triton 3.60.0", "3.6")),
        (jax_triton.NEEDS, "float32", "bfloat16", ("float32", "one type for both")),
        (jax_triton.NEEDS, "float32", "int8", ("float32", "bfloat16 and float16")),
        (jax_triton.NEEDS, "bfloat16", "bfloat16", ()),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(installed, q_type, kv_type, words, monkeypatch):
    def version_of(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(jax_triton, "version", version_of)
    q, pool = jax.ShapeDtypeStruct((4, 8, 64), q_type), jax.ShapeDtypeStruct((9, 2, 16, 64), kv_type)
    reason = jax_triton.unsupported(INTERPRETED, q, pool, jax.ShapeDtypeStruct((4, 7), "int32"))
    assert all(word in reason for word in words) if words else reason is None
