#!/usr/bin/env bash
# Trains BERT under OSDP with communication with groups: gathered across machines, then inside each.
# BERT-large unless flags make it smaller; several machines as in launch.sh, or groups on one machine:
#   NPROC=4 bash scripts/bert_communication_with_groups.sh --group-size 2 --layers 4 --hidden 256 --heads 4 --seq 128
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
launch --family bert --layers 24 --hidden 1024 --heads 16 --seq 512 --strategies OSDP --groups communication_with_groups "$@"
