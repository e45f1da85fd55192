"""The `openai` package for JavaScript: `test_openai.mjs`, run by Node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from conftest import Server

HERE = Path(__file__).parent


def test_the_package_for_javascript_finds_what_it_expects(server: Server):
    environment = {**os.environ, "OPENAI_BASE_URL": server.v1, "OPENAI_API_KEY": server.key}
    command = ["node", "--test", "--test-reporter=spec", str(HERE / "test_openai.mjs")]
    found = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
