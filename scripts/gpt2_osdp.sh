#!/usr/bin/env bash
# Trains GPT-2 under OSDP at a size given by flags, for example:
#   NPROC=8 bash scripts/gpt2_osdp.sh --layers 48 --hidden 1600 --heads 25 --seq 1024 --memory-limit 40GiB
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
launch --strategies OSDP "$@"
