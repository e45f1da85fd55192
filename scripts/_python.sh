# Sourced by the other scripts: finds a Python and keeps the virtual environments beside this folder.
#
#   find_python               prints the path of a Python >= 3.12, or says what to install and fails
#   ensure_venv DIR EXTRAS [REQUIREMENT...]
#                             makes DIR a virtual environment with jpaged (editable), its EXTRAS ("", "dev", "dev,cuda")
#                             and the requirements. It is cheap when nothing changed, and repairs what an interrupted
#                             run left behind: the stamp that says "complete" is written last.
#   ensure_venv_of DIR FILE   the same with the requirements in FILE, without jpaged

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

say() { printf '%s\n' "$*" >&2; }

_is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
  local name path
  for name in python3.14 python3.13 python3.12 python3 python; do
    # A pyenv shim can be on PATH for a version that is not active: run each candidate, don't trust its name.
    path="$(command -v "$name" 2>/dev/null)" || continue
    if _is_new_enough "$path"; then
      "$path" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  for path in "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.*/bin/python3; do
    if _is_new_enough "$path"; then
      printf '%s\n' "$path"
      return 0
    fi
  done
  if command -v uv >/dev/null 2>&1 && path="$(uv python find '>=3.12' 2>/dev/null)" && _is_new_enough "$path"; then
    printf '%s\n' "$path"
    return 0
  fi
  say "jpaged needs Python 3.12 or newer, and none was found on PATH, under pyenv or through uv."
  say "Install one, for example with one of these, and run this script again:"
  say "  pyenv install 3.12        (https://github.com/pyenv/pyenv)"
  say "  uv python install 3.12    (https://docs.astral.sh/uv)"
  say "  apt install python3.12 python3.12-venv, or: brew install python@3.12"
  return 1
}

_stamp() {  # what the environment was made from: a change of any of it means installing again
  printf '%s\n' "$REPO" "$@"
  cksum <"$REPO/pyproject.toml"
}

_is_complete() {  # DIR EXTRAS [REQUIREMENT...]
  local venv="$1" stamp="$1/jpaged-installed${2:+-$2}"
  shift
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(_stamp "$@")" ] && _is_new_enough "$venv/bin/python"
}

_new_venv() {  # DIR: an empty environment, unless there is one that works
  local venv="$1" python
  # Half an environment, one whose Python is gone, and one that was moved are made anew.
  if ! { [ "$(cat "$venv/jpaged-made" 2>/dev/null)" = "$venv" ] && _is_new_enough "$venv/bin/python"; }; then
    python="$(find_python)" || return 1
    say "Making ${venv#"$REPO/"} with $("$python" --version)"
    rm -rf "$venv"
    if ! "$python" -m venv "$venv" >&2; then
      rm -rf "$venv"
      say "$python cannot make virtual environments. On Debian and Ubuntu, its venv package is missing: python3-venv,"
      say "or the one named after the version, such as python3.12-venv."
      return 1
    fi
    printf '%s\n' "$venv" >"$venv/jpaged-made"
  fi
}

ensure_venv() {
  local venv="$1" extras="$2" target stamp
  shift 2
  _is_complete "$venv" "$extras" "$@" && return 0
  # An environment for development has all that a user's needs.
  [ $# = 0 ] && _is_complete "$venv" "dev${extras:+,$extras}" && return 0
  stamp="$venv/jpaged-installed${extras:+-$extras}"
  rm -f "$stamp"

  _new_venv "$venv" || return 1
  target="$REPO${extras:+[$extras]}"
  say "Installing jpaged${extras:+[$extras]} ${*}"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --editable "$target" "$@" >&2 || {
    say "Installing failed. What was installed so far is kept; run the script again to go on."
    return 1
  }
  _stamp "$extras" "$@" >"$stamp.$$" && mv -f "$stamp.$$" "$stamp"
}

ensure_venv_of() {  # DIR FILE: makes DIR an environment with the requirements in FILE, and without jpaged
  local venv="$1" file="$2" stamp="$1/requirements-installed" wanted
  wanted="$(cksum <"$file")"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && _is_new_enough "$venv/bin/python" && return 0
  rm -f "$stamp"
  _new_venv "$venv" || return 1
  say "Installing ${file#"$REPO/"}"
  # Most of what lies in them is never imported: what is, is compiled then.
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile -r "$file" >&2 || {
    say "Installing failed. What was installed so far is kept; run the script again to go on."
    return 1
  }
  printf '%s\n' "$wanted" >"$stamp"
}

cuda_extra() {  # the extra that fits this machine's NVIDIA driver; nothing without one
  local driver
  driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)" || return 0
  case "${driver%%.*}" in
    '' | *[!0-9]*) ;;
    *) if [ "${driver%%.*}" -ge 580 ]; then echo cuda; else echo cuda12; fi ;;
  esac
}

oldest_requirements() {  # PYTHON: the oldest releases that pyproject.toml allows, a word each
  "$1" - "$REPO/pyproject.toml" <<'PYTHON'
import sys
import tomllib

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
bounds = [name.replace(">=", "==") for name in project["dependencies"]]
print(*bounds, *(name.replace("jax==", "jaxlib==") for name in bounds if name.startswith("jax==")))
PYTHON
}
