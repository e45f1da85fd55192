"""Starts the server that the clients talk to, as users do. Nothing here needs JAX: only HTTP goes between them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPO = Path(__file__).parents[2]
PYTHON = os.environ.get("JPAGED_PYTHON", str(REPO / ".venv" / "bin" / "python"))  # the one that has jpaged
KEY = "sk-clients"
# Few shapes: each is compiled when a request is the first to need it.
CONFIG = """
model: {model}
served_model_names: [tiny, org/tiny]
port: 0
api_keys: [{key}]
max_waiting: 60
max_n: 100
engine:
  max_num_seqs: 4
  max_num_batched_tokens: 64
  max_model_len: {max_model_len}
  page_size: 16
  num_pages: 200
  warm_up: false
  check_integrity: true
"""


class Server(NamedTuple):
    url: str
    key: str
    references: dict[str, Any]  # texts to what make_model.py has found of their tokens

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """With so much to do that it takes no other request of 40 samples."""
        body = {"prompt": "A", "n": 40, "max_tokens": 100, "ignore_eos": True, "stream": True}
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.v1}/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60):
            yield

    def num_running(self) -> float:
        lines = self.get("/metrics").decode().splitlines()
        (value,) = (line.split()[-1] for line in lines if line.startswith("jpaged_sequences_running"))
        return float(value)

    def wait_until_idle(self, seconds: float = 10) -> None:
        end = time.monotonic() + seconds
        while self.num_running():
            assert time.monotonic() < end, "the work of a client that has left goes on"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make = [PYTHON, str(REPO / "tests" / "clients" / "make_model.py"), str(folder)]
    subprocess.run(make, check=True, env=environment())
    return folder


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    with serving(model, max_model_len=512) as server:
        yield server


@pytest.fixture(scope="session")
def server_of_short_texts(model: Path) -> Iterator[Server]:
    """For requests that nobody has thought about: some ask for texts without an end."""
    with serving(model, max_model_len=32) as server:
        yield server


def environment() -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(REPO), "JPAGED_API_KEY": ""}


@contextlib.contextmanager
def serving(model: Path, max_model_len: int) -> Iterator[Server]:
    """A server, as a process of its own. It must end well, and without having logged an error."""
    config = model.with_name(f"{max_model_len}.yaml")
    config.write_text(CONFIG.format(model=model, key=KEY, max_model_len=max_model_len))
    command = [PYTHON, str(REPO / "scripts" / "serve.py"), str(config)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    log, url = [], ""
    for line in process.stderr:
        log.append(line)
        url = line.partition(" url=")[2].split()[0] if " url=" in line else url
        if " ready" in line:
            break
    else:
        pytest.exit("the server did not start:\n" + "".join(log), returncode=3)
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        yield Server(url, KEY, json.loads((model / "references.json").read_text()))
    finally:
        process.terminate()
        code = process.wait(60)
        reader.join()
        process.stderr.close()
    errors = [line for line in log if " ERROR" in line or "Traceback" in line]
    if errors:
        sys.stderr.write("".join(log))
    assert code == 0 and not errors, f"the server ended with {code}; errors: {errors}"


def joined(parts: Any) -> str:
    return "".join(part or "" for part in parts)
