#!/usr/bin/env bash
# Trains GPT-2 under FSDP2 at a size given by flags: the baseline of gpt2_osdp.sh, with the same flags.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/scripts/launch.sh"
launch --strategies FSDP2 "$@"
