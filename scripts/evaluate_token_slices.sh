#!/usr/bin/env bash
# Runs the slices that solve_token_slices.sh found, beside what was predicted; --help lists the flags.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m examples.evaluate_token_slices "$@"
