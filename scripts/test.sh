#!/usr/bin/env bash
# Lint, types and tests, two files at a time, then those that measure time by themselves. Arguments go to pytest;
# -m slow runs the tests that take more than a minute.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
# As modules: beside a Python that brings torch, some of them may be its own and have no command here.
python -m ruff check .
python -m ruff format --check .
python -m mypy

if [[ " $* " == *" -m "* ]]; then
    python -m pytest -q "$@"
    exit
fi

# Of the files that were asked for one of the two may have no test.
some() { "$@" || [ $? -eq 5 ]; }

some python -m pytest -q -m "not slow and not alone" -n 2 --dist loadfile "$@"
some python -m pytest -q -m "alone and not slow" "$@"
