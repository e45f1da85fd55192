"""`jpaged bench memory --run`: the measurements on a tiny model, and what the command says."""

import json
from dataclasses import replace
from pathlib import Path

import click.testing
import pytest

import jpaged
from jpaged.bench import Work, run_round
from jpaged.cli import main, memory_run
from jpaged.engine.engine import Engine
from jpaged.host.sampling_params import SamplingParams

TINY = Path(__file__).parents[1] / "data" / "checkpoints" / "llama"
# Those of the engine's tests: one cache of compiled programs serves both.
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 4, "num_pages": 65}
SIZES = {"SCALE": 32, "NUM_REQUESTS": 10, "NUM_SHARING": 4, "NUM_MIXED": 24}
SIZES |= {"NUM_TEXTS": 4, "TEXT_LEN": 32, "PAGE_SIZE": 4}


def run(*arguments):
    return click.testing.CliRunner().invoke(main, ["bench", "memory", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def engine():
    options = LIMITS | {"max_num_seqs": 8, "max_num_beams": 4, "num_pages": 200, "warm_up": False}
    return Engine(jpaged.load(TINY, dtype="float32"), **options)


def requests(count, *, prompt=8, tokens=8, **sampling):
    """Prompts of which no two begin alike."""
    asked = SamplingParams(max_tokens=tokens, ignore_eos=True, **({"temperature": 0.0} | sampling))
    return [Work([index + 1] * prompt, asked) for index in range(count)]


def test_nobody_shares_pages_with_others_prompts(engine):
    with memory_run.watched(engine) as held:
        memory_run.drive(engine, requests(6))
    assert held and all(one.used == one.unshared for one in held)
    assert "_launch" not in vars(engine), "it is watched for good"


def test_samples_and_beams_hold_what_can_be_counted_by_hand(engine):
    # A prompt of two pages, and two samples that write four tokens more each: they share the prompt's pages.
    with memory_run.watched(engine) as held:
        memory_run.drive(engine, requests(1, tokens=5, temperature=1.0, n=2, seed=0))
    assert held[0] == (2, 2, 1)
    assert held[-2:] == [(4, 6, 2), (3, 3, 1)], "the other one began a step later"
    # Two beams of one page and a token: each has a second page of its own, and there is nothing else to be shared.
    with memory_run.watched(engine) as held:
        memory_run.drive(engine, requests(1, prompt=4, tokens=2, num_beams=2))
    assert held == [(1, 1, 1), (3, 4, 2)]


def test_the_candidates_of_a_search_are_noted(engine):
    with memory_run.watched_beams(engine) as seen:
        memory_run.drive(engine, requests(2, num_beams=4), at_once=1)
    # Of each search, the first step has one beam, and none goes on after the last.
    assert len(seen) == 2 * 6
    assert all(lead > 0 and 0 <= same <= 1 for lead, same in seen)
    assert "branch" not in vars(engine._scheduler)


def test_no_more_run_at_once_than_allowed(engine):
    with memory_run.watched(engine) as held:
        memory_run.drive(engine, requests(5), at_once=2)
    assert max(one.num_running for one in held) == 2
    with memory_run.watched(engine) as held:
        memory_run.drive(engine, requests(5))
    assert max(one.num_running for one in held) == 5


def test_static_batches_begin_when_the_longest_of_the_one_before_has_ended(engine):
    works = [work._replace(sampling=replace(work.sampling, max_tokens=n)) for work, n in zip(requests(4), (9, 2, 2, 2))]
    with memory_run.watched(engine) as held:
        static = run_round(engine, works, "throughput", batch_size=2)
    assert [one.num_running for one in held] == [2, 2, *[1] * 7, 2, 2]
    assert static.num_steps == 11
    continuous = run_round(engine, works, "throughput")
    assert continuous.num_steps == 9
    assert static.num_output_tokens == continuous.num_output_tokens == 15


@pytest.fixture
def smaller(monkeypatch):
    for name, value in SIZES.items():
        monkeypatch.setattr(memory_run, name, value)
    for name, value in LIMITS.items():
        monkeypatch.setitem(memory_run.ENGINE, name, value)


def test_the_command_measures_and_writes_json(smaller, tmp_path):
    result = run("--run", "--model", TINY, "--rounds", 2, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    for part in (
        "KV utilisation mean",
        "parallel sampling",
        "beam search",
        "static, one tensor",
        "continuous",
    ):
        assert part in result.stdout

    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["mode"], written["model"], written["engine"]["max_num_seqs"]) == ("memory run", str(TINY), 4)
    use = written["memory"]
    assert use["num_requests"] == 10
    assert 0 < use["kv_utilization_min"] < use["kv_utilization_mean"] <= 1
    assert 0 < use["pages_mean"] < use["pages_max"] <= use["num_pages"]
    assert use["pages_mean"] < use["reserved_mean"]
    samples, beams = written["sharing"]
    assert 0 < samples["saved"] < 0.75 and 0 < beams["saved"] < 0.75
    assert samples["saved"] == pytest.approx(samples["simulated"], abs=0.02), "it is the same scheduler"
    padded, static, continuous = written["batching"]
    # The row that begins last is one of the longest only where all are.
    assert padded["num_steps"] == pytest.approx(static["num_steps"], rel=0.05)
    assert static["num_steps"] > 1.5 * continuous["num_steps"]
    for one in written["batching"]:
        assert len(one["rounds"]) == 2 and min(one["rounds"]) <= one["throughput"] <= max(one["rounds"])
        assert one["num_output_tokens"] == continuous["num_output_tokens"]
    assert written["ratios"]["static"] == pytest.approx(continuous["throughput"] / static["throughput"])


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--run", "--tokens", "500"], "--run measures, it simulates nothing: leave --tokens out"),
        (["--run", "--plots", "there"], "leave --plots out"),
        (["--run", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["--model", "there"], "the simulation runs no model without --run: leave --model out"),
        (["--rounds", "2"], "leave --rounds out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(flags, part):
    result = run(*flags)
    assert result.exit_code == 2
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1
