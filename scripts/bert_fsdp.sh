#!/usr/bin/env bash
# Trains BERT under FSDP2 over all processes: the baseline of the other bert_*.sh, with the same flags.
# BERT-large unless flags make it smaller; several machines as in launch.sh:
#   NPROC=4 bash scripts/bert_fsdp.sh --layers 4 --hidden 256 --heads 4 --seq 128
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
launch --family bert --layers 24 --hidden 1024 --heads 16 --seq 512 --strategies FSDP2 "$@"
