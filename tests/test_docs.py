"""What the documents say is so: their Python runs, their commands and links exist, their modules are all there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from jpaged.cli import main
from jpaged.host.config import EngineConfig

REPO = Path(__file__).parents[1]
DOCUMENTS = [
    *(REPO / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPO / "docs").rglob("*.md")),
]
ADDRESS = "http://127.0.0.1:8000"  # Python that talks to a server is run by the tests of the server
# Programs that a document may name beside ours: part of every system, or of the development environment.
PROGRAMS = {"bash", "cd", "git", "pip", "pytest", "ruff", "mypy", "curl"}
# What docs/serving.md runs a server with.
PROGRAMS |= {"cp", "docker", "kubectl", "mkdir", "python3", "systemctl", "/opt/jpaged/bin/pip"}


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The link targets that a Markdown document's headings make."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def problems_of_command(words: list[str]) -> list[str]:
    """What does not exist of a command: its program, our script, our subcommand or its options."""
    program, *rest = words
    if program == "bash" or program.startswith("scripts/"):
        script = rest[0] if program == "bash" else program
        return [] if (REPO / script).is_file() else [f"there is no {script}"]
    if program in ("python", ".venv/bin/python") and rest and rest[0].endswith(".py"):
        return [] if (REPO / rest[0]).is_file() else [f"there is no {rest[0]}"]
    name = program.removeprefix(".venv/bin/")
    if name != "jpaged":
        return [] if name in PROGRAMS else [f"nobody knows {program}"]
    command: click.Command = main
    while rest and isinstance(command, click.Group) and not rest[0].startswith("-"):
        found = command.commands.get(rest[0])
        if found is None:
            return [f"jpaged has no command {rest[0]}"]
        command, rest = found, rest[1:]
    known = {flag for option in command.params for flag in [*option.opts, *option.secondary_opts]} | {"-h", "--help"}
    given = [word.split("=")[0] for word in rest if word.startswith("-")]
    return [f"{command.name} has no option {flag}" for flag in given if flag not in known]


def commands_in(text: str) -> list[list[str]]:
    lines = [line for block in blocks(text, "(?:bash|sh|console)") for line in block.replace("\\\n", " ").splitlines()]
    split = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [words for words in split if words]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_the_documents_exists(document):
    found = [problem for words in commands_in(document.read_text()) for problem in problems_of_command(words)]
    assert not found


@pytest.mark.parametrize(
    "command",
    ["bash scripts/absent.sh", "jpaged absent", "jpaged chat --absent", "absent", "python scripts/absent.py"],
)
def test_a_command_that_does_not_exist_is_found(command):
    assert problems_of_command(command.split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_internal_link_leads_somewhere(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        destination = document.parent / path if path else document
        assert destination.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(destination.read_text()), f"{target}: no such heading"


def test_the_architecture_has_every_module_and_no_other():
    named = set(re.findall(r"`((?:jpaged|pallas_kernels)/[\w/]+\.py)`", (REPO / "ARCHITECTURE.md").read_text()))
    there = {
        str(path.relative_to(REPO))
        for folder in ("jpaged", "pallas_kernels")
        for path in (REPO / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(there - named) == [], "modules that ARCHITECTURE.md leaves out"
    assert [name for name in sorted(named) if not (REPO / name).is_file()] == [], "named, and not there"


@pytest.mark.model
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_python_in_the_documents_runs(document, small_model, monkeypatch, tmp_path, request):
    monkeypatch.chdir(tmp_path)
    python = [block for block in blocks(document.read_text(), "python") if ADDRESS not in block]
    if any("deterministic=True" in block for block in python):
        request.getfixturevalue("optimized")  # what is promised are bits
    # The defaults serve many requests and compile for minutes: what a document leaves open is small here.
    from_options = EngineConfig.from_options
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128}
    monkeypatch.setattr(EngineConfig, "from_options", lambda options: from_options({**small, **options}))
    scope: dict[str, object] = {"__name__": "__document__"}
    for number, block in enumerate(python):
        exec(compile(block, f"{document.name}[{number}]", "exec"), scope)
