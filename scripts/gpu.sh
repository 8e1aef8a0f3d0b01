#!/usr/bin/env bash
# On a machine with a GPU: the tests marked cuda, then memory and time accuracy of full-size models under a fake
# process group of 8 and 64 ranks (the allocator's real peak), written to benchmarks/results. With several GPUs a
# small model trains between them as well, under OSDP, FSDP2 and DDP.
# With --check it is the short way, to see whether what osdp promises holds on this machine: fewer models, and
# the results stay in a temporary folder, whose name is told.
# Uses the torch and transformers that are there and installs nothing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Blocks as large as what is asked for; by default each large one may be up to 1 MiB larger.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
    { echo "error: $PYTHON sees no CUDA device" >&2; exit 3; }

if [ "${1:-}" = --check ]; then
    shift
    OUT="$(mktemp -d)"
    set -- --quick "$@"
fi
count="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
machine="$("$PYTHON" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()))')"
results="${OUT:-benchmarks/results}"
mkdir -p "$results"
worst=0

if "$PYTHON" -c 'import allpairspy, hypothesis, pytest, pytest_timeout' 2>/dev/null; then
    # Only the files that hold such tests: the others may need what is not installed here.
    "$PYTHON" -m pytest -q -m cuda $(grep -rl --include='test_*.py' "mark.cuda" tests) || worst=1
else
    echo "allpairspy, hypothesis, pytest and pytest-timeout are not all installed: the tests marked cuda were" \
        "not run" >&2
    worst=3
fi
for claim in memory_accuracy time_accuracy; do
    result="$results/${claim}_${machine}_$(date +%Y%m)"
    "$PYTHON" -m "benchmarks.$claim" --device cuda "$@" --json "$result.json" | tee "$result.txt"
    status=${PIPESTATUS[0]}
    {
        echo "# $claim"
        echo
        echo "On $machine, $(date +%Y-%m-%d); exit status $status. Every row is in the JSON file of the same name."
        echo
        echo '```'
        cat "$result.txt"
        echo '```'
    } >"$result.md"
    rm "$result.txt"
    [ "$status" -eq 0 ] || worst=$status
done
if [ "$count" -gt 1 ]; then
    # Between the GPUs, over NCCL: the same text under OSDP, FSDP2 and DDP, with the losses of a single process.
    demo="$(mktemp -d)/demo.json"
    { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$count" -m examples.train_text \
        --strategies OSDP FSDP2 DDP --reference --json "$demo" && "$PYTHON" -m examples.check_demo "$demo"; } || worst=1
    echo "not run: benchmarks.contest, which is of gloo; the accuracy of memory and time is of one GPU each" >&2
fi
echo "results are in $results; exit status $worst (0: all claims hold)"
exit "$worst"
