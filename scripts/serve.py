"""Serves a model to OpenAI clients: `python scripts/serve.py configs/smollm2.yaml`, as `jpaged serve` does.

Options go before what the file says: `--port 9000`, `--max-num-seqs 32`; `--help` lists them.
"""

from __future__ import annotations

import sys

from jpaged.cli import main

main(["serve", *sys.argv[1:]], prog_name="jpaged")
