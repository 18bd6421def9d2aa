#!/usr/bin/env bash
# Make --context-parallel-impl a native flag of your own Megatron tree; see patches/README.md.
#
#   ./scripts/apply_patches.sh TREE           # patch; a second time changes nothing
#   ./scripts/apply_patches.sh TREE --diff    # print the patch, change nothing
#   ./scripts/apply_patches.sh TREE --undo    # take it back
#
# TREE holds megatron/: the root of a Megatron-LM checkout, or a site-packages folder.
set -euo pipefail

PYTHON="${PYTHON:-python3}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "apply_patches.sh: $PYTHON is no Python >= 3.10; set PYTHON to the one that runs Megatron." >&2
  exit 2
fi
exec "$PYTHON" "$ROOT/patches/apply.py" "$@"
