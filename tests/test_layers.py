"""The diagram of the layers, and the tests that hold the imports to it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

# Who may import whom, inside this repository. A new arrow is a decision about the design: it is made here, on purpose.
ALLOWED: dict[str, set[str]] = {
    "pallas_kernels": set(),
    "jpaged.host": set(),
    "jpaged.models": {"jpaged.device", "pallas_kernels"},
    "jpaged.device": {"jpaged.models", "jpaged.host", "pallas_kernels"},
    "jpaged.checkpoint": {"jpaged.device", "jpaged.models", "jpaged.host"},
    "jpaged.engine": {"jpaged.checkpoint", "jpaged.device", "jpaged.models", "jpaged.host", "pallas_kernels"},
    "jpaged.small_model": {"jpaged.host"},
    "jpaged.simulation": {"jpaged.host"},
    "jpaged.run_batch": set(),
    "jpaged.bench": {"jpaged.engine", "jpaged.host"},
    "jpaged.bench_serve": {"jpaged.bench", "jpaged.host"},
    "jpaged.server": {"jpaged", "jpaged.checkpoint", "jpaged.engine", "jpaged.host", "jpaged.small_model"},
    "jpaged.cli": {
        "jpaged",
        "jpaged.bench",
        "jpaged.bench_serve",
        "jpaged.device",
        "jpaged.host",
        "jpaged.run_batch",
        "jpaged.server",
        "jpaged.simulation",
        "jpaged.small_model",
        "pallas_kernels",
    },
    "jpaged": {"jpaged.engine", "jpaged.checkpoint", "jpaged.device", "jpaged.models", "jpaged.host"},
}
# What a layer may import from outside, where that is limited.
OUTSIDE: dict[str, set[str]] = {
    "jpaged.host": {"numpy", *sys.stdlib_module_names},
    "jpaged.host.tokenizer": {"numpy", "tokenizers", *sys.stdlib_module_names},
    "jpaged.host.gguf_tokenizer": {"numpy", "tokenizers", *sys.stdlib_module_names},
    "jpaged.host.chat": {"jinja2", *sys.stdlib_module_names},
    "jpaged.host.grammar": {"llguidance", "numpy", *sys.stdlib_module_names},
    "jpaged.simulation": {"numpy", *sys.stdlib_module_names},
    "jpaged.run_batch": {"numpy", *sys.stdlib_module_names},
    "jpaged.bench_serve": {"numpy", *sys.stdlib_module_names},
    "jpaged.bench_serve.client": {"aiohttp", *sys.stdlib_module_names},
    "pallas_kernels": {"jax", "jaxlib", "jaxtyping", "numpy", *sys.stdlib_module_names},
    "pallas_kernels.paged_attention.jax_triton": {"jax", "jax_triton", "triton", *sys.stdlib_module_names},
}


def layer_of(module: str) -> str | None:
    """The layer that a module belongs to; None for what is not ours."""
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        return "pallas_kernels"
    if parts[0] != "jpaged":
        return None
    # `from jpaged import load` is seen as the module jpaged.load: a public name, which is the package itself.
    two = ".".join(parts[:2])
    return two if len(parts) > 2 or two in ALLOWED or is_module(two) else "jpaged"


def is_module(module: str) -> bool:
    path = REPO / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(source: str, module: str, is_package: bool = False) -> set[str]:
    """The full names that a module's source imports, inside functions and `if TYPE_CHECKING` too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                package = package[: len(package) - node.level + is_package]
                base = ".".join([*package, *([base] if base else [])])
            # `from jpaged import host` imports a module, `from jpaged.host import Request` a name in one.
            found |= {f"{base}.{alias.name}" if base == "jpaged" else base for alias in node.names}
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "import_module"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(node.args[0].value)
    return found


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    layer = layer_of(module)
    if layer not in ALLOWED:
        return [f"{module} belongs to no layer of the diagram"]
    problems = []
    for imported in sorted(imports_of(source, module, is_package)):
        target = layer_of(imported)
        if target is not None:
            if target != layer and target not in ALLOWED[layer]:
                problems.append(f"{module} imports {imported}: no arrow from {layer} to {target}")
            continue
        outside = OUTSIDE.get(module, OUTSIDE.get(layer))
        if outside is not None and imported.split(".")[0] not in outside:
            problems.append(f"{module} imports {imported}, which is not for {layer}")
    return problems


def modules() -> list[tuple[str, Path]]:
    files = [path for folder in ("jpaged", "pallas_kernels") for path in sorted((REPO / folder).rglob("*.py"))]
    return [(".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"), path) for path in files]


def test_no_import_crosses_the_layers_against_the_arrows():
    found = [p for name, path in modules() for p in violations(path.read_text(), name, path.name == "__init__.py")]
    assert not found, "\n".join(found)


