"""Hub ids: resolved by huggingface_hub, from its cache when offline, with an error that says what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import errors

from jpaged.checkpoint import CheckpointError, load

LLAMA = Path(__file__).parents[1] / "data" / "checkpoints" / "llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """The calls of snapshot_download, which finds the small Llama under every name."""
    calls: list[dict] = []

    def snapshot_download(repo_id, **options):
        calls.append({"repo_id": repo_id, **options})
        return str(LLAMA)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_id_and_revision_are_asked_of_the_hub(asked):
    params = load("some-org/tiny.llama_2", revision="v1.0")
    jax.tree.map(np.testing.assert_array_equal, params.weights, load(LLAMA).weights)
    assert [(call["repo_id"], call["revision"]) for call in asked] == [("some-org/tiny.llama_2", "v1.0")]


def test_only_what_a_checkpoint_needs_is_downloaded(asked):
    load("org/name")
    allow, ignore = asked[0]["allow_patterns"], asked[0]["ignore_patterns"]
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"]
    unwanted = ["pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "model.gguf", "x.py"]
    kept = huggingface_hub.utils.filter_repo_objects([*wanted, *unwanted], allow_patterns=allow, ignore_patterns=ignore)
    assert list(kept) == wanted


def test_a_path_that_exists_is_not_asked_of_the_hub(asked, tmp_path, monkeypatch):
    shutil.copytree(LLAMA, tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    load("org/name")
    assert not asked


def make_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # the constructors want an HTTP response
    Exception.__init__(error, "as the hub says it")
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.RepositoryNotFoundError, ["'org/name'", "not on the hub", "hf auth login"]),
        (errors.GatedRepoError, ["'org/name'", "hf auth login"]),
        (errors.RevisionNotFoundError, ["'org/name'", "no revision 'v9'"]),
        (errors.LocalEntryNotFoundError, ["'org/name'", "'v9'", "not in the local hub cache", "connect"]),
        (errors.OfflineModeIsEnabled, ["cannot be reached"]),
        (ConnectionError, ["cannot be reached"]),
    ],
)
def test_what_the_hub_cannot_give_is_an_error_with_a_cure(monkeypatch, kind, words):
    def snapshot_download(*_, **__):
        raise make_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as caught:
        load("org/name", revision="v9")
    for word in words:
        assert word in str(caught.value)


def test_offline_the_cache_serves_what_it_has_and_the_rest_is_a_clear_error(tmp_path):
    repository = tmp_path / "hub" / "models--org--cached"
    shutil.copytree(LLAMA, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


OFFLINE = f"""
from jpaged.checkpoint import load
assert load("org/cached").config.d_model == 64
assert load("org/cached", revision="{COMMIT}").config.d_model == 64
for options in [dict(path_or_id="org/absent"), dict(path_or_id="org/cached", revision="other")]:
    try:
        load(**options)
    except ValueError as error:
        assert "HF_HUB_OFFLINE is set" in str(error) and options["path_or_id"] in str(error), error
    else:
        raise AssertionError(options)
"""
