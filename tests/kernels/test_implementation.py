"""The choice of an implementation, and what the attention kernels refuse."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import jit_quickly
from jax.experimental import checkify
from jax.sharding import AbstractMesh, AxisType

import pallas_kernels
from pallas_kernels import (
    IMPLEMENTATIONS,
    copy_pages,
    default_implementation,
    implementation,
    keep_top,
    paged_attention,
    ragged_paged_attention,
    write_kv,
)
from pallas_kernels.block_sizes import KEYS, block_sizes, table
from pallas_kernels.checks import number
from pallas_kernels.implementation import AVAILABLE
from pallas_kernels.target import Target, current_target

try:
    from jax.sharding import AbstractDevice
except ImportError:  # where it lies in JAX 0.11
    from jax._src.mesh import AbstractDevice

KERNELS = {
    "paged_attention": paged_attention,
    "ragged_paged_attention": ragged_paged_attention,
    "write_kv": write_kv,
    "copy_pages": copy_pages,
    "keep_top": keep_top,
}
ATTENTION = ("paged_attention", "ragged_paged_attention")


def arguments(kernel: str, rows: int = 3, dtype=np.float32, page_size: int = 4, head_dim: int = 8) -> dict:
    pool = np.zeros((5, 2, page_size, head_dim), dtype)
    ids = np.zeros(rows, np.int32)
    if kernel == "write_kv":
        new = np.zeros((rows, 2, head_dim), dtype)
        return dict(k_pages=pool, v_pages=pool, k=new, v=new, slot_mapping=ids)
    if kernel == "copy_pages":
        return dict(k_pages=pool, v_pages=pool, sources=ids, targets=ids)
    if kernel == "keep_top":
        logits, ones = np.zeros((rows, 11), np.float32), np.ones(rows, np.float32)
        return dict(logits=logits, temperature=ones, top_k=ids, top_p=ones, min_p=ones)
    args = dict(q=np.zeros((rows, 4, head_dim), dtype), k_pages=pool, v_pages=pool, scale=1.0)
    args |= dict(block_tables=np.zeros((rows, 2), np.int32), context_lens=ids)
    if kernel == "ragged_paged_attention":
        args["query_starts"] = np.zeros(rows + 1, np.int32)
    return args


def served_by(*kernels: str) -> pytest.MarkDecorator:
    """Parametrises over the implementations of some kernels that run here."""
    ways = [(kernel, name) for kernel in kernels for name in AVAILABLE[kernel] if name != "jax_triton"]
    return pytest.mark.parametrize(("kernel", "name"), [*((kernel, "xla") for kernel in kernels), *ways])


def serve(kernel: str, name: str, **changes):
    """The kernel's results for arguments that all implementations serve."""
    args = arguments(kernel, dtype=jnp.bfloat16, page_size=16, head_dim=64) | changes
    return KERNELS[kernel](**args, implementation=name, interpret=name != "xla")


def jit(name: str, function):
    return jax.jit(function) if name == "xla" else jit_quickly(function)


def on_device(arguments: dict) -> dict:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def call(kernel: str, implementation: str | None):
    return KERNELS[kernel](**on_device(arguments(kernel)), implementation=implementation)


