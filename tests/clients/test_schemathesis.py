"""`schemathesis`, which reads the server's own description of its endpoints and tries what it allows, and what not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import Server

# What the description cannot say is refused, too: a role that the model's template has no place for, more tokens than
# its context has.
LEFT_OUT = ["positive_data_acceptance"]


def test_no_request_is_more_than_the_server_can_take(server_of_short_texts: Server, tmp_path: Path):
    server = server_of_short_texts
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json", "--no-color"),
        *("--header", f"Authorization: Bearer {server.key}", "--phases", "examples,coverage,fuzzing"),
        *("--exclude-checks", ",".join(LEFT_OUT), "--max-examples", "10", "--max-time", "20"),
        *("--request-timeout", "60", "--workers", "4", "--seed", "1"),
    ]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stdout[-10_000:] + found.stderr[-2000:]
    assert "Selected: 12/12" in found.stdout and " passed" in found.stdout, found.stdout
