#!/usr/bin/env bash
# Trains BERT under OSDP with group sharding: sharded inside each machine, replicated across.
# BERT-large unless flags make it smaller; several machines as in launch.sh, or groups on one machine:
#   NPROC=4 bash scripts/bert_group_sharding.sh --group-size 2 --layers 4 --hidden 256 --heads 4 --seq 128
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
launch --family bert --layers 24 --hidden 1024 --heads 16 --seq 512 --strategies OSDP --groups group_sharding "$@"
