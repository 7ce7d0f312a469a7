#!/usr/bin/env bash
# Shows one bug of repro/ on a release that has it and on one that has the fix, with nothing of this package installed.
set -euo pipefail

usage() {
    cat <<'HELP'
Usage: scripts/setup_repro.sh [--force-install] [--torch VERSION] ID

Makes an environment with torch and the engine once, puts the releases that the script's header names into folders
beside it, runs the script under torchrun on each, and prints one line for each: reproduced, not reproduced, or failed
otherwise, with what was seen.

  ID               the script's id, as in 7913, or its path
  --force-install  build the environment and the releases again
  --torch VERSION  this torch; without it the one of constraints.txt
  -h, --help       this text

Everything is kept in $ZHARNESS_CACHE/setup_repro (default ~/.cache/zharness/setup_repro); to remove it, remove that
folder. $PYTHON is the interpreter that makes the environment (default python3).

Exit codes: 0 each release showed what the header says, 1 one did not, 2 wrong usage or nothing can be installed,
3 a run failed otherwise.
HELP
}

fail() {
    printf 'setup_repro: %s\n' "$1" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${ZHARNESS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/zharness}/setup_repro
torch=$(sed -n 's/^torch==\([^ ;+]*\).*/\1/p' "$root/constraints.txt")
force=no
wanted=

while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --force-install) force=yes ;;
        --torch) torch=${2:?"setup_repro: --torch needs a version"}; shift ;;
        -*) fail "unknown option $1; try --help" ;;
        *) [[ -z $wanted ]] || fail "got $wanted and $1; name one reproduction"; wanted=$1 ;;
    esac
    shift
done
[[ -n $wanted ]] || { usage >&2; exit 2; }

# One line of the docstring's second paragraph.
header() { sed -n "2,/^\$/{/^$1: /{s/^$1: *//p;q}}" "$script"; }

find_script() {
    [[ -f $wanted ]] && { printf '%s\n' "$wanted"; return; }
    local found
    found=$(grep -lx "id: ${wanted#\#}" "$root"/repro/*.py) || fail \
        "unknown reproduction $wanted; known: $(sed -n 's/^id: *//p' "$root"/repro/*.py | sort | tr '\n' ' ')"
    printf '%s\n' "$found"
}

script=$(find_script)
engine=$(header engine)
ranks=$(header ranks)
fixed=$(header fixed)
broken=$(header broken)
signature=$(header signature)
ok=$(header ok)

room=$cache/torch-$torch-$engine
python=$room/bin/python
making=

# shellcheck disable=SC2329  # the trap calls it
cleanup() { [[ -z $making ]] || rm -rf -- "$making"; }
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# DeepSpeed is installed without compiling its operations, by a build that sees the torch in use.
install() { DS_BUILD_OPS=0 "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

make_environment() {
    if [[ $force == yes ]]; then rm -rf -- "$room"; fi
    [[ -f $room/complete ]] && return
    printf 'setup_repro: making %s\n' "$room" >&2
    rm -rf -- "$room"  # of a run that was killed; a virtual environment cannot be renamed once it is made
    mkdir -p -- "$cache"
    "${PYTHON:-python3}" -m venv "$room" || fail "no environment could be made; set PYTHON to an interpreter with venv"
    install "torch==$torch" numpy "setuptools<81" wheel || fail "torch $torch cannot be installed; try --torch VERSION"
    if [[ $engine == deepspeed ]]; then
        install --no-build-isolation deepspeed || fail "deepspeed cannot be installed; is there a network?"
    fi
    touch -- "$room/complete"
}

installed() { "$python" -c "import importlib.metadata as m; print(m.version('$1').partition('+')[0])"; }

# The folder that goes in front for a release of deepspeed; empty for the installed one.
overlay() {
    local release=$1 place=$room/releases/$1
    [[ $release != "$(installed deepspeed)" ]] || return 0
    if [[ ! -d $place ]]; then
        printf 'setup_repro: installing deepspeed %s\n' "$release" >&2
        mkdir -p -- "$room/releases"
        making=$(mktemp -d "$room/releases/.building-XXXXXX")
        install --no-deps --no-build-isolation --target "$making" "deepspeed==$release" ||
            fail "deepspeed $release cannot be installed; try: $python -m pip download --no-deps deepspeed==$release"
        mv -- "$making" "$place"
        making=
    fi
    printf '%s\n' "$place"
}

# Runs the script on one release and prints its line. The marker, the signature and the exit code decide.
run() {
    local release=$1 front=$2 output code=0 verdict=otherwise seen
    output=$(PYTHONPATH=$front${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$room/extensions-$release \
        timeout 120 "$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 \
        --nproc_per_node="$ranks" "$script" 2>&1) || code=$?
    seen=$(grep -F "repro: REPRODUCED: " <<<"$output" | grep -F -m 1 -- "$signature") || seen=
    if ((code == 1)) && [[ -n $seen ]]; then
        verdict=reproduced
    elif ((code == 0)) && seen=$(grep -Fx -m 1 -- "$ok" <<<"$output"); then
        verdict="not reproduced"
    else
        printf '%s %s: failed otherwise (exit code %s):\n%s\n' "$engine" "$release" "$code" "$output"
        return 3
    fi
    printf '%s %s: %s: %s\n' "$engine" "$release" "$verdict" "$seen"
    [[ $verdict == "$3" ]]
}

worst=0
side() {
    local code=0
    run "$1" "$2" "$3" || code=$?
    if ((code > worst)); then worst=$code; fi
}

make_environment
if [[ $engine == deepspeed ]]; then
    newest=$(installed deepspeed)
    broken=${broken:-$newest}
    front=$(overlay "$broken")
    side "$broken" "$front" reproduced
    if [[ $fixed != "not yet" ]]; then
        front=$(overlay "$fixed")
        side "$fixed" "$front" "not reproduced"
    fi
else
    side "$(installed torch)" "" "$([[ $fixed == "not yet" ]] && echo reproduced || echo "not reproduced")"
fi
exit "$worst"