def refused(kernel: str, change: dict, words: tuple[str, ...], error=ValueError) -> None:
    with pytest.raises(error) as caught:
        KERNELS[kernel](**(arguments(kernel) | change))
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_named_implementation_serves_or_says_that_it_cannot(kernel, name):
    if name == "xla":
        call(kernel, name)
        return
    with pytest.raises(NotImplementedError) as caught:
        call(kernel, name)
    for word in (kernel, repr(name), "cpu" if name in AVAILABLE[kernel] else "xla"):
        assert word in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_none_is_xla_on_a_cpu(kernel):
    assert default_implementation(kernel) == "xla"
    call(kernel, None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_xla_is_not_interpreted(kernel):
    refused(kernel, {"implementation": "xla", "interpret": True}, ("interpret", "xla"))


def test_nothing_asks_for_devices_at_import():
    code = "import pallas_kernels, jax._src.xla_bridge as bridge; assert not bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True)


HOPPER, AMPERE, BLACKWELL = (Target("cuda", c, "card", 132) for c in ((9, 0), (8, 0), (10, 0)))


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "chosen"),
    [
        (HOPPER, "bfloat16", 128, "mosaic_gpu"),
        (HOPPER, "float16", 64, "mosaic_gpu"),
        (HOPPER, "float32", 128, "triton"),
        (HOPPER, "int8", 128, "triton"),
        (AMPERE, "bfloat16", 128, "triton"),
        (BLACKWELL, "bfloat16", 128, "triton"),
        (Target("cuda", (7, 5), "card", 40), "float16", 128, "xla"),
        (Target("tpu", None, "card", 0), "bfloat16", 128, "xla"),
        (Target("cpu", None, "cpu", 0), "bfloat16", 128, "xla"),
    ],
)
@pytest.mark.parametrize("kernel", ["paged_attention", "ragged_paged_attention"])
def test_none_picks_the_best_that_can_serve(monkeypatch, kernel, target, dtype, head_dim, chosen):
    monkeypatch.setattr(implementation, "current_target", lambda: target)
    q = jax.ShapeDtypeStruct((4, 8, head_dim), dtype if "float" in dtype else "bfloat16")
    pages = jax.ShapeDtypeStruct((9, 2, 16, head_dim), dtype)
    tables = jax.ShapeDtypeStruct((4, 3), "int32")
    assert default_implementation(kernel, q, pages, tables) == chosen


@pytest.mark.parametrize(
    ("attributes", "target"),
    [
        (
            dict(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132),
            ("cuda", (9, 0), 132),
        ),
        (
            dict(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0", core_count=148),
            ("cuda", (10, 0), 148),
        ),
        (dict(platform="gpu", device_kind="MI300X", compute_capability="gfx942", core_count=304), ("gpu", None, 304)),
        (dict(platform="tpu", device_kind="TPU v6e"), ("tpu", None, 0)),
    ],
)
def test_the_target_is_read_from_the_default_device(monkeypatch, attributes, target):
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(**attributes)])
    found = current_target()
    assert (found.platform, found.capability, found.num_cores) == target
    assert found.device_kind == attributes["device_kind"]


def test_the_target_follows_the_default_device():
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_target().platform == "cpu"


def test_the_table_of_block_sizes_serves_every_gpu_kernel():
    assert {(k, i) for k, entries in table().items() for i in entries} == {
        (k, i)
        for k, names in AVAILABLE.items()
        for i in names
        if i != "jax_triton"  # has the tiles of "triton"
    }
    for entries in (entries for kernel in table().values() for entries in kernel.values()):
        assert all(entry.keys() <= KEYS for entry in entries)
        assert entries[-1].keys() == {"blocks"}, "the last entry is for all that came to no other"


def test_the_first_entry_that_matches_is_taken(monkeypatch):
    entries = [
        {"capability": "8.0", "head_dim": 64, "blocks": {"n": 1}},
        {"device": "H200", "kv_bits": 8, "blocks": {"n": 2}},
        {"head_dim": 128, "blocks": {"n": 3}},
        {"blocks": {"n": 4}},
    ]
    monkeypatch.setattr("pallas_kernels.block_sizes.table", lambda: {"kernel": {"triton": entries}})

    def chosen(capability, device, head_dim, kv_bits):
        target = Target("cuda", capability, device, 1)
        return block_sizes("kernel", "triton", target, head_dim=head_dim, kv_bits=kv_bits)["n"]

    assert chosen((8, 0), "NVIDIA A100", 64, 16) == 1
    assert chosen((8, 0), "NVIDIA A100", 80, 16) == 3
    assert chosen((9, 0), "NVIDIA H200", 64, 8) == 2
    assert chosen((9, 0), "NVIDIA H200", 256, 16) == 4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["cuda", "XLA", ""])
def test_an_unknown_implementation_is_refused(kernel, name):
    refused(kernel, {"implementation": name}, ("implementation", repr(name), "xla"))


