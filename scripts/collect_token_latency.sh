#!/usr/bin/env bash
# Measures slices of sequences on one stage, forward and backward; --help lists the flags.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m examples.collect_token_latency "$@"
