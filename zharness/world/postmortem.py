"""Why a rank's process ended, in words."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from zharness.world.agreement import Mismatch
from zharness.world.outcome import MISMATCH, End, RankOutcome, signal_name
from zharness.world.rank import PIPE_CLOSED
from zharness.world.stacks import main_thread, standing_in, waiting_in
from zharness.world.team import Member

FATAL = "Fatal Python error"  # faulthandler's first words, with the stack behind them
CLOSED = "closed the pipe on which it reports"
# What to do about a crash that is known, by the Python frame in which it comes.
_KNOWN = {
    # torch 2.13: the logger of DistributedDataParallel takes the group that checks for gloo's own.
    "_ddp_init_helper": "; over gloo, DistributedDataParallel cannot be built where collectives are checked: "
    "run pytest with --collectives trusted",
}
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# The kernel's counts of processes it killed for want of memory: of this control group (v2, v1), or of the machine.
_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def killed_for_memory() -> int:
    """How many processes the kernel has killed here for want of memory; 0 where it does not say."""
    for path in _COUNTERS:
        try:
            found = _KILLS.search(Path(path).read_text())
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return 0


def judge_exit(member: Member, outcome: RankOutcome | None, unheard: str, memory_kills_before: int) -> RankOutcome:
    """A report stands only if the process then ended with status 0. ``unheard`` is what it did to its pipe before."""
    code = member.process.exitcode
    assert code is not None, "judged before it ended"
    if outcome is not None and (code == 0 or outcome.end is not End.RETURNED):
        return outcome
    when = "after its function had returned" if outcome is not None else "before its function had returned"
    did = unheard or (CLOSED if code == PIPE_CLOSED else "")
    pipe = did and f", having {did}"
    if code < 0:
        cause = f"{signal_name(-code)}, {when}{kill_words(-code, memory_kills_before)}"
        end = End.SIGNALLED
    else:
        cause = f"exit status {code}, {when}{pipe}"
        end = End.EXITED
    blank = outcome or RankOutcome(member.rank, end, 0)
    return replace(blank, end=end, at_ns=time.monotonic_ns(), cause=cause, phase=member.phase)


def kill_words(signal_number: int, kills_before: int) -> str:
    """What the kernel says of a SIGKILL that nobody here sent, and why the question for its stack killed a rank."""
    if signal_name(signal_number) == "SIGUSR1":
        return "; it did not end in time, and was asked by this signal where it stands, whose handler it had removed"
    if signal_name(signal_number) != "SIGKILL" or killed_for_memory() <= kills_before:
        return ""
    return "; out of memory: the kernel killed a process for want of it meanwhile"


def where(seconds: float, stack: str, done: bool) -> str:
    """Where a rank stands that did not end in time."""
    if done:
        return f"its function had returned, its process did not end within {seconds:g} s"
    if not stack.strip():
        return f"no end within {seconds:g} s; it wrote no stack (it may block SIGUSR1)"
    frames = main_thread(stack)
    site = waiting_in(frames)
    place = f"waits in {site}" if site else f"stands in {standing_in(frames)}" if frames else "its function ran"
    return f"no end within {seconds:g} s; {place}"


def named(outcome: RankOutcome, mismatch: Mismatch | None) -> RankOutcome:
    """The outcome with the cause that only others know: a mismatched collective, or the stack of a fatal error."""
    if mismatch is not None and outcome.rank in mismatch.ranks:
        return replace(outcome, end=End.RAISED, cause=mismatch.words, exception=MISMATCH, at_ns=mismatch.at_ns)
    if outcome.end is not End.SIGNALLED:
        return outcome
    text = "".join(part.text for part in outcome.printed if part.stream == "stderr")
    fatal = text.rfind(FATAL)
    frame = re.search(r'File "(.*?)", line (\d+) in (\S+)', text[fatal:]) if fatal >= 0 else None
    if frame is None:
        return outcome
    place = f"in {frame[3]} ({frame[1]}, line {frame[2]}){_KNOWN.get(frame[3], '')}"
    return replace(outcome, cause=f"{outcome.cause}, {place}", stack=text[fatal:])