POOL = np.zeros((5, 2, 4, 8), np.float32)
CHANGES = [
    ({"q": np.zeros((3, 32), np.float32)}, ("q must", "(3, 32)")),
    ({"q": np.zeros((3, 4, 16), np.float32)}, ("head_dim", "16", "8")),
    ({"q": np.zeros((3, 3, 8), np.float32)}, ("num_q_heads", "3", "num_kv_heads", "2")),
    ({"k_pages": POOL[0]}, ("k_pages", "(2, 4, 8)")),
    ({"v_pages": POOL[1:]}, ("v_pages", "(4, 2, 4, 8)", "k_pages", "(5, 2, 4, 8)")),
    ({"v_pages": POOL.astype(jnp.bfloat16)}, ("v_pages", "bfloat16", "k_pages", "float32")),
    ({"block_tables": np.zeros(3, np.int32)}, ("block_tables", "(3,)")),
    ({"block_tables": np.zeros((3, 2), np.int64)}, ("block_tables", "int64")),
    ({"context_lens": np.zeros(2, np.int32)}, ("context_lens", "(2,)", "(3, 2)")),
    ({"context_lens": np.zeros((3, 1), np.int32)}, ("context_lens", "(3, 1)")),
    ({"context_lens": np.zeros(3, np.uint32)}, ("context_lens", "uint32")),
    ({"sliding_window": 0}, ("sliding_window", "0")),
    ({"sliding_window": -3}, ("sliding_window", "-3")),
    ({"soft_cap": 0.0}, ("soft_cap", "0.0")),
    ({"soft_cap": -1.5}, ("soft_cap", "-1.5")),
    ({"soft_cap": float("nan")}, ("soft_cap", "nan")),
    ({"q": np.zeros((3, 4, 8), np.int32)}, ("q must", "int32")),
    ({"q": np.zeros((3, 4, 8), np.float64)}, ("q must", "float64")),
    ({"q": np.zeros((3, 0, 8), np.float32)}, ("num_q_heads", "0")),
    ({"block_tables": np.zeros((3, 0), np.int32)}, ("block_tables", "(3, 0)")),
    ({"k_pages": POOL.astype(np.float64), "v_pages": POOL.astype(np.float64)}, ("k_pages", "float64", "bfloat16")),
    ({"k_pages": POOL.astype(np.int8), "v_pages": POOL.astype(np.int8)}, ("int8", "k_scale")),
    ({"sinks": np.zeros(2, np.float32)}, ("sinks", "(2,)", "(4,)")),
    ({"sinks": np.zeros(4, np.float64)}, ("sinks", "float64")),
    ({"k_scale": np.ones(2, np.float32)}, ("k_scale", "v_scale", "both")),
    ({"k_scale": np.ones(4, np.float32), "v_scale": np.ones(2, np.float32)}, ("k_scale", "(4,)", "(2,)")),
    ({"block_tables": np.array([[0, 1], [5, 0], [0, 0]], np.int32)}, ("block_tables", "[5]", "5 pages", "0 to 4")),
    ({"block_tables": np.full((3, 2), -1, np.int32)}, ("block_tables", "[-1]", "0 to 4")),
    ({"context_lens": np.array([8, 9, 1], np.int32)}, ("context_lens", "[9]", "8 tokens")),
    ({"context_lens": np.array([1, 1, -2], np.int32)}, ("context_lens", "[-2]")),
]


NO_NUMBERS = [None, True, np.True_, "1", 1j, float("nan"), float("inf"), jnp.float32(1), np.ones(1)]


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("scale", [*NO_NUMBERS, 0, 0.0, -0.3, 1e-30, np.float32(-1), 10**400]),
        ("soft_cap", [*NO_NUMBERS[1:], 0, -1.5, 1e-4, 10_001, 10**400]),
        ("sliding_window", [*NO_NUMBERS[1:], 0, -3, 2.0, np.float32(2), jnp.int32(2)]),
        ("split_size", [*NO_NUMBERS[1:], 0, -64, 32, 100, 64.0, 2**31, 10**400]),
    ],
)
def test_options_are_numbers_known_while_tracing(kernel, option, values):
    if option == "split_size" and kernel != "paged_attention":
        return
    for value in values:
        refused(kernel, {option: value}, (option, repr(value) if isinstance(value, str | float) else "got"))
    args = arguments(kernel)
    with pytest.raises(ValueError, match=f"{option} must be .*Tracer"):
        jax.jit(lambda x: KERNELS[kernel](**(args | {option: x})))(1)


