#!/usr/bin/env bash
# Trains GPT-2 under OSDP in two stages of two or more data-parallel processes each; with a multiple of eight
# processes two of them compute each layer together:
#   NPROC=8 bash scripts/gpt2_3d.sh --layers 36 --hidden 1280 --heads 20 --seq 1024 --memory-limit 40GiB
# --pp, --dp and --tp choose otherwise; four processes on CPU, all GPUs where there are four or more.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
NPROC="${NPROC:-$(num_processes)}"
processes="$((NPROC * ${NNODES:-1}))"
if [ "$processes" -lt 4 ]; then NPROC=4 processes=4; fi
launch --strategies OSDP --pp 2 --tp "$((processes % 8 ? 1 : 2))" "$@"
