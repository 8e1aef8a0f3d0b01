# Sourced after environment.sh: `launch ARGUMENTS` starts the training program on NPROC processes per machine.
# Several machines: run the same command on each with NNODES and MASTER_ADDR (and MASTER_PORT) set.

num_processes() {
    python -c 'import torch; print(torch.cuda.device_count() or 2)'
}

launch() {
    local where=(--standalone)
    if [ "${NNODES:-1}" -gt 1 ]; then
        [ -n "${MASTER_ADDR:-}" ] || fail "NNODES=$NNODES needs MASTER_ADDR, the name of the first machine"
        where=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}")
    fi
    # Batch scheduling: gloo's threads share the cores with those that wait for them, and without it each of
    # their messages may wait for the scheduler's next tick. It changes nothing where GPUs compute.
    local batch=()
    if chrt --batch 0 true 2>/dev/null; then batch=(chrt --batch 0); fi
    # CPU memory is counted by a library in front of the allocator; without a C compiler no peaks are told.
    local counter=""
    counter="$(python -m benchmarks.support.live_bytes)" || true
    # One thread per process unless told otherwise: processes share the cores.
    # Kineto and the allocator would comment on each memory measurement.
    # On GPUs blocks are as large as what is asked for; by default each large one may be up to 1 MiB larger.
    # The allocator keeps what is freed, in large pages, as torch's does on GPUs, instead of faulting it in anew.
    PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}" \
        OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" KINETO_LOG_LEVEL=99 TORCH_CPP_LOG_LEVEL=ERROR \
        MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 MALLOC_TOP_PAD_=67108864 \
        LD_PRELOAD="$counter${LD_PRELOAD:+:$LD_PRELOAD}" GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}" \
        ${batch[@]+"${batch[@]}"} torchrun "${where[@]}" --nproc-per-node "${NPROC:-$(num_processes)}" -m examples.train_text "$@"
}
