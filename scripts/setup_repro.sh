#!/usr/bin/env bash
# Shows one bug of repro/ on a release that has it and on one that has the fix, without this package installed.
set -euo pipefail
shopt -s inherit_errexit  # without it a command that fails inside $(...) goes unseen

usage() {
    cat <<'HELP'
Usage: scripts/setup_repro.sh [--force-install] [--torch VERSION] ID

Creates an environment with torch and the engine once, installs the releases that the script's header names into
folders beside it, runs the script under torchrun on each release, and prints one line for each: reproduced, not
reproduced, or failed otherwise, with the line of output that shows it.

  ID               the script's id, such as 7913, or its path
  --force-install  build the environment and the releases again
  --torch VERSION  the torch to install (default: that of constraints.txt)
  -h, --help       this text

Everything is stored in $ZHARNESS_CACHE/setup_repro (default ~/.cache/zharness/setup_repro); remove that folder to
clean up. $PYTHON is the interpreter that creates the environment (default python3). A second run waits for the first.

Exit codes: 0 every release behaved as the header says, 1 one did not, 2 wrong usage or an installation failed, 3 a run
failed otherwise.
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
        --torch) (($# > 1)) || fail "--torch needs a version"; torch=$2; shift ;;
        -*) fail "unknown option $1; try --help" ;;
        *) [[ -z $wanted ]] || fail "got $wanted and $1; name one reproduction"; wanted=$1 ;;
    esac
    shift
done
[[ -n $wanted ]] || { usage >&2; exit 2; }
for program in flock timeout; do
    command -v "$program" >/dev/null || fail "there is no $program here; it comes with util-linux or coreutils"
done

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
affects=$(header affects)
fixed=$(header fixed)
broken=$(header broken)
signature=$(header signature)
ok=$(header ok)

room=$cache/torch-$torch-$engine
python=$room/bin/python
making=  # folder that the trap removes if the run ends early; set outside of subshells, whose variables it cannot see
logs=