def test_a_cap_that_is_too_large_is_not_needed():
    refused("paged_attention", {"soft_cap": 1e5}, ("100000", "leave it out"))


@pytest.mark.parametrize("kernel", ATTENTION)
def test_numbers_of_numpy_are_as_good_and_a_window_over_all_is_none(kernel):
    def program(**options):
        arrays = {name: x for name, x in arguments(kernel).items() if name != "scale"}
        return str(jax.make_jaxpr(partial(KERNELS[kernel], **options))(**arrays))

    python = program(scale=0.5, soft_cap=2.0, sliding_window=3)
    assert python == program(scale=np.float64(0.5), soft_cap=np.int8(2), sliding_window=np.uint64(3))
    assert {type(number("scale", x, float, 0, 9)) for x in (1, np.float64(1), np.float16(1), np.int8(1))} == {float}
    plain = program(scale=2.0)
    assert all(plain == program(scale=2, sliding_window=window) for window in (8, 2**31, 10**400))
    assert plain != program(scale=2, sliding_window=7)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wrong", [[[0]], 0.5, None, "0"])
def test_what_is_no_array_is_refused(kernel, wrong):
    scales = {name: np.ones(2, np.float32) for name in ("k_scale", "v_scale")}
    optional = {"write_kv": set(scales), "copy_pages": set(), "keep_top": {"largest"}}
    names = arguments(kernel).keys() - {"scale"}
    for name in names if wrong is None else names | optional.get(kernel, {"sinks", *scales}):
        others = scales if name in scales else {}
        refused(kernel, others | {name: wrong}, (f"{name} must be an array, got {type(wrong).__name__}",))


@pytest.mark.parametrize("kernel", [*ATTENTION, "write_kv", "copy_pages"])
@pytest.mark.parametrize("axis", ["num_pages", "num_kv_heads", "page_size", "head_dim"])
def test_a_pool_of_nothing_is_refused(kernel, axis):
    shape = [5, 2, 4, 8]
    shape[["num_pages", "num_kv_heads", "page_size", "head_dim"].index(axis)] = 0
    pool = np.zeros(shape, np.float32)
    change = {"k_pages": pool, "v_pages": pool}
    if kernel in ATTENTION:
        change["q"] = np.zeros((3, 4, shape[3]), np.float32)
    refused(kernel, change, (axis, str(tuple(shape))))


@served_by(*KERNELS)
def test_nothing_to_do_gives_nothing_and_leaves_the_pools(kernel, name):
    empty = arguments(kernel, rows=0, dtype=jnp.bfloat16, page_size=16, head_dim=64)
    if "k_pages" in empty:
        empty["k_pages"] = np.ones_like(empty["k_pages"])
    wanted = (empty["k_pages"], empty["v_pages"]) if kernel in ("write_kv", "copy_pages") else empty.get("q")
    wanted = np.zeros((0, 11), bool) if kernel == "keep_top" else wanted
    arrays = {argument: x for argument, x in empty.items() if argument != "scale"}
    options = {"scale": 1.0} if kernel in ATTENTION else {}
    for out in (serve(kernel, name, **empty), jit(name, partial(serve, kernel, name, **options))(**arrays)):
        jax.tree.map(np.testing.assert_array_equal, out, wanted)
        assert jax.tree.map(lambda x: x.dtype, out) == jax.tree.map(lambda x: x.dtype, wanted)


@served_by("ragged_paged_attention")
def test_tokens_of_no_row_are_padding(kernel, name):
    empty = arguments(kernel, rows=0, dtype=jnp.bfloat16, page_size=16, head_dim=64)
    q = np.zeros((3, 4, 64), jnp.bfloat16)
    assert serve(kernel, name, **(empty | {"q": q})).shape == q.shape


