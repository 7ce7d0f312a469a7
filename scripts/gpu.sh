#!/usr/bin/env bash
# Runs the laws, mutants of streams and step times on the GPUs of this machine, and leaves one JSON file and one page.
set -euo pipefail

ALL=(doctor mutants default torch deepspeed dtypes ranks nccl tf32 options steps)
declare -A LIMIT=(  # seconds, the grace included; together below 15 minutes
    [doctor]=45 [mutants]=60 [default]=110 [torch]=110 [deepspeed]=90 [dtypes]=75 [ranks]=60 [nccl]=45 [tf32]=60
    [options]=100 [steps]=90 [page]=40
)
GRACE=8  # seconds in which a check that has reached its limit ends its last cells

usage() {
    cat <<'HELP'
Usage: scripts/gpu.sh [OUTPUT_FOLDER [SECTION...]]

Runs sections with the python3 of this environment, all of them by default, in this order:

  doctor     what the machine has, and what a CUDA context takes
  mutants    the mutants of streams, and of TF32
  default    the default check of the reference engine (depth 2), on 2 ranks
  torch      FSDP2, DDP, ZeRO-1 and FSDP1 at depth 1
  deepspeed  DeepSpeed at depth 1, if it is installed
  dtypes     bf16 and fp16 on the reference, FSDP2, FSDP1 and DeepSpeed
  ranks      1 and 4 ranks on the reference, FSDP2 and DDP
  nccl       1 rank with NCCL on the reference, FSDP2, DDP and DeepSpeed
  tf32       products in TF32 on the reference, FSDP2 and DDP
  options    options that only a GPU has: compiled models, unpinned offload, fused optimizers
  steps      step times of a transformer of 100M parameters in bf16 beside DDP, FSDP2 and DeepSpeed
  page       OUTPUT_FOLDER/results.json and page.html of all records there; runs at the end anyway

Each section has a limit of its own, together less than 15 minutes; ZHARNESS_GPU_SCALE multiplies them (2: twice as
long), and ZHARNESS_GPU_BUDGET is a limit in seconds for all: what does not fit any more is left out and told. A section
that is cut keeps its records. ZHARNESS_GPU_LAWS limits checks to laws, separated by spaces.

Ranks share a GPU if there are fewer GPUs than ranks. Needs torch with CUDA, and zharness importable: from a clone, without
installing it, PYTHONPATH does (see docs/gpu.md). ZHARNESS_DEVICE=cpu with ZHARNESS_BACKEND=staged tries the script without
a GPU. The default folder is gpu-results. The exit code is 1 if a section failed to run, and 0 even if laws do not hold:
the page shows them.
HELP
}

case ${1:-} in -h | --help) usage; exit 0 ;; esac
out=${1:-gpu-results}
sections=("${@:2}")
[ "${#sections[@]}" -gt 0 ] || sections=("${ALL[@]}")
for section in "${sections[@]}"; do
    [ -n "${LIMIT[$section]:-}" ] || { echo "gpu.sh: unknown section '$section'; expected ${ALL[*]} page" >&2; exit 2; }
done
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
export ZHARNESS_DEVICE=${ZHARNESS_DEVICE:-cuda}
read -ra laws <<<"${ZHARNESS_GPU_LAWS:-}"
failed=0

left() {  # the seconds that are left of the budget
    echo $((${ZHARNESS_GPU_BUDGET:-1000000} - SECONDS))
}

limit_of() {  # the limit of a section, or what is left of the budget if that is less
    local limit rest
    limit=$(awk "BEGIN { print int(${LIMIT[$1]} * ${ZHARNESS_GPU_SCALE:-1}) }")
    rest=$(left)
    echo $((limit < rest ? limit : rest))
}

run() {  # run NAME COMMAND...: the log goes to NAME.log; a failure is told and does not stop
    local name=$1 began=$SECONDS status=0
    shift
    if [ "$limit" -le 0 ]; then
        printf '%s\tleft out\t0\t%s\n' "$name" "$*" >>"$out/sections.tsv"
        echo "$name: left out, as the budget is spent"
        return
    fi
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || shows_failures "$name" "$status" || failed=1
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" $((SECONDS - began)) "$*" >>"$out/sections.tsv"
    echo "$name: exit $status after $((SECONDS - began)) s"
    tail -n 2 "$out/$name.log"
}

