#!/usr/bin/env bash
# Compiles every GPU kernel, and whole steps, for H200 and A100 on a machine that needs neither, with the newest JAX and the
# oldest that pyproject.toml allows; prints a row for each and fails on a broken bound. Without arguments, the one kernel that
# JAX cannot interpret is interpreted by Triton too.
#
#   bash scripts/check_kernels.sh              everything; writes the table into docs/kernels.md
#   bash scripts/check_kernels.sh --quick      a representative part (any arguments go to scripts/check_kernels.py)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

check() {  # VENV [ARGUMENT...]: its JAX with the compiler for CUDA laid over it: no toolkit, no driver
  local python="$1/bin/python" version overlay packages
  shift
  packages=(absl-py nvidia-cuda-nvcc jax-triton==0.3.1 triton==3.6.0)
  version="$("$python" -c 'import jax; print(jax.__version__)')"
  overlay="$REPO/.venv-cuda/$version"
  if [ "$(cat "$overlay/complete" 2>/dev/null)" != "${packages[*]}" ]; then
    say "Installing the CUDA compiler for JAX $version"
    rm -rf "$overlay"
    "$python" -m pip install -qq --disable-pip-version-check --no-deps --target "$overlay" \
      "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" "${packages[@]}" >&2
    echo "${packages[*]}" >"$overlay/complete"
  fi
  say "JAX $version"
  PYTHONPATH="$overlay" "$python" "$REPO/scripts/check_kernels.py" --json "$REPO/.venv-cuda/$version.json" "$@" || failed=1
  results+=("$REPO/.venv-cuda/$version.json")
}

failed=0
results=()
ensure_venv "$REPO/.venv" dev
# shellcheck disable=SC2046  # one word a package
ensure_venv "$REPO/.venv-oldest" dev $(oldest_requirements "$REPO/.venv/bin/python")
check "$REPO/.venv" "$@"
# What differs between versions differs for one card already.
check "$REPO/.venv-oldest" "$@" $([ "${1:-}" = --quick ] && echo "--cards h200 --no-steps")
if [ $# = 0 ]; then
  say "The kernel in Triton itself, interpreted"
  version="$("$REPO/.venv-oldest/bin/python" -c 'import jax; print(jax.__version__)')"
  PYTHONPATH="$REPO/.venv-cuda/$version" TRITON_INTERPRET=1 JAX_PLATFORMS=cpu "$REPO/.venv-oldest/bin/python" -m pytest \
    -q "$REPO/tests/kernels/test_jax_triton.py" || failed=1
fi
if [ $# = 0 ] && [ "$failed" = 0 ]; then
  "$REPO/.venv/bin/python" "$REPO/scripts/check_kernels.py" --table "$REPO/docs/kernels.md" "${results[@]}"
fi
exit "$failed"
