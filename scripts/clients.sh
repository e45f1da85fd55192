#!/usr/bin/env bash
# Runs clients that others have written against the server, unmodified: the openai packages for Python and JavaScript,
# litellm, langchain-openai, instructor, lm-eval and schemathesis. They are installed into .venv-clients and
# tests/clients/node_modules, and talk by HTTP to a server that is started from .venv.
#
#   bash scripts/clients.sh [pytest arguments]
#
# Needs Node 20 or newer with npm. JPAGED_PYTHON names a Python that has jpaged, in the place of .venv's.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

clients="$REPO/tests/clients"
venv="$REPO/.venv-clients"

if ! { command -v npm && node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)'; } >/dev/null 2>&1; then
  say "The client for JavaScript needs Node 20 or newer with npm, for example: apt install nodejs npm"
  exit 1
fi
# It is quick when all is there.
npm install --silent --no-audit --no-fund --no-package-lock --prefix "$clients" >&2 &
npm=$!
[ -n "${JPAGED_PYTHON:-}" ] || ensure_venv "$REPO/.venv" ""
ensure_venv_of "$venv" "$clients/requirements.txt"
wait "$npm"

cd "$clients"
JPAGED_PYTHON="${JPAGED_PYTHON:-$REPO/.venv/bin/python}" exec "$venv/bin/python" -m pytest --durations 5 "$@"
