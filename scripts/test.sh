#!/usr/bin/env bash
# The whole test suite in .venv, in two processes; arguments go to pytest: bash scripts/test.sh -k resume -n 0
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
python -c 'import paddle2onnx' 2>/dev/null || echo "paddle2onnx does not run on $(python --version): the ONNX tests are skipped."
for program in chromium chromedriver; do
    command -v $program >/dev/null || echo "$program is not installed: the tests in a browser are skipped."
done
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
