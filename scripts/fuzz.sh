#!/usr/bin/env bash
# Tries the checks of tests/data/test_boundaries.py on thousands of new inputs (tens of minutes); arguments go to pytest.
# What fails is kept in .hypothesis/ and tried first the next time.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
python -m pytest tests/data/test_boundaries.py --hypothesis-profile=fuzz --timeout=3600 "$@"