def test_the_arrows_never_turn_back():
    # models, device and checkpoint are one layer in three folders: they may know each other.
    rank = {
        "pallas_kernels": 0,
        "jpaged.host": 0,
        "jpaged.run_batch": 0,
        "jpaged.small_model": 1,
        "jpaged.simulation": 1,
    }
    rank |= {"jpaged.device": 1, "jpaged.models": 1, "jpaged.checkpoint": 1, "jpaged.engine": 2}
    rank |= {"jpaged": 3, "jpaged.bench": 4, "jpaged.bench_serve": 5, "jpaged.server": 4, "jpaged.cli": 6}
    assert rank.keys() == ALLOWED.keys()
    beside = {"jpaged.device", "jpaged.models", "jpaged.checkpoint"}
    for layer, targets in ALLOWED.items():
        for target in targets:
            assert rank[target] < rank[layer] or {layer, target} <= beside, f"{layer} -> {target} turns back"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jpaged.host.scheduler", "import jax"),
        ("jpaged.host.scheduler", "def f():\n    from jax import numpy"),
        ("jpaged.host.scheduler", "import tokenizers"),
        ("jpaged.host.scheduler", "from jpaged.device import step"),
        ("jpaged.host.scheduler", "from jpaged import engine"),
        ("jpaged.host.scheduler", "from ..device import step"),
        ("jpaged.host.scheduler", "import importlib\nimportlib.import_module('jpaged.device')"),
        ("jpaged.device.step", "from jpaged.engine.engine import Engine"),
        ("jpaged.engine.engine", "from jpaged import load"),
        ("jpaged.simulation.paged", "import jax"),
        ("jpaged.run_batch.asgi", "import starlette"),
        ("jpaged.bench_serve.load", "import aiohttp"),
        ("jpaged.bench_serve.client", "from jpaged.engine.engine import Engine"),
        ("jpaged.simulation.paged", "from jpaged.engine.engine import Engine"),
        ("pallas_kernels.paged_attention", "from jpaged.device import linear"),
        ("pallas_kernels.paged_attention", "import click"),
        ("jpaged.newfolder.thing", "import os"),
    ],
)
def test_the_walk_finds_a_forbidden_import(module, source):
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jpaged.host.scheduler", "from jpaged.host.request import Request\nimport numpy as np\nimport time"),
        ("jpaged.host.scheduler", "from .request import Request"),
        ("jpaged.engine.engine", "from jpaged.host.scheduler import Scheduler"),
    ],
)
def test_the_walk_lets_an_allowed_import_pass(module, source):
    assert not violations(source, module)


def test_the_dependencies_are_the_third_party_imports():
    # Packages of another name than their module, and those that share one.
    packages = {"yaml": "pyyaml", "opentelemetry": "opentelemetry_sdk"}
    packages["opentelemetry.exporter"] = "opentelemetry_exporter_otlp_proto_http"

    def package_of(name: str) -> str:
        first, *rest = name.split(".")
        return packages.get(".".join([first, *rest[:1]])) or packages.get(first, first)

    imported = {
        package_of(name)
        for module, path in modules()
        for name in imports_of(path.read_text(), module, path.name == "__init__.py")
    }
    ours = {"jpaged", "pallas_kernels", "__future__", *sys.stdlib_module_names}
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w.-]+", line)[0].lower().replace("-", "_") for line in project["dependencies"]}
    # The extra `triton` is for the one kernel that is taken only when it is named.
    optional = {"triton": {"jax_triton", "triton"}, "plots": {"matplotlib"}, "bench": {"aiohttp"}}
    optional["otel"] = {"opentelemetry_sdk", "opentelemetry_exporter_otlp_proto_http"}
    assert imported - ours == declared.union(*optional.values())
    for extra, names in optional.items():
        lines = project["optional-dependencies"][extra]
        assert {re.match(r"[\w.-]+", line)[0].replace("-", "_") for line in lines} == names


@pytest.mark.parametrize(
    ("package", "importers"),
    [
        ("matplotlib", ["jpaged.cli.memory_plots", "jpaged.cli.serve_plots"]),
        ("opentelemetry", ["jpaged.server.tracing"]),
    ],
)
def test_a_package_that_may_be_absent_is_imported_where_it_is_needed_only(package, importers):
    importing = [
        module
        for module, path in modules()
        if any(name.split(".")[0] == package for name in imports_of(path.read_text(), module))
    ]
    assert importing == importers


@pytest.mark.parametrize("statement", ["import jpaged", "import jpaged.host.scheduler", "import jpaged.cli"])
def test_importing_the_host_does_not_import_jax(statement):
    code = f"import sys; {statement}; sys.exit(sorted(m for m in sys.modules if m in ('jax', 'jaxlib')) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
