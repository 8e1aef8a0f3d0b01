#!/usr/bin/env bash
# Fits what collect_token_latency.sh measured and finds the best slices; --help lists the flags.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m examples.solve_token_slices "$@"
