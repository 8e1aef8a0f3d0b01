#!/usr/bin/env bash
# Trains GPT-2 under OSDP in two stages, each sharded by its own plan where there are more than two processes:
#   NPROC=8 bash scripts/pipeline_gpt2.sh --pp 4 --layers 48 --hidden 1600 --heads 25 --seq 1024 --memory-limit 40GiB
# --schedule, --microbatches and --batch (samples of a microbatch) say how; two processes on CPU, all GPUs otherwise.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
NPROC="${NPROC:-$(num_processes)}"
if [ "$((NPROC * ${NNODES:-1}))" -lt 2 ]; then NPROC=2; fi
launch --strategies OSDP --pp 2 "$@"
