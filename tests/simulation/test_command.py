"""`jpaged bench memory`: its tables, files and pictures, and what it says of bad options."""

import json
import sys

import click.testing
import pytest

from jpaged.cli import main
from jpaged.simulation import sharing, study
from jpaged.simulation.beams import Likelihoods

SMALL = "--tokens", 12_000, "--slots", 2304
PICTURES = "memory_use", "running_requests", "page_size", "sharing", "batching"


def run(*arguments):
    return click.testing.CliRunner().invoke(main, ["bench", "memory", *(str(argument) for argument in arguments)])


@pytest.fixture
def fewer(monkeypatch):
    """A study small enough to be run again and again."""
    monkeypatch.setattr(study, "PAGE_SIZES", (16, 256))
    monkeypatch.setattr(study, "NUM_SAMPLES", (6,))
    monkeypatch.setattr(study, "NUM_BEAMS", (2,))
    monkeypatch.setattr(sharing, "NUM_SHARING", 4)
    monkeypatch.setattr(sharing, "PART", 1)
    monkeypatch.setattr(sharing, "VARIED", {Likelihoods(2.0, 0.5): (2,)})


def test_it_prints_tables_and_writes_json_and_pictures(fewer, tmp_path):
    result = run(*SMALL, "--json", tmp_path / "out.json", "--plots", tmp_path / "new" / "plots")
    assert result.exit_code == 0, result.output
    for part in (
        "ShareGPT: where",
        "Alpaca: where",
        "oracle",
        "pages of 256",
        "parallel sampling",
        "beam search",
        "short and long",
    ):
        assert part in result.stdout
    assert "2304 slots, traces of 12000 tokens" in result.stdout

    written = json.loads((tmp_path / "out.json").read_text())
    assert written["mode"] == "memory" and written["num_slots"] == 2304
    assert [use["policy"] for use in written["memory"]["Alpaca"]] == [
        "maximum",
        "power of two",
        "oracle",
        "paged",
        "paged",
    ]
    for uses in written["memory"].values():
        for use in uses:
            assert sum(use[share] for share in ("utilization", "reserved", "internal", "external")) == pytest.approx(1)
    shared = written["sharing"]["ShareGPT"]
    assert [(one["method"], one["n"]) for one in shared] == [("parallel sampling", 6), ("beam search", 2)]
    assert all(0 < one["saved"] < 1 and 0 < one["saved_full"] < 1 for one in shared)
    assert [(one["exponent"], one["alike"], one["n"]) for one in written["sensitivity"]["Alpaca"]] == [(2, 0.5, 2)]
    assert all(one["ratio"] >= 1 for one in written["batching"])

    for name in PICTURES:
        assert (tmp_path / "new" / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (tmp_path / "new" / "plots" / f"{name}.svg").read_text()
    assert len(list((tmp_path / "new" / "plots").iterdir())) == 2 * len(PICTURES)


def test_the_same_seed_gives_the_same_figures(fewer, monkeypatch, tmp_path):
    monkeypatch.setattr(study, "SPECS", study.SPECS[:1])

    def figures(name, seed):
        assert run(*SMALL, "--seed", seed, "--json", tmp_path / name).exit_code == 0
        return {key: value for key, value in json.loads((tmp_path / name).read_text()).items() if key != "seconds"}

    first = figures("a", 5)
    assert figures("b", 5) == first
    assert figures("c", 6)["memory"] != first["memory"]


def test_without_matplotlib_it_says_what_to_install_before_it_simulates(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(study, "run_study", lambda *_, **__: pytest.fail("it simulates first"))
    result = run("--plots", tmp_path / "plots")
    assert result.exit_code == 2
    assert result.stderr == "Error: --plots needs matplotlib, which is missing here: pip install matplotlib\n"
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--slots", "2000"], "slots must be at least 2304, got 2000"),
        (["--tokens", "-5"], "tokens must be at least 1, got -5"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--tokens", "500"], "too short to keep the memory full"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(flags, part):
    result = run(*flags)
    assert result.exit_code == 2
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


@pytest.mark.parametrize("flag", ["--json", "--plots"])
def test_a_place_that_cannot_be_written_is_known_before_it_simulates(monkeypatch, tmp_path, flag):
    monkeypatch.setattr(study, "run_study", lambda *_, **__: pytest.fail("it simulates first"))
    (tmp_path / "file").touch()
    result = run(flag, tmp_path / "file" / "below")
    assert result.exit_code == 2
    assert "file" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_mode_is_refused():
    result = click.testing.CliRunner().invoke(main, ["bench", "speed"])
    assert result.exit_code == 2
    assert "speed" in result.stderr
