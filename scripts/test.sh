#!/usr/bin/env bash
# Lint, types and tests, three at a time: some wait for others, on two cores as well. Arguments go to pytest; -m slow
# runs the tests that take more than a minute, -m alone those that measure time, for a machine that does nothing else.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
# Where no bytecode is written each worker, rank and program compiles for itself what it imports.
unset PYTHONDONTWRITEBYTECODE
# As modules: beside a Python that brings torch, some of them may be its own and have no command here.
python -m ruff check .
python -m ruff format --check .
python -m mypy

if [[ " $* " == *" -m "* ]]; then
    python -m pytest -q "$@"
    exit
fi

python -m pytest -q -m "not slow and not alone" -n 3 --dist worksteal "$@"