shows_failures() {  # whether NAME ended with 1 because laws do not hold or mutants live, which its records and log show
    [ "$2" -eq 1 ] || return 1
    case $1 in
        mutants) grep -q 'mutants killed by' "$out/$1.log" ;;
        doctor | steps | page) return 1 ;;
        *) [ -s "$out/$1.jsonl" ] ;;
    esac
}

check() {  # check NAME OPTION...: records go to NAME.jsonl
    local name=$1
    shift
    run "$name" python3 -m zharness check "${laws[@]}" "$@" --max-seconds "$((limit > GRACE ? limit - GRACE : 1))" --jsonl "$out/$name.jsonl"
}

with_deepspeed() {  # the arguments, and DeepSpeed if it is installed
    local engines=("$@")
    python3 -c 'import deepspeed' >/dev/null 2>&1 && engines+=(--engine deepspeed)
    printf '%s\n' "${engines[@]}"
}

section_doctor() { run doctor python3 -m zharness doctor; }

section_mutants() {
    mapfile -t mutants < <(python3 -c '
from zharness.mutants import MUTANTS, Origin
streams = [name for name, mutant in MUTANTS.items() if mutant.origin is Origin.STREAMS]
print(*streams, "forwards_in_tf32", "backwards_in_tf32", sep="\n")')
    if [ "${#mutants[@]}" -lt 3 ]; then  # without names, all mutants would run
        echo "mutants: their names cannot be read" >&2
        failed=1
        return
    fi
    run mutants python3 -m zharness mutants "${mutants[@]}" --scope targets
}

section_default() { check default --world-size 2; }

section_torch() { check torch --engine fsdp2 --engine ddp --engine zero1 --engine fsdp1 --depth 1; }

section_deepspeed() {
    if python3 -c 'import deepspeed' 2>/dev/null; then check deepspeed --engine deepspeed --depth 1; fi
}

section_dtypes() {
    mapfile -t engines < <(with_deepspeed --engine reference --engine fsdp2 --engine fsdp1)
    check dtypes "${engines[@]}" --dtype bf16,fp16 --depth 1
}

section_ranks() { check ranks --engine reference --engine fsdp2 --engine ddp --world-size 1,4 --depth 1; }

section_nccl() {
    mapfile -t engines < <(with_deepspeed --engine reference --engine fsdp2 --engine ddp)
    check nccl "${engines[@]}" --world-size 1 --backend "${ZHARNESS_BACKEND:-nccl}" --depth 1
}

section_tf32() { check tf32 --engine reference --engine fsdp2 --engine ddp --dtype tf32 --depth 1; }

section_options() {
    local pair engine option
    for pair in ddp:compiled ddp:fused_optimizer fsdp2:compiled fsdp2:cpu_offload fsdp2:offload_unpinned; do
        engine=${pair%:*} option=${pair#*:}
        limit=$(limit_of options)
        limit=$((limit / 5))
        check "options-$engine-$option" --engine "$engine" --variant "$option" --depth 1
    done
}

section_steps() {
    run steps python3 "$here/bench_gpu.py" --size "${ZHARNESS_GPU_SIZE:-100M}" --seconds "$limit" --json "$out/steps.json"
}

section_page() {
    run page python3 "$here/gpu_results.py" "$out"
}

finish() {  # also if the script is cut: what was recorded is kept
    trap - EXIT INT TERM
    limit=${LIMIT[page]}
    section_page
    exit "$failed"
}

python3 -c 'import zharness' 2>/dev/null || { echo "zharness cannot be imported by python3: see docs/gpu.md" >&2; exit 2; }
trap finish EXIT
trap 'failed=1; exit' INT TERM
for section in "${sections[@]}"; do
    [ "$section" != page ] || continue
    limit=$(limit_of "$section")
    "section_$section"
done
