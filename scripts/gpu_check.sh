#!/usr/bin/env bash
# Does ppattn keep its promises on this device? bash scripts/gpu_check.sh [--output DIR]; see scripts/studies/gpu_check.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=/dev/null
[ -f .venv/bin/activate ] && source .venv/bin/activate
python -m scripts.studies.gpu_check "$@"
