#!/usr/bin/env bash
# Sets jpaged up in .venv beside this folder, brings a small model, and streams its answer to a prompt:
#
#   bash scripts/quickstart.sh ["a prompt"]
#
# The second run needs no network.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

prompt="${1:-Why is the sky blue? Answer in three sentences.}"
venv="$REPO/.venv"

ensure_venv "$venv" "$(cuda_extra)"
"$venv/bin/python" "$REPO/scripts/fetch_small_model.py" >/dev/null
exec "$venv/bin/jpaged" generate --model smollm2 -- "$prompt"
