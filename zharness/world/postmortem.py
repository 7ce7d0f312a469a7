"""Why a rank's process ended, in words."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from zharness.world.outcome import MISMATCH_EXCEPTION, RankEnd, RankOutcome, signal_name
from zharness.world.rank import PIPE_CLOSED_STATUS
from zharness.world.rank_coordinator import MismatchedCollective
from zharness.world.stacks import describe_innermost_frame, find_waiting_collective, parse_main_thread
from zharness.world.team import TeamMember

FATAL_ERROR_PREFIX = "Fatal Python error"  # faulthandler's first words, with the stack behind them
CLOSED_PIPE_CAUSE = "closed the pipe on which it reports"
# What to do about a crash that is known, by the Python frame in which it comes.
_KNOWN_CRASHES = {
    # torch 2.13: the logger of DistributedDataParallel takes the group that checks for gloo's own.
    "_ddp_init_helper": "; over gloo, DistributedDataParallel cannot be built where collectives are checked: "
    "run pytest with --collectives trusted",
}
_OOM_KILL_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# The kernel's counts of processes it killed for want of memory: of this control group (v2, v1), or of the machine.
_OOM_COUNTER_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def count_oom_kills() -> int:
    """How many processes the kernel has killed here for want of memory; 0 where it does not say."""
    for path in _OOM_COUNTER_FILES:
        try:
            found = _OOM_KILL_COUNT.search(Path(path).read_text())
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return 0


def judge_exit(member: TeamMember, outcome: RankOutcome | None, pipe_fault: str, oom_kills_before: int) -> RankOutcome:
    """A report stands only if the process then ended with status 0. ``unheard`` is what it did to its pipe before."""
    code = member.process.exitcode
    assert code is not None, "judged before it ended"
    if outcome is not None and (code == 0 or outcome.end is not RankEnd.RETURNED):
        return outcome
    when = "after its function had returned" if outcome is not None else "before its function had returned"
    did = pipe_fault or (CLOSED_PIPE_CAUSE if code == PIPE_CLOSED_STATUS else "")
    pipe = did and f", having {did}"
    if code < 0:
        cause = f"{signal_name(-code)}, {when}{explain_kill(-code, oom_kills_before)}"
        end = RankEnd.SIGNALLED
    else:
        cause = f"exit status {code}, {when}{pipe}"
        end = RankEnd.EXITED
    blank = outcome or RankOutcome(member.rank, end, 0)
    return replace(blank, end=end, at_ns=time.monotonic_ns(), cause=cause, phase=member.phase)


def explain_kill(signal_number: int, oom_kills_before: int) -> str:
    """What the kernel says of a SIGKILL that nobody here sent, and why the question for its stack killed a rank."""
    if signal_name(signal_number) == "SIGUSR1":
        return "; it did not end in time, and was asked by this signal where it stands, whose handler it had removed"
    if signal_name(signal_number) != "SIGKILL" or count_oom_kills() <= oom_kills_before:
        return ""
    return "; out of memory: the kernel killed a process for want of it meanwhile"


def describe_hang(seconds: float, stack: str, has_returned: bool) -> str:
    """Where a rank stands that did not end in time."""
    if has_returned:
        return f"its function had returned, its process did not end within {seconds:g} s"
    if not stack.strip():
        return f"no end within {seconds:g} s; it wrote no stack (it may block SIGUSR1)"
    frames = parse_main_thread(stack)
    site = find_waiting_collective(frames)
    place = (
        f"waits in {site}"
        if site
        else f"stands in {describe_innermost_frame(frames)}"
        if frames
        else "its function ran"
    )
    return f"no end within {seconds:g} s; {place}"


def add_known_cause(outcome: RankOutcome, mismatch: MismatchedCollective | None) -> RankOutcome:
    """The outcome with the cause that only others know: a mismatched collective, or the stack of a fatal error."""
    if mismatch is not None and outcome.rank in mismatch.ranks:
        return replace(
            outcome, end=RankEnd.RAISED, cause=mismatch.message, exception=MISMATCH_EXCEPTION, at_ns=mismatch.at_ns
        )
    if outcome.end is not RankEnd.SIGNALLED:
        return outcome
    text = "".join(part.text for part in outcome.captured_output if part.stream == "stderr")
    fatal = text.rfind(FATAL_ERROR_PREFIX)
    frame = re.search(r'File "(.*?)", line (\d+) in (\S+)', text[fatal:]) if fatal >= 0 else None
    if frame is None:
        return outcome
    place = f"in {frame[3]} ({frame[1]}, line {frame[2]}){_KNOWN_CRASHES.get(frame[3], '')}"
    return replace(outcome, cause=f"{outcome.cause}, {place}", stack=text[fatal:])
