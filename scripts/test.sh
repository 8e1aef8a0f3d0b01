#!/usr/bin/env bash
# Lint, types and tests, two files at a time. Arguments go to pytest; -n 0 runs one after the other, and -m slow
# the tests that take more than a minute.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
ruff check .
ruff format --check .
mypy
pytest -q -m "not slow" -n 2 --dist loadfile "$@"
