"""The command line, on an engine that answers with words of its own; the real one is run at the end."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace

import click.testing
import pytest

import jpaged
from jpaged.cli import main, options
from jpaged.cli.chat import Conversation
from jpaged.device.params import Params
from jpaged.host.config import EngineConfig
from jpaged.host.metrics import EngineStats
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.structured import Structured
from jpaged.models.config import ModelConfig

generate_module = importlib.import_module("jpaged.cli.generate")
chat_module = importlib.import_module("jpaged.cli.chat")
bench_module = importlib.import_module("jpaged.cli.bench")


class FakeEngine:
    """Answers every request with `words`, one a step; `seen` keeps what it was asked."""

    def __init__(self, words=("one ", "two ", "three"), max_model_len=100, before_step=None):
        self.words, self.max_model_len, self.before_step = words, max_model_len, before_step
        self.stats = EngineStats()
        self.warm_up_seconds = 1.5
        self.seen, self.running, self.aborted = [], {}, []
        self.params = published_with()

    def add_request(self, prompt, sampling):
        size = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else 7
        if size >= self.max_model_len:
            raise ValueError(f"the prompt has {size} tokens, max_model_len is {self.max_model_len}")
        request_id = f"r{len(self.seen)}"
        self.seen.append((prompt, sampling))
        self.running[request_id] = ([0] * size, sampling, 0)
        return request_id

    def has_unfinished_requests(self):
        return bool(self.running)

    def reset_prefix_cache(self):
        pass

    def step(self):
        if self.before_step:
            self.before_step(self)
        outputs = []
        for request_id, (prompt_ids, sampling, done) in list(self.running.items()):
            done += 1
            last = min(sampling.max_tokens or 10**9, len(self.words))
            reason = None if done < last else "stop" if last == len(self.words) else "length"
            sample = SimpleNamespace(
                text="".join(self.words[:done]),
                token_ids=list(range(done)),
                cumulative_logprob=-1.25,
                finish_reason=reason,
            )
            samples = [SimpleNamespace(index=i, **vars(sample)) for i in range(sampling.n)]
            outputs.append(
                SimpleNamespace(request_id=request_id, prompt_token_ids=prompt_ids, outputs=samples, finished=reason)
            )
            self.running[request_id] = (prompt_ids, sampling, done)
            if reason:
                del self.running[request_id]
        self.stats.record_step(
            num_tokens=len(outputs), batch_tokens=len(outputs) + 1, is_decode=True, num_output_tokens=len(outputs)
        )
        self.stats.record_kv(num_tokens=len(outputs) + 1, num_slots=16)
        return outputs

    def abort(self, request_id):
        self.aborted.append(request_id)
        return self.running.pop(request_id, None) is not None


def published_with(**defaults):
    return Params({}, ModelConfig("Tiny", 8, 8, 8, 1, 1, 1, 8, 100, sampling_defaults=tuple(defaults.items())))


@pytest.fixture
def fake(monkeypatch):
    """Puts a FakeEngine behind the commands; `fake.settings` is what the command asked of the engine."""
    engine = FakeEngine()

    def open_fake(given, **defaults):
        engine.model, engine.dtype = given.pop("model"), given.pop("dtype")
        chosen = {name: given.pop(f"engine_{name}") for name in options.ENGINE}
        engine.settings = defaults | {k: v for k, v in chosen.items() if v is not None}
        EngineConfig(**engine.settings)
        tokenizer = SimpleNamespace(chat_template="{{ messages }}")
        return options.OpenedEngine(engine, tokenizer, "float32", engine.settings, 0.5, 1.5, engine.params)

    for module in (generate_module, chat_module, bench_module):
        monkeypatch.setattr(module, "open_engine", open_fake)
    return engine


def run(*arguments, **keywords):
    return click.testing.CliRunner().invoke(main, [str(argument) for argument in arguments], **keywords)


def test_the_version_is_told():
    assert run("--version").stdout == f"jpaged {jpaged.__version__}\n"


def test_generate_streams_the_answer_to_stdout_and_the_figures_to_stderr(fake):
    result = run("generate", "hello")
    assert result.exit_code == 0, result.output
    assert result.stdout == "one two three\n"
    assert "7 prompt tokens, 3 output tokens" in result.stderr
    assert result.stderr.rstrip().endswith("tokens/s")
    assert fake.seen == [([{"role": "user", "content": "hello"}], SamplingParams(temperature=0.0, max_tokens=256))]


def test_generate_raw_gives_the_prompt_as_it_is(fake):
    run("generate", "--raw", "hello")
    assert fake.seen[0][0] == "hello"


def test_generate_reads_the_prompt_from_standard_input(fake):
    run("generate", "--raw", input="from a pipe\n")
    run("generate", "--raw", "-", input="two\nlines\n")
    assert [prompt for prompt, _ in fake.seen] == ["from a pipe", "two\nlines"]


def test_generate_puts_the_system_message_first(fake):
    run("generate", "--system", "be brief", "hello")
    assert fake.seen[0][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_generate_refuses_a_system_message_without_a_chat(fake):
    assert run("generate", "--raw", "--system", "x", "hello").exit_code == 2


def test_generate_shows_each_of_n_samples(fake):
    result = run("generate", "-n", 2, "hello")
    assert result.stdout == "[1/2] one two three\n[2/2] one two three\n"
    assert "6 output tokens" in result.stderr
    assert fake.settings["max_num_seqs"] == 2


def test_generate_tells_the_logprob_when_asked(fake):
    assert "log-probability -1.2500" in run("generate", "--logprobs", "hello").stderr


def test_an_interrupted_generate_aborts_and_keeps_what_was_said(fake):
    def interrupt(engine):
        if engine.stats.num_steps == 2:
            raise KeyboardInterrupt

    fake.before_step = interrupt
    result = run("generate", "hello")
    assert result.exit_code == 130
    assert result.stdout == "one two \n"
    assert fake.aborted == ["r0"]


def test_every_sampling_parameter_has_an_option():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert options.SAMPLING.keys() | options.PYTHON_ONLY == fields and not options.SAMPLING.keys() & options.PYTHON_ONLY


def test_every_engine_option_has_an_option():
    assert options.ENGINE.keys() | {"logits_processor"} == {field.name for field in dataclasses.fields(EngineConfig)}


def test_what_is_drawn_can_be_changed_from_the_command_line(fake, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    flags = "--repetition-penalty 1.2 --frequency-penalty 0.5 --presence-penalty -0.5 --logit-bias 7=-2.5 "
    flags += "--logit-bias 8=1 --bad-word no --bad-word never --truncate-prompt-tokens 5 --logprobs-mode processed"
    for shape, structured in {
        f"json=@{tmp_path / 'schema.json'}": {"json": {"type": "object"}},
        "json_object": {"json_object": True},
        "regex=[a-z]=": {"regex": "[a-z]="},
        "choice=yes|no": {"choice": ["yes", "no"]},
    }.items():
        assert run("generate", *flags.split(), "--structured", shape, "hello").exit_code == 0
        assert fake.seen[-1][1] == SamplingParams(
            repetition_penalty=1.2,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={7: -2.5, 8: 1},
            bad_words=["no", "never"],
            truncate_prompt_tokens=5,
            logprobs_mode="processed",
            structured=Structured(**structured),
            max_tokens=fake.seen[-1][1].max_tokens,
            temperature=0,
        )
    assert run("generate", "--allowed-token-id", 5, "--allowed-token-id", 6, "hello").exit_code == 0
    assert fake.seen[-1][1].allowed_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--logit-bias", "7"], "'7' is not a token id and a number"),
        (["--logit-bias", "7=much"], "'7=much' is not"),
        (["--structured", "xml=a"], "'xml=a' is none of json=SCHEMA"),
        (["--structured", "regex="], "'regex=' is none of"),
        (["--structured", "json={"], "not JSON"),
        (["--structured", "json=@/absent.json"], "/absent.json cannot be read"),
        (["--presence-penalty", "3"], "presence_penalty must be from -2 to 2"),
    ],
)
def test_what_cannot_be_read_of_them_is_refused(fake, flags, complaint):
    result = run("generate", *flags, "hello")
    assert result.exit_code and complaint in result.output, result.output


def test_every_sampling_option_reaches_the_request(fake):
    flags = "-t 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 -m 9 --min-tokens 2 --stop a --stop b --stop-token-id 3 "
    flags += "--include-stop-str-in-output --ignore-eos --seed 11 --logprobs --show-special-tokens -n 2 "
    flags += "--spaces-between-special-tokens"
    result = run("generate", *flags.split(), "hello")
    assert result.exit_code == 0, result.output
    assert fake.seen[0][1] == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(3,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        seed=11,
        logprobs=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=True,
    )
    assert run("generate", "--no-spaces-between-special-tokens", "hello").exit_code == 0
    assert fake.seen[1][1].spaces_between_special_tokens is False


def test_the_models_defaults_come_before_the_commands_and_after_the_options(fake):
    fake.params = published_with(temperature=0.6, top_p=0.8, repetition_penalty=1.1)
    told = "sampling defaults of the model: "
    result = run("generate", "hello")
    assert fake.seen[-1][1] == SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.1, max_tokens=256)
    line = "temperature=0.6, top_p=0.8, repetition_penalty=1.1; --no-model-defaults leaves them\n"
    assert told + line in result.stderr
    assert result.stdout == "one two three\n"
    result = run("generate", "-t", "0", "--top-p", "1.0", "hello")  # as they are without options
    assert fake.seen[-1][1] == SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=256)
    assert told + "repetition_penalty=1.1; " in result.stderr
    result = run("generate", "-t", "1", "--top-p", "0.5", "--repetition-penalty", "1", "hello")
    assert fake.seen[-1][1] == SamplingParams(temperature=1, top_p=0.5, max_tokens=256) and told not in result.stderr
    result = run("generate", "--no-model-defaults", "hello")
    assert fake.seen[-1][1] == SamplingParams(temperature=0, max_tokens=256) and told not in result.stderr
    result = run("generate", "--num-beams", "2", "hello")
    assert fake.seen[-1][1] == SamplingParams(temperature=0, num_beams=2, max_tokens=256) and told not in result.stderr
    fake.params = published_with(top_k=5, max_tokens=9)
    result = run("chat", input="hello\n")
    assert fake.seen[-1][1] == SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=9)
    assert result.stderr.count(told + "top_k=5, max_tokens=9; ") == 1
    run("chat", "--no-model-defaults", "-m", "0", input="hello\n")
    assert fake.seen[-1][1] == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None)


def test_max_tokens_zero_means_as_many_as_fit(fake):
    run("generate", "-m", 0, "hello")
    assert fake.seen[0][1].max_tokens is None


def test_every_engine_option_reaches_the_engine(fake):
    flags = "--page-size 8 --max-num-seqs 3 --max-num-batched-tokens 64 --max-model-len 512 --kv-dtype bfloat16 "
    flags += "--gpu-memory-utilization 0.5 --kv-cache-memory 1GiB --warm-up yes --late-compile error --check-integrity "
    flags += "--compilation-cache-dir c --kernels triton --interpret-kernels "
    flags += "--max-num-beams 2 --no-prefix-caching"
    result = run("generate", *flags.split(), "hello")
    assert result.exit_code == 0, result.output
    assert fake.settings == {
        "page_size": 8,
        "max_num_seqs": 3,
        "max_num_beams": 2,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory": "1GiB",
        "dtype": "bfloat16",
        "warm_up": True,
        "late_compile": "error",
        "compilation_cache_dir": "c",
        "kernels": "triton",
        "interpret_kernels": True,
        "check_integrity": True,
    }


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--page-size", "0"], "page_size"),
        (["--kv-cache-memory", "lots"], "lots"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(fake, flags, part):
    result = run("generate", *flags, "hello")
    assert result.exit_code == 2
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not fake.seen


def test_traceback_shows_where_a_mistake_was_raised(fake):
    assert isinstance(run("--traceback", "generate", "-t", "-1", "hello").exception, ValueError)


def test_a_missing_file_is_one_line_with_exit_code_2(fake, tmp_path):
    result = run("generate", "--model", tmp_path / "absent", "hello")
    assert fake.model == str(tmp_path / "absent")
    result = run("bench", "latency", "--workload", tmp_path / "absent.json")
    assert result.exit_code == 2
    assert "absent.json" in result.stderr


def test_chat_keeps_the_history_until_reset(fake):
    result = run("chat", input="hello\nand then?\n/reset\nanew\n/quit\nnever asked\n")
    assert result.exit_code == 0, result.output
    answer = {"role": "assistant", "content": "one two three"}
    assert [prompt for prompt, _ in fake.seen[1:]] == [
        [{"role": "user", "content": "hello"}, answer, {"role": "user", "content": "and then?"}],
        [{"role": "user", "content": "anew"}],
    ]
    assert result.stdout == "one two three\n" * 3


def test_chat_ends_with_its_input_and_keeps_the_system_message_over_a_reset(fake):
    result = run("chat", "--system", "be brief", input="/reset\nhello\n")
    assert result.exit_code == 0
    assert fake.seen[0][0] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_chat_tells_an_unknown_command(fake):
    assert "no such command" in run("chat", input="/nonsense\n").stderr
    assert not fake.seen


def conversation(engine, **sampling):
    opened = options.OpenedEngine(engine, None, "float32", {}, 0.0, 0.0, engine.params)
    return Conversation(opened, SamplingParams(**sampling), None, stats=False)


def test_ctrl_c_stops_the_answer_and_not_the_chat(capsys):
    def press(engine):
        if engine.stats.num_steps == 1:
            os.kill(os.getpid(), signal.SIGINT)

    engine = FakeEngine(before_step=press)
    talk = conversation(engine)
    before = signal.getsignal(signal.SIGINT)
    talk.say("hello")
    assert engine.aborted == ["r0"]
    assert talk.messages[-1] == {"role": "assistant", "content": "one two "}
    assert "stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    engine.before_step = None
    talk.say("go on")
    assert talk.messages[-1] == {"role": "assistant", "content": "one two three"}


def test_ctrl_c_twice_leaves_a_step_that_hangs():
    def press(engine):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        conversation(FakeEngine(before_step=press)).say("hello")


def test_chat_tells_when_the_context_is_full_and_goes_on(capsys):
    talk = conversation(FakeEngine(max_model_len=7))
    talk.say("too long")
    error = capsys.readouterr().err
    assert "max_model_len is 7" in error
    assert "/reset" in error
    assert talk.messages == []


def test_chat_tells_which_limit_cut_an_answer(capsys):
    conversation(FakeEngine(), max_tokens=2).say("hello")
    assert "--max-tokens 2" in capsys.readouterr().err


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.json"
    item = {"prompt": [1, 2, 3], "max_tokens": 3}
    path.write_text(json.dumps({"ignore_eos": True, "greedy": True, "w1": [item], "w2": [item, item]}))
    return path


def test_bench_prints_a_table_and_writes_json(fake, workload, tmp_path):
    result = run("bench", "throughput", "--workload", workload, "--rounds", 3, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    for label in ("output tokens/s", "TTFT p50/p90/p99 ms", "padding waste", "KV utilisation minimum", "preemptions"):
        assert label in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["warm_up_seconds"] == 1.5
    assert written["workloads"].keys() == {"w1", "w2"}
    assert len(written["workloads"]["w2"]["rounds"]) == 3
    median = written["workloads"]["w2"]["median"]
    assert median["num_output_tokens"] == 6
    assert median["num_steps"] == 3
    assert median["padding"] == pytest.approx(1 / 3)
    assert median["kv_utilization_mean"] == pytest.approx(3 / 16)
    assert median["kv_utilization_min"] == pytest.approx(3 / 16)
    assert median["num_compiles"] == 0
    assert median["ttft"].keys() >= {"p50", "p90", "p99"}
    assert all(sampling.ignore_eos and sampling.temperature == 0 for _, sampling in fake.seen)


def test_bench_latency_runs_one_request_at_a_time(fake, workload, tmp_path):
    most = []
    fake.before_step = lambda engine: most.append(len(engine.running))
    run("bench", "latency", "--workload", workload, "--name", "w2", "--json", tmp_path / "out.json")
    assert set(most) == {1}
    median = json.loads((tmp_path / "out.json").read_text())["workloads"]["w2"]["median"]
    assert (median["num_steps"], median["kv_utilization_min"]) == (6, pytest.approx(2 / 16))


def test_bench_sampler_measures_each_kind_of_draw(tmp_path):
    model = pathlib.Path(__file__).parent / "data" / "checkpoints" / "llama"
    flags = ["--model", model, "--rows", 4, "--rounds", 1, "--warm-up", "no", "--json", tmp_path / "out.json"]
    result = run("bench", "sampler", *flags)
    assert result.exit_code == 0, result.output
    costs = json.loads((tmp_path / "out.json").read_text())["costs"]
    assert [cost["kind"] for cost in costs] == ["greedy", "filters", "penalties", "logprobs 5"]  # it has no tokenizer
    assert all(cost["seconds"] > 0 and cost["num_rows"] == 4 and cost["vocab_size"] == 320 for cost in costs)
    assert "sampler's share" in result.output and "logprobs 5" in result.output


def test_bench_runs_only_the_named_workloads(fake, workload):
    run("bench", "throughput", "--workload", workload, "--name", "w2")
    assert len(fake.seen) == 2


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("not json", "is not JSON"),
        ('{"w1": []}', "workload w1 has no requests"),
        ("[1]", "object of workloads"),
        ('{"greedy": false, "w1": []}', "greedy must be true"),
        ('{"w9": []}', "no workload w1; it holds: w9"),
        ('{"w1": [{"prompt": "text", "max_tokens": 3}]}', "w1[0]"),
        ('{"w1": [{"prompt": [1], "max_tokens": 0}]}', "max_tokens"),
    ],
)
def test_bench_tells_what_is_wrong_with_a_workload(fake, tmp_path, content, part):
    path = tmp_path / "workload.json"
    path.write_text(content)
    result = run("bench", "throughput", "--workload", path, "--name", "w1")
    assert result.exit_code == 2
    assert part in " ".join(result.stderr.split())


def test_env_tells_versions_devices_and_kernels():
    result = run("env", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["jpaged"] == jpaged.__version__
    assert facts["devices"][0]["platform"] == facts["backend"] == "cpu"
    assert facts["kernel_implementation"] == "xla"
    text = run("env").stdout
    assert facts["packages"]["jax"] in text
    assert "kernels" in text


def test_every_public_name_exists():
    assert sorted(jpaged.__all__) == sorted(jpaged._HOMES)
    for name in jpaged.__all__:
        assert getattr(jpaged, name) is not None
    assert set(jpaged.__all__) <= set(dir(jpaged))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = jpaged.nonsense


@pytest.mark.model
def test_the_installed_command_answers_with_the_real_model(small_model):
    command = [sys.executable, "-m", "jpaged.cli", "generate", "--model", small_model, "--max-model-len", "128"]
    command += ["--max-num-batched-tokens", "64", "-m", "12", "What is the capital of France?"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "tokens/s" in result.stderr


@pytest.mark.model
def test_bench_on_the_real_model_compiles_nothing_after_warm_up(small_model, workload, tmp_path):
    command = [sys.executable, "-m", "jpaged.cli", "bench", "throughput", "--workload", workload]
    command += ["--model", small_model, "--max-model-len", "64", "--max-num-seqs", "2"]
    command += ["--max-num-batched-tokens", "16", "--json", tmp_path / "out.json"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for found in json.loads((tmp_path / "out.json").read_text())["workloads"].values():
        assert found["median"]["num_compiles"] == 0
        assert found["median"]["kv_utilization_mean"] > 0
