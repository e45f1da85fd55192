#!/usr/bin/env bash
# Sets jpaged up for development in .venv, then lints, checks types and runs the tests:
#
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

venv="$REPO/.venv"
extras="$(cuda_extra)"
ensure_venv "$venv" "dev${extras:+,$extras}"
"$venv/bin/python" "$REPO/scripts/fetch_small_model.py" >/dev/null

cd "$REPO"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
