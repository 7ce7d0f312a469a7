#!/usr/bin/env bash
# Runs the laws and the mutants of streams on the GPUs of this machine, and leaves one JSON file and one page.
set -euo pipefail

usage() {
    cat <<'HELP'
Usage: scripts/gpu.sh [OUTPUT_FOLDER]

Runs, with the python3 of this environment: zharness doctor; the mutants of streams; the default check of the reference
engine on 2 ranks; and every law at depth 1 on FSDP2, DDP, ZeRO-1, FSDP1 and, if it is installed, DeepSpeed. Ranks share
a GPU if there are fewer GPUs than ranks. Needs torch with CUDA, and zharness importable: from a clone, without
installing it, PYTHONPATH does (see docs/gpu.md).

Writes OUTPUT_FOLDER/records.jsonl, one line of JSON for each cell, OUTPUT_FOLDER/page.html and a log for each step; the
default folder is gpu-results. ZHARNESS_GPU_SECONDS (default 300) bounds each check. The exit code is 1 if a step could not
be run, and 0 even if laws do not hold: the page shows them.
HELP
}

case ${1:-} in -h | --help) usage; exit 0 ;; esac
out=${1:-gpu-results}
seconds=${ZHARNESS_GPU_SECONDS:-300}
mkdir -p "$out"
export ZHARNESS_DEVICE=${ZHARNESS_DEVICE:-cuda}  # cpu with ZHARNESS_BACKEND=staged tries the script without a GPU

failed=0

run() {  # run NAME COMMAND...: the log goes to NAME.log, its end to the terminal; a failure is told and does not stop
    local name=$1 began=$SECONDS status=0
    shift
    "$@" >"$out/$name.log" 2>&1 || status=$?
    [ "$status" -le 1 ] || failed=1  # 1: a law does not hold, which the page shows
    echo "$name: exit $status after $((SECONDS - began)) s"
    tail -n 2 "$out/$name.log"
}

mapfile -t mutants < <(python3 -c '
from zharness.mutants import MUTANTS, Origin
print(*(name for name, mutant in MUTANTS.items() if mutant.origin is Origin.STREAMS), sep="\n")')
[ "${#mutants[@]}" -gt 0 ] || { echo "zharness cannot be imported by python3: see docs/gpu.md" >&2; exit 2; }
run doctor python3 -m zharness doctor
run mutants python3 -m zharness mutants "${mutants[@]}" --scope targets
run reference python3 -m zharness check --depth 2 --world-size 2 --max-seconds "$seconds" --jsonl "$out/reference.jsonl"
engines=(--engine fsdp2 --engine ddp --engine zero1 --engine fsdp1)
run torch python3 -m zharness check "${engines[@]}" --depth 1 --max-seconds "$seconds" --jsonl "$out/torch.jsonl"
if python3 -c 'import deepspeed' 2>/dev/null; then
    run deepspeed python3 -m zharness check --engine deepspeed --depth 1 --max-seconds "$seconds" --jsonl "$out/deepspeed.jsonl"
fi
cat "$out"/{reference,torch,deepspeed}.jsonl >"$out/records.jsonl" 2>/dev/null || :  # a step may have left none
run page python3 -m zharness report "$out/records.jsonl" --html "$out/page.html"
exit "$failed"
