"""Compiles for a `Card` without having one, in a process that was started in the `environment` for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from compiled.limits import Card, Use, parse, threads_of

try:
    from jax.sharding import AbstractDevice
except ImportError:  # where it lies in JAX 0.11
    from jax._src.mesh import AbstractDevice


def environment(dump: Path) -> dict[str, str]:
    """The variables with which a process must be started to use this module. Compilers write into the folder `dump`."""
    for folder in ("mosaic", "triton"):
        (dump / folder).mkdir()
    flags = [
        f"--xla_dump_to={dump}",
        "--xla_dump_emitter_re=ptx",
        "--xla_gpu_autotune_level=0",  # it would run what it compares
    ]
    return {
        "JAX_PLATFORMS": "cpu",  # or the plugin looks for a driver
        "XLA_FLAGS": " ".join(flags),
        "MOSAIC_GPU_DUMP_TO": str(dump / "mosaic"),
        "JAX_TRITON_DUMP_DIR": str(dump / "triton"),
        "COMPILED_DUMP": str(dump),
    }


WHOLE = P()


class Mesh1D(NamedTuple):
    """Devices that are not there: concrete for the arguments' shardings, abstract to lower under."""

    mesh: Mesh
    abstract: AbstractMesh

    def like(self, shape: tuple[int, ...], dtype: Any, spec: P = WHOLE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))


@cache  # two that are alike count as different meshes
def devices(card: Card, axis: str = "x", number: int = 1) -> Mesh1D:
    """`number` cards in one machine along a mesh axis."""
    text = (Path(__file__).parent / f"{card.name}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x1x{number}")

    class Device(AbstractDevice):
        # Without these, kernels would take it for another card.
        compute_capability = card.capability
        core_count = card.num_cores

    device = Device(topology.devices[0].device_kind, number, "cuda")
    return Mesh1D(
        topologies.make_mesh(topology, (number,), (axis,)),
        AbstractMesh((number,), (axis,), (AxisType.Auto,), abstract_device=device),
    )


def compile_for(on: Mesh1D, function: Any, *arguments: Any, compiler_options: dict[str, Any] | None = None):
    """A jitted function compiled for devices that are not there; `arguments` are shapes made by `on.like`."""
    for path in dump().rglob("*"):
        if path.is_file():
            path.unlink()
    with jax.sharding.use_abstract_mesh(on.abstract):
        return function.lower(*arguments).compile(compiler_options)


def dump() -> Path:
    return Path(os.environ["COMPILED_DUMP"])


def used() -> list[Use]:
    """What each GPU kernel takes that the last `compile_for` made."""
    found = []
    for path in sorted([*dump().glob("*.ptx"), *dump().glob("triton/*/*.ptx")]):
        text = path.read_text()
        target = re.search(r"^\.target ([^\s,]+)", text, re.M)
        if target is None or ".entry" not in text:
            continue
        out = subprocess.run(
            [assembler(), "-v", f"-arch={target[1]}", str(path), "-o", os.devnull], capture_output=True, text=True
        )
        if out.returncode:
            raise RuntimeError(f"{path.name} is refused: {out.stderr.strip()[-500:]}")
        beside = [*path.parent.glob(path.name.split(".")[0] + "*thunk_sequence*"), *path.parent.glob("*.compile_info")]
        said = "\n".join(p.read_text() for p in beside)
        for use in parse(out.stderr, threads_of(text)):
            dynamic = re.search(rf"{re.escape(use.kernel)} .*?shared_memory: (\d+) bytes", said)
            dynamic = dynamic or re.search(r"shared_mem_bytes: (\d+)", said)
            extra = int(dynamic[1]) if dynamic else 0
            found.append(use._replace(shared_memory=use.shared_memory + extra))
    for path in sorted(dump().glob("mosaic/*.ptxas")):
        ptx = path.with_suffix(".ptx")
        threads = threads_of(ptx.read_text()) if ptx.exists() else {}
        resources = path.with_suffix(".resources.txt")
        dynamic = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
        extra = int(dynamic[1]) if dynamic else 0
        found += [use._replace(shared_memory=use.shared_memory + extra) for use in parse(path.read_text(), threads)]
    return found


def assembler() -> str:
    """The path of ptxas: of the wheel with NVIDIA's compiler, which is as new as what XLA writes, or on the PATH."""
    wheels = (str(path) for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/ptxas"))
    path = os.environ.get("PTXAS") or next(wheels, None) or shutil.which("ptxas")
    if path is None:
        raise FileNotFoundError("ptxas was not found: install the wheel nvidia-cuda-nvcc, or set PTXAS to its path")
    return path
