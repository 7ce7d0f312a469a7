#!/usr/bin/env bash
# Runs the laws, the mutants of streams and step times on the GPUs of this machine; writes one JSON file and one page.
set -euo pipefail

ALL=(doctor mutants default torch steps deepspeed dtypes nccl ranks tf32 options fused_adam)
declare -A LIMIT=(  # seconds, including the grace; the sections before steps fit one command of ten minutes
    [doctor]=30 [mutants]=75 [default]=300 [torch]=130 [steps]=150 [deepspeed]=40 [dtypes]=60 [nccl]=40 [ranks]=40
    [tf32]=40 [options]=180 [fused_adam]=240 [page]=40
)
# The laws of the sections after steps, unless ZHARNESS_GPU_LAWS names others: with all laws, each would take minutes.
SIDE_LAWS="training.grads training.trajectory training.clip_and_norm state.resume precision.*"
GRACE=20  # seconds in which a check starts, and ends its last cells when it has reached its limit

usage() {
    cat <<'HELP'
Usage: scripts/gpu.sh [OUTPUT_FOLDER [SECTION...]]

Runs sections with the python3 of this environment, all of them by default, in this order:

  doctor     the machine's equipment, and the memory of a CUDA context
  mutants    the mutants of streams, and of TF32
  default    the default check of the reference engine (depth 2), on 2 ranks
  torch      DDP and FSDP2 at depth 1
  steps      step times of a transformer of 100M parameters in bf16 beside DDP, FSDP2 and DeepSpeed
  deepspeed  ZeRO-1 and FSDP1, and DeepSpeed if it is installed
  dtypes     bf16 and fp16 on FSDP2, FSDP1, the reference and DeepSpeed
  nccl       1 rank with NCCL on DDP, FSDP2, the reference and DeepSpeed
  ranks      1 and 4 ranks on DDP, FSDP2 and the reference
  tf32       products in TF32 on DDP, FSDP2 and the reference
  options    options that only a GPU has: compiled models, CUDA graphs, unpinned offload, fused optimizers
  fused_adam  build DeepSpeed's FusedAdam and run it; left out without DeepSpeed or CUDA's compiler nvcc
  page       OUTPUT_FOLDER/results.json and page.html of all records there; always runs at the end

Each section has a time limit of its own, and a section that is cut keeps its records. ZHARNESS_GPU_SCALE multiplies the
limits (2: twice as long), and ZHARNESS_GPU_BUDGET is a limit in seconds for all sections: a section that does not fit
any more is left out, and a line says so. The sections after steps run a few laws. ZHARNESS_GPU_LAWS names other laws
for all checks, separated by spaces; 'all' runs every law in every check.

Ranks share a GPU if there are fewer GPUs than ranks. Needs torch with CUDA. Other packages that are missing are
installed into OUTPUT_FOLDER/packages. If ZHARNESS_GPU_WHEELS names a folder, all wheels in it are installed, including
DeepSpeed's, and nothing from elsewhere.
ZHARNESS_DEVICE=cpu with ZHARNESS_BACKEND=staged tries the script without a GPU. The default folder is gpu-results.
The exit code is 1 if a section failed to run, and 0 even if laws do not hold: the page shows them.
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
read -ra side_laws <<<"${ZHARNESS_GPU_LAWS:-$SIDE_LAWS}"
[ "${ZHARNESS_GPU_LAWS:-}" != all ] || laws=() side_laws=()
failed=0

left() {  # the seconds of the budget that are left for sections other than the page
    echo $((${ZHARNESS_GPU_BUDGET:-1000000} - SECONDS - LIMIT[page]))
}

limit_of() {  # the limit of a section, or the rest of the budget if that is less
    local limit rest
    limit=$(awk "BEGIN { print int(${LIMIT[$1]} * ${ZHARNESS_GPU_SCALE:-1}) }")
    rest=$(left)
    echo $((limit < rest ? limit : rest))
}

run() {  # run NAME COMMAND...: the log goes to NAME.log; a failure is reported and does not stop the script
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
        doctor | steps | page | fused_adam_build) return 1 ;;
        *) [ -s "$out/$1.jsonl" ] ;;
    esac
}

