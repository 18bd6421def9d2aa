#!/usr/bin/env bash
# Makes the project's virtual environment once: a Python 3.12 or 3.13, the versions of constraints.txt,
# and this checkout in editable form. Prints nothing and takes no time when it is already there.
#
#   ./scripts/setup_venv.sh                       # -> .venv
#   PYTHON=/opt/python/bin/python3.12 VENV=/tmp/libra-venv ./scripts/setup_venv.sh
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$(realpath -m -- "${VENV:-$ROOT/.venv}")"
PYTHON="${PYTHON:-}"
EXTRAS="megatron,plots,parquet,test,dev"
STAMP="$VENV/libra-stamp"

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# What the environment was made from: another content or place means that it must be made again.
fingerprint() {
  { printf '%s\n' "$ROOT" "$VENV" "$EXTRAS"; cat "$ROOT/constraints.txt" "$ROOT/setup.py"; } | sha256sum | cut -d' ' -f1
}

# Can this command make a virtual environment, with a Python that the pinned megatron-core has wheels for?
is_usable() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

candidates() {
  if [ -n "$PYTHON" ]; then
    printf '%s\n' "$PYTHON"
    return
  fi
  local version home
  printf '%s\n' python3.12 python3 python3.13
  home="${PYENV_ROOT:-}"
  if [ -z "$home" ] && command -v pyenv >/dev/null; then home="$(pyenv root 2>/dev/null || true)"; fi
  home="${home:-$HOME/.pyenv}"
  for version in 3.12 3.13; do
    printf '%s\n' "$home/versions/$version"*/bin/python
  done
  if command -v uv >/dev/null; then
    uv python find --no-project '>=3.12,<3.14' 2>/dev/null || true
  fi
}

# Each candidate is run, not only looked up: a pyenv shim exists also for versions that are not selected.
find_python() {
  local candidate
  while IFS= read -r candidate; do
    if is_usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done < <(candidates)
  if [ -z "$PYTHON" ] && command -v uv >/dev/null; then
    say "No Python 3.12 found, asking uv for one"
    uv python install 3.12 >&2 && uv python find --no-project 3.12 && return
  fi
  say "error: no Python 3.12 or 3.13 with the modules venv and ensurepip (looked at: ${PYTHON:-python3.12, python3, pyenv, uv})."
  say "Ways out, any one of them:"
  say "  Debian 13 or Ubuntu 24.04:  apt-get install python3 python3-venv"
  say "  pyenv:                      pyenv install 3.12"
  say "  uv (pip install uv):        uv python install 3.12"
  say "  a Python elsewhere:         PYTHON=/path/to/python3.12 $0"
  exit 1
}

# Runs a step with its output in the log; shows the elapsed time, and the log's end when it fails.
step() {
  local title="$1" pid status=0 start=$SECONDS
  shift
  printf '+ %q' "$1" >>"$LOG"; printf ' %q' "${@:2}" >>"$LOG"; printf '\n' >>"$LOG"
  "$@" >>"$LOG" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  if [ -t 2 ]; then
    while kill -0 "$pid" 2>/dev/null; do
      printf '\r  %-52s %4d s' "$title" $((SECONDS - start)) >&2
      sleep 0.5
    done
    printf '\r' >&2
  fi
  wait "$pid" || status=$?
  trap - INT TERM
  if [ "$status" -ne 0 ]; then
    say ""
    say "error: '$title' failed (status $status); the end of $LOG:"
    tail -n 20 "$LOG" >&2
    say "The next run starts again from nothing. Behind a mirror or proxy, set pip's own options, such as PIP_INDEX_URL."
    exit 1
  fi
  printf '  %-52s %4d s\n' "$title" $((SECONDS - start)) >&2
}

# Removes what an interrupted or older run left, but never a directory that is no virtual environment.
clear_venv() {
  if [ -e "$VENV" ]; then
    if [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; then
      fail "$VENV exists and is no virtual environment; move it away or set VENV to another folder."
    fi
    say "Replacing $VENV, which is incomplete or made from other versions"
    rm -rf -- "$VENV"
  fi
}

make_venv() {
  local python
  python="$(find_python)"
  clear_venv
  say "Setting up $VENV with $("$python" --version 2>&1) (once; about 1.5 minutes, 5 GB)"
  mkdir -p "$VENV"
  : >"$VENV/pyvenv.cfg" # marks a half-made environment as ours until venv writes it
  LOG="$VENV/setup.log"
  step "virtual environment" "$python" -m venv "$VENV"
  local pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --constraint "$ROOT/constraints.txt")
  step "setuptools" "${pip[@]}" setuptools
  step "packages: torch $(pinned torch), megatron-core $(pinned megatron-core), ..." \
    "${pip[@]}" --no-build-isolation --editable "$ROOT[$EXTRAS]"
  fingerprint >"$STAMP"
}

pinned() { sed -n "s/^$1==//p" "$ROOT/constraints.txt"; }

is_ready() { [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint)" ]; }

if ! is_ready; then
  if command -v flock >/dev/null; then # two scripts started at once: one makes it, the other waits
    exec 9>"$VENV.lock"
    flock -n 9 || { say "Waiting for another run that sets up $VENV"; flock 9; }
  fi
  is_ready || make_venv
fi
