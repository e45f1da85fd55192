"""Owns `jpaged env`: what this installation runs on, for a person or for a bug report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any

import click

from jpaged import __version__
from jpaged.small_model import cache_dir, small_model_path

PACKAGES = ("jax", "jaxlib", "numpy", "tokenizers", "gguf", "huggingface_hub")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@click.command(short_help="Show versions, devices and kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Show versions, devices, memory, caches and the kernels that would be used."""
    facts = collect()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    lines = rows(facts)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:{width}}  {value}")


def collect() -> dict[str, Any]:
    """The facts, as plain JSON."""
    import jax

    return {
        "jpaged": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES} | {p: v for p in PLUGINS if (v := version(p))},
        "backend": jax.default_backend(),
        "devices": [describe(device) for device in jax.devices()],
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": host_memory(),
        "kernel_implementation": attention_kernel(),
        "cache": str(cache_dir()),
        "small_model_fetched": is_fetched(),
    }


def attention_kernel() -> str:
    """The kernel that serves a usual model (bfloat16, head_dim 128) on the default device."""
    import jax

    from pallas_kernels import default_implementation

    q, pages, tables = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((1, 8, 128), "bfloat16"), ((2, 8, 16, 128), "bfloat16"), ((1, 1), "int32"))
    )
    return default_implementation("paged_attention", q, pages, tables)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: Any) -> dict[str, Any]:
    memory = device.memory_stats() or {}  # CPUs keep no statistics
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "memory_bytes": memory.get("bytes_limit"),
        "memory_in_use_bytes": memory.get("bytes_in_use"),
    }


def host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def is_fetched() -> bool:
    try:
        small_model_path(download=False)
    except FileNotFoundError:
        return False
    return True


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts, one line each."""

    def gib(size: int | None) -> str:
        return "unknown" if size is None else f"{size / 2**30:.1f} GiB"

    lines = [("jpaged", facts["jpaged"]), ("python", facts["python"]), ("platform", facts["platform"])]
    lines += [(name, found or "not installed") for name, found in facts["packages"].items()]
    for device in facts["devices"]:
        memory = f", {gib(device['memory_bytes'])}" if device["memory_bytes"] else ""
        kind = "" if device["kind"] == device["platform"] else f", {device['kind']}"
        lines.append((f"device {device['id']}", f"{device['platform']}{kind}{memory}"))
    lines += [
        ("kernels", facts["kernel_implementation"]),
        ("cpu cores", str(facts["cpu_cores"])),
        ("host memory", gib(facts["host_memory_bytes"])),
        ("cache", facts["cache"]),
        ("small model", "fetched" if facts["small_model_fetched"] else "not fetched yet"),
    ]
    return lines