@served_by(*ATTENTION)
def test_arrays_of_numpy_may_be_constants_of_what_is_compiled(kernel, name):
    args = arguments(kernel, dtype=jnp.bfloat16, page_size=16, head_dim=64)
    ones = np.ones(2, np.float32)
    heads = {"sinks": np.zeros(4, np.float32), "k_scale": ones, "v_scale": ones}
    out = jit(name, lambda q: serve(kernel, name, **(args | heads | {"q": q})))(args["q"])
    assert out.shape == args["q"].shape


def lower(function, **arrays) -> None:
    """Trace and lower for a Hopper, up to what compilers are given."""

    class Hopper(AbstractDevice):
        compute_capability, core_count = "9.0", 132

    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=Hopper("NVIDIA H200", 1, "cuda"))
    with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        jax.jit(function).trace(**arrays).lower(lowering_platforms=("cuda",))


@served_by(*KERNELS)
@pytest.mark.parametrize("pool", ["bfloat16", "int8"])
def test_64_bits_elsewhere_change_nothing(kernel, name, pool):
    args = arguments(kernel, dtype=jnp.bfloat16, page_size=16, head_dim=64)
    rng = np.random.default_rng(0)
    args = {n: rng.normal(size=x.shape).astype(x.dtype) if n in ("q", "k", "logits") else x for n, x in args.items()}
    if pool == "int8":
        if "k_pages" not in args:
            return
        args |= {name: rng.integers(-9, 9, args[name].shape, np.int8) for name in ("k_pages", "v_pages")}
        if kernel != "copy_pages":
            args |= {name: np.ones(2, np.float32) for name in ("k_scale", "v_scale")}
    if kernel in ATTENTION:
        args |= {"scale": np.float64(0.3), "soft_cap": np.float64(2), "context_lens": np.array([20, 3, 16], np.int32)}
        args["sliding_window"] = np.int64(9)
    if kernel == "ragged_paged_attention":
        args["query_starts"] = np.array([0, 1, 2, 3], np.int32)
    numbers = {n: args.pop(n) for n in ("scale", "soft_cap", "sliding_window") if n in args}
    wanted = served = None
    if name != "mosaic_gpu":  # whose interpreter has threads of its own, in which it forgets the setting
        wanted = jit(name, partial(serve, kernel, name, **numbers))(**args)
    with jax.enable_x64(True):
        if name != "mosaic_gpu":
            served = jit(name, partial(serve, kernel, name, **numbers))(**args)
        if name != "xla" and (kernel, name, pool) != ("ragged_paged_attention", "mosaic_gpu", "int8"):
            lower(partial(KERNELS[kernel], implementation=name, **numbers), **args)
    jax.tree.map(np.testing.assert_array_equal, served, wanted)


@served_by(*KERNELS)
def test_there_are_no_gradients(kernel, name):
    args = {n: jnp.asarray(x) for n, x in arguments(kernel, dtype=jnp.bfloat16, page_size=16, head_dim=64).items()}
    options = {"scale": 1.0} if kernel in ATTENTION else {}
    floats = [n for n, x in args.items() if jnp.issubdtype(x.dtype, jnp.floating) and n != "scale"]
    for n in floats:
        others = {other: x for other, x in args.items() if other not in (n, "scale")}
        function = jax.jit(lambda x: serve(kernel, name, **(others | {n: x} | options)))  # noqa: B023
        with pytest.raises(NotImplementedError, match=f"{kernel} has no gradient: .*stop_gradient"):
            jax.jvp(function, (args[n],), (args[n],))
    stopped = {n: jax.lax.stop_gradient(x) for n, x in args.items()}
    jax.eval_shape(partial(serve, kernel, "xla", **options), **{n: x for n, x in stopped.items() if n != "scale"})


@pytest.mark.parametrize("kernel", [*ATTENTION, "write_kv"])
@pytest.mark.parametrize("wrong", [0, -2, np.nan, np.inf])
def test_scales_are_above_0(kernel, wrong):
    scale = np.array([1, wrong], np.float32)
    for name, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
        refused(kernel, {name: scale, other: np.ones(2, np.float32)}, (name, str(float(wrong)), "above 0"))


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_arguments_that_do_not_fit_are_refused(kernel, change, words):
    refused(kernel, change, words)