# shellcheck disable=SC2329  # the trap calls it
cleanup() {
    [[ -z $making ]] || rm -rf -- "$making"
    [[ -z $logs ]] || rm -rf -- "$logs"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# One run at a time: --force-install would remove the environment that another run uses. The descriptor is closed for
# the ranks, since a rank that outlived its launcher would keep the lock.
{ mkdir -p -- "$cache" && exec 9>"$room.lock"; } ||
    fail "nothing can be written into $cache; set ZHARNESS_CACHE to another folder"
flock --nonblock 9 || {
    printf 'setup_repro: waiting for another run in %s\n' "$room" >&2
    flock 9
}

# DeepSpeed is installed without compiling its operations, by a build that sees the torch in use.
install() { DS_BUILD_OPS=0 "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

make_environment() {
    if [[ $force == yes ]]; then rm -rf -- "$room"; fi
    [[ -f $room/complete ]] && return
    printf 'setup_repro: making %s\n' "$room" >&2
    rm -rf -- "$room"  # of a run that was killed; a virtual environment cannot be renamed once it is made
    "${PYTHON:-python3}" -m venv "$room" || fail "no environment could be made; set PYTHON to an interpreter with venv"
    install "torch==$torch" numpy "setuptools<81" wheel || fail "torch $torch cannot be installed; try --torch VERSION"
    if [[ $engine == deepspeed ]]; then
        install --no-build-isolation deepspeed || fail "deepspeed cannot be installed; is there a network?"
    fi
    touch -- "$room/complete"
}

installed() { "$python" -c "import importlib.metadata as m; print(m.version('$1').partition('+')[0])"; }

# The version that python imports with the folder $1 in front. From /, as a checkout in the current folder would hide it.
imported() {
    (cd / && PYTHONPATH=$1 "$python" -c "import deepspeed; print('version:', deepspeed.__version__)") |
        sed -n 's/^version: \([^+]*\).*/\1/p'
}

# Sets front, the folder to put first on PYTHONPATH for a release of deepspeed; empty for the installed release.
overlay() {
    local release=$1 place=$room/releases/$1 found
    front=
    [[ $release != "$newest" ]] || return 0
    if [[ ! -d $place ]]; then
        printf 'setup_repro: installing deepspeed %s\n' "$release" >&2
        rm -rf -- "$room/releases"/.building-*  # left by runs that were killed; this run holds the lock
        mkdir -p -- "$room/releases"
        making=$(mktemp -d "$room/releases/.building-XXXXXX") || fail "nothing can be written into $room/releases"
        install --no-deps --no-build-isolation --target "$making" "deepspeed==$release" ||
            fail "deepspeed $release cannot be installed; try: $python -m pip download --no-deps deepspeed==$release"
        found=$(imported "$making") || fail "deepspeed $release does not import with torch $torch; try --torch VERSION"
        [[ $found == "$release" ]] || fail "got version $found where deepspeed $release was installed"
        mv -T -- "$making" "$place"
        making=
    fi
    front=$place
}

# Prints what a release should show according to the header; nothing if the header does not say.
expected() {
    "$python" - "$1" "$affects" "$fixed" <<'PYTHON'
import sys

from pip._vendor.packaging.specifiers import SpecifierSet
from pip._vendor.packaging.version import Version

release, affects, fixed = sys.argv[1:]
if fixed != "not yet" and Version(release) >= Version(fixed):
    print("not reproduced")
elif SpecifierSet(affects).contains(release, prereleases=True):
    print("reproduced")
PYTHON
}

# Runs the script on one release and prints its line. The marker, the signature and the exit code decide.
run() {
    local release=$1 front=$2 should=$3 output code=0 verdict=otherwise seen said=
    logs=$(mktemp -d) || fail "no temporary folder can be made; is ${TMPDIR:-/tmp} full?"
    # A log file for each rank, since lines written to one pipe at the same time would be mixed. --foreground, so that
    # Ctrl-C reaches the launcher, which is killed only after its own 30 seconds for ending its ranks.
    PYTHONPATH=$front OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo TORCH_EXTENSIONS_DIR=$room/extensions-$release \
        timeout --foreground -k 40 300 "$python" -m torch.distributed.run --log-dir="$logs" --redirects=3 \
        --standalone --local-addr=127.0.0.1 --nproc_per_node="$ranks" "$script" >"$logs/output" 2>&1 9>&- || code=$?
    output=$(find "$logs" -name 'std*.log' -exec awk 1 {} + && cat -- "$logs/output")
    rm -rf -- "$logs"
    logs=
    seen=$(grep -F "repro: REPRODUCED: " <<<"$output" | grep -F -m 1 -- "$signature") || seen=
    if ((code == 1)) && [[ -n $seen ]]; then
        verdict=reproduced
    elif ((code == 0)) && seen=$(grep -Fx -m 1 -- "$ok" <<<"$output"); then
        verdict="not reproduced"
    else
        printf '%s %s: failed otherwise (exit code %s):\n%s\n' "$engine" "$release" "$code" "$output"
        return 3
    fi
    [[ -n $should ]] || said=" (the header says nothing of this release)"
    printf '%s %s: %s%s: %s\n' "$engine" "$release" "$verdict" "$said" "$seen"
    [[ -z $should || $verdict == "$should" ]]
}

worst=0
side() {
    local code=0 should
    should=$(expected "$1") || fail "cannot read affects: $affects or fixed: $fixed in $script"
    run "$1" "$2" "$should" || code=$?
    if ((code > worst)); then worst=$code; fi
}

make_environment
if [[ $engine == deepspeed ]]; then
    newest=$(installed deepspeed)
    broken=${broken:-$newest}
    overlay "$broken"
    side "$broken" "$front"
    if [[ $fixed != "not yet" ]]; then
        overlay "$fixed"
        side "$fixed" "$front"
    fi
else
    side "$(installed torch)" ""
fi
exit "$worst"
