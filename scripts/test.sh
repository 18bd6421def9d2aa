#!/usr/bin/env bash
# Everything that must hold: format, lint, types, import arrows, tests; the cheapest first. Sets itself up.
#
#   ./scripts/test.sh                 # all
#   ./scripts/test.sh tests/plan -k vrsp      # pytest alone, with these arguments
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$(realpath -m -- "${VENV:-$ROOT/.venv}")"
export VENV
"$ROOT/scripts/setup_venv.sh"
cd "$ROOT"
export PATH="$VENV/bin:$PATH"
# One thread a process: the tests start several processes on few cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

run() {
  printf '\n+ %s\n' "$*"
  "$@"
}

if [ "$#" -gt 0 ]; then
  run python -m pytest "$@"
  exit
fi

run python -m ruff check .
run python -m ruff format --check .
run python -m mypy
run python -m pytest -q tests/test_imports.py

# Cheapest first, then whatever else there is.
FOLDERS=(tests/plan tests/data tests/simulator tests/cli tests/executor tests/integration)
for folder in tests/*/; do
  folder="${folder%/}"
  case " ${FOLDERS[*]} " in *" $folder "*) ;; *) FOLDERS+=("$folder") ;; esac
done
TESTS=(tests/test_*.py)
for folder in "${FOLDERS[@]}"; do
  if compgen -G "$folder/**/test_*.py" >/dev/null || compgen -G "$folder/test_*.py" >/dev/null; then TESTS+=("$folder"); fi
done
run python -m pytest -q --durations=10 "${TESTS[@]}"
