#!/usr/bin/env bash
# Lint, types and tests. Arguments go to pytest; tests that take more than a minute run with: -m slow
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ruff check .
ruff format --check .
mypy
pytest -q -m "not slow" "$@"
