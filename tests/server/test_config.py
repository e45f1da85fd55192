"""The YAML file of a server, and what the command line says in the place of it."""

from __future__ import annotations

import importlib
from pathlib import Path

import click.testing
import pytest

from jpaged.cli import main
from jpaged.host.config import EngineConfig
from jpaged.server.config import PYTHON_ONLY, ServerConfig, read_config

REPO = Path(__file__).parents[2]
OURS = sorted(path for path in (REPO / "configs").glob("*.yaml") if path.name != "kubernetes.yaml")
serve_module = importlib.import_module("jpaged.cli.serve")


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def run(*words: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, words)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_the_files_that_come_along_are_good_and_say_how_they_are_used(path, monkeypatch):
    monkeypatch.setenv("MODEL", "smollm2")
    found = run("config", "check", str(path))
    assert found.exit_code == 0, found.output
    first, second, *_ = path.read_text().splitlines()
    assert f"configs/{path.name}" in first and second.startswith("# ")


def test_a_file_is_read_with_the_options_before_it(written):
    path = written("model: a\nport: 1\nengine:\n  max_num_seqs: 4\n  page_size: 8\n")
    config = read_config(path, {"port": 2, "engine": {"page_size": 32}})
    assert (config.model, config.port, config.engine) == ("a", 2, {"max_num_seqs": 4, "page_size": 32})
    assert config.engine_config.max_num_seqs == 4 and config.engine_config.prompt_logprobs


def test_every_option_of_the_engine_may_stand_in_a_file(written):
    fields = set(EngineConfig.__dataclass_fields__) - PYTHON_ONLY
    values = {name: getattr(EngineConfig(), name) for name in fields}
    text = "\n".join(f"  {name}: {'null' if value is None else str(value).lower()}" for name, value in values.items())
    assert read_config(written(f"engine:\n{text}\n")).engine_config == EngineConfig()


def test_variables_of_the_environment_are_put_in(written, monkeypatch):
    monkeypatch.setenv("WHERE", "/models")
    monkeypatch.setenv("PORT", "9000")
    path = written("model: ${WHERE}/x\nport: ${PORT}\nhost: ${ABSENT:-0.0.0.0}\nroot_path: $$a\n")
    config = read_config(path)
    assert (config.model, config.port, config.host, config.root_path) == ("/models/x", 9000, "0.0.0.0", "$a")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("modle: a", "did you mean model"),
        ("max_num_seqs: 4", "under 'engine:'"),
        ("engine: {max_num_seq: 4}", "did you mean max_num_seqs"),
        ("engine: {page_size: 0}", "page_size must be"),
        ("engine: [1]", "engine"),
        ("engine: {logits_processor: f}", "Python program"),
        ("port: high", "port"),
        ("port: 70000", "port"),
        ("port: true", "port"),
        ("request_timeout: 0", "request_timeout"),
        ("api_keys: [5]", "api_keys"),
        ("api_keys: ['']", "api_keys"),
        ("api_key_file: /absent", "there is no file"),
        ("max_body: many", "max_body"),
        ("tool_format: xml", "tool_format"),
        ("model: ${ABSENT}", "ABSENT"),
        ("model: a\nmodel: b", "twice"),
        ("[1, 2]", "keys and values"),
        ("a: [", "no YAML"),
        ("ssl_certfile: pyproject.toml", "go together"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_sentence(written, text, told, monkeypatch):
    monkeypatch.chdir(REPO)
    found = run("config", "check", str(written(text)))
    assert found.exit_code == 2 and told in found.output and "config.yaml" in found.output
    assert len(found.output.strip().splitlines()) == 1, found.output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("modle: a\nprot: 1\nmax_num_seqs: 3", ["did you mean model", "did you mean port", "under 'engine:'"]),
        ("port: high\nmax_n: 0\nlog_level: loud", ["port: ", "max_n: ", "log_level: "]),
        ("prot: 1\nport: high\nengine: {page_size: 0}", ["did you mean port", "port: ", "page_size must"]),
        ("engine: {max_num_seq: 1, warmup: true, page_size: 0}", ["max_num_seqs", "warm_up", "page_size must"]),
    ],
)
def test_all_that_is_wrong_with_a_file_is_said_at_once(written, text, told):
    with pytest.raises(ValueError) as error:
        read_config(written(text))
    parts = str(error.value).split("; ")
    assert len(parts) == 3 and all(one in part for one, part in zip(told, parts, strict=True))


def test_an_empty_file_has_the_defaults(written):
    assert read_config(written("")) == ServerConfig() == read_config(written("engine:\n"))


def test_every_key_is_an_option_of_the_command(written, monkeypatch):
    seen = []
    monkeypatch.setattr("jpaged.server.serve.serve", lambda config: seen.append(config) or 0)
    options = {option.name for option in serve_module.serve.params}
    names = {name for name in ServerConfig.model_fields if name != "engine"}
    names |= {f"engine_{name}" for name in set(EngineConfig.__dataclass_fields__) - PYTHON_ONLY}
    assert options == names | {"file", "config"}
    path = written("model: a\npages: true\nengine: {deterministic: true, prefix_caching: true}\n")
    words = ["--port", "5", "--api-key", "k", "--no-pages", "--no-deterministic", "--no-prefix-caching"]
    assert run("serve", str(path), *words, "--max-num-seqs", "3", "--request-timeout", "2").exit_code == 0
    (config,) = seen
    assert (config.model, config.port, config.api_keys, config.pages) == ("a", 5, ["k"], False)
    engine = config.engine_config
    assert (engine.deterministic, engine.prefix_caching, engine.max_num_seqs) == (False, False, 3)
    assert config.request_timeout == 2


def test_a_file_is_given_once(written):
    path = str(written(""))
    assert run("serve", path, "--config", path).exit_code == 2


def test_checking_a_file_does_not_import_jax():
    import subprocess
    import sys

    code = (
        "import sys; from jpaged.server.config import read_config; read_config('configs/smollm2.yaml');"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
