"""Explain why a rank's process ended (exit status, signal, out of memory) or why it hangs (a waiting collective)."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from zharness.device.cuda_errors import name_failed_kernel
from zharness.world.outcome import MISMATCH_EXCEPTION, RankEnd, RankOutcome, signal_name
from zharness.world.rank import PIPE_CLOSED_STATUS
from zharness.world.rank_coordinator import MismatchedCollective
from zharness.world.stacks import (
    StackFrame,
    describe_innermost_frame,
    find_waiting_site,
    parse_frames,
    parse_main_thread,
)
from zharness.world.team import TeamMember

FATAL_ERROR_PREFIX = "Fatal Python error"  # the beginning of faulthandler's dump; the stack follows
CLOSED_PIPE_CAUSE = "closed the pipe through which it reports"
# Remedies for known crashes, by the Python function in which they happen.
_KNOWN_CRASHES = {
    # torch 2.13: DistributedDataParallel's logger casts the wrapper group that checks collectives to gloo's own class.
    "_ddp_init_helper": "; over gloo, DistributedDataParallel cannot be built where collectives are checked: "
    "run pytest with --collectives trusted",
}
_OOM_KILL_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# Files with the kernel's count of out-of-memory kills: of this cgroup (version 2, 1), or of the machine.
_OOM_COUNTER_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory so far; 0 if the kernel publishes no count."""
    for path in _OOM_COUNTER_FILES:
        try:
            match = _OOM_KILL_COUNT.search(Path(path).read_text())
        except OSError:
            continue
        if match is not None:
            return int(match[1])
    return 0


def judge_exit(member: TeamMember, outcome: RankOutcome | None, pipe_fault: str, oom_kills_before: int) -> RankOutcome:
    """Return the outcome of a rank whose process has ended.

    ``outcome`` is the outcome that the rank reported, or None. A reported outcome is returned unchanged, unless it says
    that the function returned and the process then ended with an error. ``pipe_fault`` describes how the rank broke its
    control pipe, or is empty. ``oom_kills_before`` is the result of ``count_oom_kills`` when the task began.
    """
    code = member.process.exitcode
    assert code is not None, "judge_exit was called for a process that has not ended"
    if outcome is not None and (code == 0 or outcome.end is not RankEnd.RETURNED):
        return outcome
    when = "after its function had returned" if outcome is not None else "before its function had returned"
    fault = pipe_fault or (CLOSED_PIPE_CAUSE if code == PIPE_CLOSED_STATUS else "")
    pipe = fault and f"; before that, it {fault}"
    if code < 0:
        cause = f"{signal_name(-code)}, {when}{explain_kill(-code, oom_kills_before)}"
        end = RankEnd.SIGNALLED
    else:
        cause = f"exit status {code}, {when}{pipe}"
        end = RankEnd.EXITED
    template = outcome or RankOutcome(member.rank, end, 0)
    return replace(template, end=end, at_ns=time.monotonic_ns(), cause=cause, phase=member.phase)


def explain_kill(signal_number: int, oom_kills_before: int) -> str:
    """Explain the signal that killed a rank; return text to append to the cause, or the empty string.

    The function explains two signals: SIGUSR1, if the test removed the handler for it, and SIGKILL, if the kernel's
    out-of-memory killer sent it.
    """
    if signal_name(signal_number) == "SIGUSR1":
        return (
            "; it did not finish in time and was killed by the stack-dump signal SIGUSR1, "
            "because the test had removed its handler"
        )
    if signal_name(signal_number) != "SIGKILL" or count_oom_kills() <= oom_kills_before:
        return ""
    return "; out of memory: meanwhile the kernel's out-of-memory killer ended a process"


def describe_hang(seconds: float, stack: str, has_returned: bool) -> str:
    """Explain why a rank did not end within ``seconds``: name the collective that it waits in, or its innermost frame.

    ``stack`` is the stack that the rank dumped. ``has_returned`` says whether the rank's function had returned already.
    """
    if has_returned:
        return f"its function had returned, but its process did not end within {seconds:g} s"
    if not stack.strip():
        return f"still running after {seconds:g} s; it wrote no stack (the test may block SIGUSR1)"
    frames, site = parse_main_thread(stack), find_waiting_site(stack)
    location = (
        f"waits in {site}"
        if site
        else f"is in {describe_innermost_frame(frames)}"
        if frames
        else "its stack names no function"
    )
    return f"still running after {seconds:g} s; {location}"


def add_known_cause(outcome: RankOutcome, mismatch: MismatchedCollective | None) -> RankOutcome:
    """Return the outcome with a more specific cause, if one is known.

    If the rank called a collective that differs from a peer's, ``mismatch`` replaces the cause. If a signal killed the
    rank, the innermost frame of the fatal-error dump on its stderr is added to the cause. The kernel that stderr
    names is added to a CUDA error.
    """
    if mismatch is not None and outcome.rank in mismatch.ranks:
        return replace(
            outcome, end=RankEnd.RAISED, cause=mismatch.message, exception=MISMATCH_EXCEPTION, at_ns=mismatch.at_ns
        )
    text = "".join(part.text for part in outcome.captured_output if part.stream == "stderr")
    if outcome.end is not RankEnd.SIGNALLED:
        kernel = name_failed_kernel(outcome.cause, text)
        return replace(outcome, cause=f"{outcome.cause}; {kernel}") if kernel else outcome
    start = text.rfind(FATAL_ERROR_PREFIX)
    frame = find_failed_frame(text[start:]) if start >= 0 else None
    if frame is None:
        return outcome
    location = f"in {frame.name} ({frame.file}, line {frame.line}){_KNOWN_CRASHES.get(frame.name, '')}"
    return replace(outcome, cause=f"{outcome.cause}, {location}", stack=text[start:])


def find_failed_frame(dump: str) -> StackFrame | None:
    """Return the innermost frame of the thread that failed, or that of the dump's first thread with frames, or None.

    faulthandler lists the threads from the youngest to the oldest, and marks the one that failed.
    """
    frames = parse_main_thread(dump) or parse_frames(dump)
    return frames[0] if frames else None
