#!/usr/bin/env bash
# Trains a small GPT three times on this machine's CPU: Ulysses, Libra with the paper's placer, Libra. Prints
# one table and writes two pictures. Sets itself up; about 6 minutes the first time, on two cores.
#
#   ./scripts/quickstart.sh                   # -> quickstart_out/
#   ./scripts/quickstart.sh --out /tmp/libra
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$(realpath -m -- "${VENV:-$ROOT/.venv}")"
export VENV
"$ROOT/scripts/setup_venv.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV/bin/python" -W ignore "$ROOT/scripts/quickstart/main.py" "$@"