def test_decode_takes_one_query_a_row():
    refused("paged_attention", {"q": np.zeros((4, 4, 8), np.float32)}, ("4 rows", "3", "one query a row"))


@pytest.mark.parametrize(
    "starts", [np.zeros(3, np.int32), np.zeros(5, np.int32), np.zeros((4, 1), np.int32), np.zeros(4, np.int64)]
)
def test_query_starts_that_do_not_fit_are_refused(starts):
    refused("ragged_paged_attention", {"query_starts": starts}, ("query_starts", str(starts.dtype), str(starts.shape)))


@pytest.mark.parametrize(
    ("starts", "words"),
    [([0, 1, 2, 4], ("[4]", "3 tokens")), ([1, 2, 2, 3], ("begin at 0",)), ([0, 2, 1, 3], ("fall",))],
)
def test_query_starts_that_cut_no_rows_are_refused(starts, words):
    refused("ragged_paged_attention", {"query_starts": np.array(starts, np.int32)}, ("query_starts", *words))


def test_a_split_size_that_cuts_blocks_is_refused():
    refused("paged_attention", {"split_size": 100}, ("split_size", "100", "64"))


def test_a_row_with_more_queries_than_context_is_refused():
    change = {"query_starts": np.array([0, 0, 2, 3], np.int32), "context_lens": np.array([0, 1, 1], np.int32)}
    refused("ragged_paged_attention", change, ("row 1", "2 queries", "1 tokens", "context_lens"))


def test_slots_beyond_the_pool_are_refused():
    refused("write_kv", {"slot_mapping": np.array([0, 20, 1], np.int32)}, ("slot_mapping", "[20]", "20 slots"))


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("paged_attention", {"block_tables": np.full((3, 2), 5, np.int32)}),
        ("ragged_paged_attention", {"context_lens": np.full(3, 9, np.int32)}),
        ("ragged_paged_attention", {"query_starts": np.full(4, 4, np.int32)}),
        ("ragged_paged_attention", {"query_starts": np.array([1, 1, 1, 1], np.int32)}),
        ("ragged_paged_attention", {"query_starts": np.array([0, 1, 0, 0], np.int32)}),
        ("ragged_paged_attention", {"query_starts": np.array([0, 0, 0, 1], np.int32)}),
        ("write_kv", {"slot_mapping": np.full(3, -1, np.int32)}),
        *((k, {"k_scale": np.float32([1, -1]), "v_scale": np.float32([1, 1])}) for k in (*ATTENTION, "write_kv")),
        ("copy_pages", {"targets": np.array([3, 4, 3], np.int32)}),
        ("copy_pages", {"sources": np.array([3, 0, 0], np.int32), "targets": np.array([4, 3, 0], np.int32)}),
        ("keep_top", {"temperature": np.float32([1, 0, 1])}),
    ],
)
def test_numbers_that_lie_on_the_device_are_checked_there_in_a_debug_mode(kernel, change):
    """With the words of the check on the host, which sees arrays of NumPy. It takes one array of JAX for both."""

    def call(on_device, **changed):
        options = {"scale": 1.0} if kernel in ATTENTION else {}
        arrays = {k: v for k, v in arguments(kernel).items() if k != "scale"} | changed
        given = {k: jnp.asarray(arrays.pop(k)) for k in tuple(arrays) if k in on_device}
        checked = checkify.checkify(jax.jit(partial(KERNELS[kernel], **arrays, **options)))
        return checked(**given)[0].get()

    everything = arguments(kernel).keys() | change.keys()
    assert call(everything) is None
    with pytest.raises(ValueError) as caught:
        KERNELS[kernel](**(arguments(kernel) | change))
    assert str(caught.value) in (call(everything, **change) or "")
    if len(change) > 1 and "sources" in change:
        for name in change:
            assert str(caught.value) in (call({name}, **change) or "")


def test_the_public_names_are_there():
    assert all(hasattr(pallas_kernels, name) for name in pallas_kernels.__all__)