check() {  # check NAME OPTION...: the records go to NAME.jsonl
    local name=$1
    shift
    run "$name" python3 -m zharness check "$@" --max-seconds "$((limit > GRACE ? limit - GRACE : 1))" --jsonl "$out/$name.jsonl"
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
    mkdir -p "$out/mutants"
    rm -f "$out"/mutants/*  # a mutant whose records are there would not run again
    run mutants python3 -m zharness mutants "${mutants[@]}" --scope targets --jobs "$(nproc)" --jsonl "$out/mutants/kills.jsonl"
}

section_default() { check default "${laws[@]}" --world-size 2; }

section_torch() { check torch "${laws[@]}" --engine ddp --engine fsdp2 --depth 1; }

section_deepspeed() {
    mapfile -t engines < <(with_deepspeed --engine zero1 --engine fsdp1)
    check deepspeed "${side_laws[@]}" "${engines[@]}" --depth 1
}

section_dtypes() {
    mapfile -t engines < <(with_deepspeed --engine fsdp2 --engine fsdp1 --engine reference)
    check dtypes "${side_laws[@]}" "${engines[@]}" --dtype bf16,fp16 --depth 1
}

section_nccl() {
    mapfile -t engines < <(with_deepspeed --engine ddp --engine fsdp2 --engine reference)
    check nccl "${side_laws[@]}" "${engines[@]}" --world-size 1 --backend "${ZHARNESS_BACKEND:-nccl}" --depth 1
}

section_ranks() {
    check ranks "${side_laws[@]}" --engine ddp --engine fsdp2 --engine reference --world-size 1,4 --depth 1
}

section_tf32() { check tf32 "${side_laws[@]}" --engine ddp --engine fsdp2 --engine reference --dtype tf32 --depth 1; }

section_options() {  # each option has a grace and a share of the rest, in percent; compiling takes seconds per cell
    local run option engine engines share whole
    whole=$(limit_of options)
    for run in compiled:30:ddp,fsdp2 cuda_graphs:25:ddp,fsdp2 fused_optimizer:15:ddp,fsdp2 \
        cpu_offload:15:fsdp2 offload_unpinned:15:fsdp2; do
        IFS=: read -r option share engines <<<"$run"
        limit=$((GRACE + (whole - 5 * GRACE) * share / 100))
        [ "$limit" -le "$(left)" ] || limit=$(left)
        mapfile -t engines < <(for engine in ${engines//,/ }; do printf '%s\n' --engine "$engine"; done)
        check "options-$option" "${side_laws[@]}" "${engines[@]}" --variant "$option" --depth 1 --jobs 8
    done
}

section_fused_adam() {  # the build takes longer than the limit of a cell, so it is a command of its own
    local began=$SECONDS build='from deepspeed.ops.op_builder import FusedAdamBuilder; FusedAdamBuilder().load()'
    if ! command -v nvcc >/dev/null || ! python3 -c 'import deepspeed' >/dev/null 2>&1; then
        printf 'fused_adam\tleft out\t0\tbuild of FusedAdam\n' >>"$out/sections.tsv"
        echo "fused_adam: left out, as DeepSpeed or nvcc is missing"
        return
    fi
    run fused_adam_build env CPLUS_INCLUDE_PATH="$(find_cuda_headers)${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" \
        python3 -c "$build"
    limit=$((limit - SECONDS + began))
    check fused_adam "${side_laws[@]}" --engine deepspeed --variant fused_adam --depth 1 --jobs 8
}

section_steps() {
    run steps python3 "$here/bench_gpu.py" --size "${ZHARNESS_GPU_SIZE:-100M}" --seconds "$((limit - GRACE))" --json "$out/steps.json"
}

section_page() {
    run page python3 "$here/gpu_results.py" "$out"
}

note_device() {  # note_device WHEN: the memory in use and the processes on the GPUs, if nvidia-smi is there
    local memory processes
    memory=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null | awk '{ sum += $1 } END { print sum }') || return 0
    processes=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | grep -c .) || processes=0
    [ -z "$memory" ] || printf '%s\t%s\t%s\n' "$1" "$memory" "$processes" >>"$out/device.tsv"
}

finish() {  # also runs if the script is cut, so that all records are kept
    trap - EXIT INT TERM
    limit=${LIMIT[page]}
    note_device after
    section_page
    pack || failed=1
    exit "$failed"
}

pack() {  # write one archive of the folder, outside of the folder: tar fails if a file appears while it reads a folder
    local archive
    archive=$(mktemp) || return 1
    trap 'rm -f "$archive"; exit 1' INT TERM
    tar -czf "$archive" -C "$out" --exclude=./packages --exclude=./all.tar.gz . && mv "$archive" "$out/all.tar.gz" && return
    rm -f "$archive"
    return 1
}

install_packages() {  # the wheels of ZHARNESS_GPU_WHEELS, and dependencies other than torch that this python3 lacks
    local missing wheels=() pip=(python3 -m pip install --quiet --no-deps)
    if [ -n "${ZHARNESS_GPU_WHEELS:-}" ]; then
        mapfile -t wheels < <(find "$ZHARNESS_GPU_WHEELS" -maxdepth 1 -name '*.whl')
        [ "${#wheels[@]}" -gt 0 ] || { echo "gpu.sh: ZHARNESS_GPU_WHEELS names $ZHARNESS_GPU_WHEELS, which has no wheel" >&2; exit 2; }
        pip+=(--no-index)
        # Use another name until all wheels are installed: a call that is cut would leave an incomplete folder.
        if [ ! -d "$out/packages" ]; then
            rm -rf "$out/packages.partial"
            "${pip[@]}" --target "$out/packages.partial" "${wheels[@]}" || {
                echo "gpu.sh: the wheels in $ZHARNESS_GPU_WHEELS cannot be installed; see docs/gpu.md" >&2
                exit 2
            }
            mv "$out/packages.partial" "$out/packages"
        fi
    fi
    mapfile -t missing < <(python3 "$here/missing_packages.py")
    [ "${#missing[@]}" -gt 0 ] || return 0
    "${pip[@]}" --target "$out/packages" "${missing[@]}" || {
        echo "gpu.sh: these packages cannot be installed: ${missing[*]}; see docs/gpu.md" >&2
        exit 2
    }
}

find_cuda_headers() {  # the headers of torch's CUDA libraries, which a small CUDA toolkit lacks
    python3 -c '
import sysconfig
from pathlib import Path
folders = Path(sysconfig.get_path("purelib")).glob("nvidia/*/include")
print(*(str(folder) for folder in folders if (folder / "cusparse.h").is_file()), sep=":")'
}

export PYTHONPATH="$(cd "$here/.." && pwd):$(cd "$out" && pwd)/packages${PYTHONPATH:+:$PYTHONPATH}"
PATH="$(cd "$out" && pwd)/packages/bin:$PATH"  # where pip --target puts ninja
install_packages
trap finish EXIT
trap 'failed=1; exit' INT TERM
note_device before
for section in "${sections[@]}"; do
    [ "$section" != page ] || continue
    limit=$(limit_of "$section")
    "section_$section"
done
