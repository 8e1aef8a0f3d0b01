#!/usr/bin/env bash
# Runs benchmarks, each claim with its baselines beside it, and writes what was measured to
# benchmarks/results/<claim>_<hardware>_<yyyymm>.{json,md}:  bash scripts/bench.sh [--quick] [claim ...]
# The contest takes hours, so it runs only where it is named.
# With STEPS_CSV=FILE, measured steps of trainings, the planner's predictions of them as well (planner_accuracy).
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

CLAIMS=(memory_accuracy overhead throughput operator_split batch_size published_cases group_sharding search_time time_accuracy
    pipeline_parity habits pipeline_schedules pipeline_balance slice_search token_pipeline token_pipeline_paper
    planner_time planner_heterogeneous published_layouts choices noisy_start refine opaque trainers checkpoint first_minute what_if)
[ -z "${STEPS_CSV:-}" ] || CLAIMS+=(planner_accuracy)
DEVICE="${DEVICE:-cpu}"

hardware() {
    python - "$DEVICE" <<'PYTHON'
import os, platform, re, sys
import torch
name = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else f"cpu{len(os.sched_getaffinity(0))}-{platform.machine()}"
print(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
PYTHON
}

arguments=() chosen=()
for word in "$@"; do
    case "$word" in
        -*) arguments+=("$word") ;;
        *) chosen+=("$word") ;;
    esac
done
[ ${#chosen[@]} -gt 0 ] || chosen=("${CLAIMS[@]}")
[ "$DEVICE" = cpu ] || arguments+=(--device "$DEVICE")

mkdir -p benchmarks/results
machine="$(hardware)"
worst=0
for claim in "${chosen[@]}"; do
    [ -f "benchmarks/$claim.py" ] || fail "no benchmark is called $claim; there are ${CLAIMS[*]}"
    result="benchmarks/results/${claim}_${machine}_$(date +%Y%m)"
    status=0 data=() shown="${arguments[*]}"
    if [ "$claim" = planner_accuracy ]; then
        [ -f "${STEPS_CSV:-}" ] || fail "planner_accuracy reads measured steps: set STEPS_CSV to a CSV file of them"
        data=(--data "$STEPS_CSV") shown+=" --data $(basename "$STEPS_CSV")"
    fi
    python -m "benchmarks.$claim" "${arguments[@]}" "${data[@]}" --json "$result.json" | tee "$result.txt" || status=$?
    {
        echo "# $claim"
        echo
        echo "\`python -m benchmarks.$claim $shown\` on $machine, $(date +%Y-%m-%d); exit status $status."
        echo "Environment and every row are in the JSON file of the same name."
        echo
        echo '```'
        cat "$result.txt"
        echo '```'
    } >"$result.md"
    rm "$result.txt"
    # Wrong (1) outranks not measurable (3).
    if [ "$status" -ne 0 ] && [ "$worst" -ne 1 ]; then worst=$status; fi
done
exit "$worst"
