#!/usr/bin/env bash
# Builds the documentation site into site/; a warning is an error. Arguments go to mkdocs build.
# To look at it: python -m http.server --directory site
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" docs
NO_MKDOCS_2_WARNING=1 python -W ignore -m mkdocs build --strict "$@"
echo "The site is in site/; to look at it: python -m http.server --directory site"
