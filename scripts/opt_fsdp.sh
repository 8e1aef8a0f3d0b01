#!/usr/bin/env bash
# Trains OPT under FSDP2: the baseline of opt_osdp.sh, with the same flags, batch and data.
# Where GPUs are it has the width of OPT-30B and 8 of its blocks, on CPU it is small; flags change either:
#   NPROC=8 bash scripts/opt_fsdp.sh --layers 48 --batch 2 --memory-limit 70GiB
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
shape=()
if [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -gt 0 ]; then
    shape=(--layers 8 --hidden 7168 --heads 56 --seq 1024)
fi
launch --family opt --strategies FSDP2 "${shape[@]}" "$@"
