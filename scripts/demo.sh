#!/usr/bin/env bash
# Plans and trains a byte-level GPT-2 on real text with OSDP, beside FSDP2, DDP and a single process.
# Flags are those of examples/train_text.py; NPROC sets the number of processes.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
# On one device there is nothing to shard: two processes on the CPU then.
NPROC="${NPROC:-$(num_processes)}"
if [ "$NPROC" -lt 2 ]; then NPROC=2; fi
launch --strategies OSDP FSDP2 DDP --reference "$@" --json "$ROOT/runs/demo.json"
python -m examples.check_demo "$ROOT/runs/demo.json"
