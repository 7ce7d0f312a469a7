"""What zharness and torch's fixtures make of the same faults: the verdict, the culprit, the cause, and what is left."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from fixtures.session import FIXTURES, RANK_TIMEOUT, Fixture, Session, complain_without_expecttest, until
from tabulate import tabulate

EPILOG = """
Every fault runs in a pytest process of its own, in a file of four tests on 2 ranks: a healthy one, the fault of rank 1,
two healthy ones. Verdict, culprit and cause are what a user can read: the outcome that pytest reported for the faulty
test, and strings in pytest's output. Orphans are processes of the run that are alive 5 s after pytest ended, found by a
tag in their environment. The exit status is 1 when zharness misses a bar: the right verdict in time, culprit and cause
named, nothing left, the tests after it pass.

  python scripts/fixtures_faults.py                                every fault, every fixture: a quarter of an hour
  python scripts/fixtures_faults.py --only hang --fixture process
  python scripts/fixtures_faults.py --fixture fresh --fixture pooled
  python scripts/fixtures_faults.py --jobs 4                       faster; the seconds suffer on few cores
  python scripts/fixtures_faults.py --detail                       torch's fixtures with TORCH_DISTRIBUTED_DEBUG=DETAIL
"""

PATIENCE = 5.0  # seconds that a session's processes get to leave after pytest
QUICK, HANGING = 2.0, RANK_TIMEOUT + 3.0  # the bars for a verdict
COMPARED = ("fresh", "pooled", "process", "continuous")
# Torch's defaults are 300 s for a test and, in MultiProcContinuousTest, 120 s for the group: both divided by 10 here,
# and no further: the limit of MultiProcessTestCase contains the start of its processes, 10 s on a busy machine.
TORCH_TIMEOUTS = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "30", "FIXTURES_GROUP_TIMEOUT": "12"}
ATTEMPTS = 3  # a run in which the healthy test before the fault fails says nothing about the fault


@dataclass(frozen=True)
class Fault:
    """One fault, what the verdict should be, and the patterns that have to be in the output for the cause to be named.

    ``alone`` says that rank 1 alone is at fault, so that an output which names rank 0 first blames the wrong one; else
    both ranks are parties to it, and both have to be named.
    """

    title: str
    cause: tuple[str, ...]
    expected: tuple[str, ...] = ("failed",)
    alone: bool = True
    bar: float = QUICK


SIGNAL = r"SIG{0}\b|exit ?code:? -{1}\b|Exited with -{1}\b|got -{1}\b|signal {1}\b"
STATUS = r"(?i)exit\w*( with)?( code| status)?:?( \d but got)? 3\b"
# Lines that name ranks and types whatever happened: greetings, warnings at exit, source that pytest quotes.
CHATTER = r"^\[Gloo\]|^(\[rank\d+\]:)?\[W\d|Started process \d|^>|^    "
FAULTS = {
    "raise": Fault("exception, peer in a collective", ("ValueError: the halves do not fit",)),
    "segfault": Fault("segmentation fault", (SIGNAL.format("SEGV", 11) + "|Segmentation fault",)),
    "killed": Fault("SIGKILL", (SIGNAL.format("KILL", 9),)),
    "exit": Fault("os._exit(3) in the body", (STATUS,)),
    "exit-after": Fault("exit with 3 after the body", (STATUS,)),
    "hang": Fault("hang in Python", (r"\bhang_here\b", r"\bmeet\b"), alone=False, bar=HANGING),
    "collectives": Fault("different collectives", (r"(?i)all_?reduce", r"(?i)all_?gather"), alone=False),
    "shapes": Fault("different shapes", (r"\b1117\b", r"\b1223\b"), alone=False),
    "dtypes": Fault("different dtypes", (r"float32|\bFloat\b", r"float64|\bDouble\b"), alone=False),
    "skip": Fault("skip on one rank, peer in a collective", ("no such device here",)),
    "unpicklable": Fault("exception that pickle refuses", ("Unsendable: a lock travels badly",)),
    "set-up": Fault("failure in set-up on one rank", ("OSError: the data set is gone",)),
    "child": Fault("a child process left behind", (), expected=("passed", "failed")),
    "pytest-killed": Fault("SIGKILL of pytest itself", (), expected=("none",)),
}
NO_VERDICT = ("child", "pytest-killed")  # faults that are judged by what they leave behind


@dataclass(frozen=True)
class Finding:
    """What one fixture made of one fault."""

    fault: str
    fixture: str
    outcome: str
    right: bool
    culprit: str
    cause: str
    seconds: float | None
    ended: bool
    orphans: int
    after: int

    def failings(self) -> Iterator[str]:
        """The bars that this finding misses, in words."""
        fault, judged = FAULTS[self.fault], self.fault not in NO_VERDICT
        if not self.right:
            yield f"the verdict is {self.outcome}"
        if judged and (self.seconds is None or self.seconds > fault.bar):
            yield f"the verdict took {shown(self.seconds)} s, at most {fault.bar:g}"
        if judged and self.culprit != "yes":
            yield f"the culprit is named: {self.culprit}"
        if judged and self.cause != "yes":
            yield "the cause is not named"
        if self.orphans:
            yield f"{self.orphans} processes left"
        if self.fault != "pytest-killed" and self.after < 2:
            yield f"{self.after} of the 2 tests after it passed"


def examine(fault: str, fixture: str, cap: float, environment: dict[str, str], scratch: Path) -> Finding:
    """What one fixture makes of one fault, from the first run in which the healthy test before it passed."""
    for attempt in range(ATTEMPTS):
        session, ended, orphans = attend(fault, fixture, cap, environment, scratch / f"{fault}-{fixture}-{attempt}")
        if any(test.outcome == "passed" for test in session.tests() if "before" in test.name):
            break
        print(f"{fault}, {fixture}: the test before the fault did not pass; is the machine busy?", file=sys.stderr)
    return judge(session, fault, fixture, ended, orphans)


def attend(fault: str, fixture: str, cap: float, environment: dict[str, str], room: Path) -> tuple[Session, bool, int]:
    """Run one fault once: the session, whether it ended by itself, how many processes it left."""
    session = begin(FIXTURES[fixture], fault, room, environment)
    try:
        if fault == "pytest-killed":
            marks = [room / str(rank) for rank in range(2)]
            until(lambda: all(mark.exists() for mark in marks) or session.process.poll() is not None, cap)
            ended = all(mark.exists() for mark in marks)
            session.kill()
        else:
            ended = session.ended(cap)
    finally:
        orphans = session.left_over(PATIENCE)
    return session, ended, orphans


def begin(fixture: Fixture, fault: str, room: Path, environment: dict[str, str]) -> Session:
    own = {"FIXTURES_RANKS": "2", "FIXTURES_FAULT": fault, "FIXTURES_MARKS": str(room)}
    limits = ("--rank-timeout", str(RANK_TIMEOUT)) if fixture.ours else ()
    return Session(fixture, room, own if fixture.ours else own | TORCH_TIMEOUTS | environment, limits)


def judge(session: Session, name: str, fixture: str, ended: bool, orphans: int) -> Finding:
    fault, output = FAULTS[name], told(session.output())
    tests = {part: test for test in session.tests() for part in ("fault", "3_after", "4_after") if part in test.name}
    faulty = tests.get("fault")
    outcome = faulty.outcome if faulty else "none"
    return Finding(
        name,
        fixture,
        outcome,
        outcome in fault.expected and ended,
        "-" if name in NO_VERDICT else accused(output, fault.alone),
        "-" if not fault.cause else yes(all(re.search(pattern, output) for pattern in fault.cause)),
        faulty.seconds if faulty else None,
        ended,
        orphans,
        sum(tests[part].outcome == "passed" for part in ("3_after", "4_after") if part in tests),
    )


def told(output: str) -> str:
    """What the output says about failures and skips."""
    start = re.search(r"^=+ (FAILURES|ERRORS) =+$|^=+ short test summary", output, re.MULTILINE)
    lines = output[start.start() if start else 0 :].splitlines()
    return "\n".join(line for line in lines if not re.search(CHATTER, line))


def accused(output: str, alone: bool) -> str:
    """Whether rank 1 is named; where it ``alone`` is at fault before any other rank, else along with its peer."""
    ranks = re.findall(r"(?i)\b(?:rank|process)\W{0,2}(\d+)\b", output)
    if ranks[:1] == ["1"] if alone else {"0", "1"} <= set(ranks):
        return "yes"
    return f"no, rank {ranks[0]}{'' if alone else ' only'}" if ranks else "no"


def yes(holds: bool) -> str:
    return "yes" if holds else "no"


def shown(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f}"


def table(findings: list[Finding]) -> str:
    """One row for each fault and fixture."""
    rows = []
    for finding in findings:
        judged = finding.fault not in NO_VERDICT
        verdict = finding.outcome if finding.right else f"**{finding.outcome}**"
        rows.append(
            [
                FAULTS[finding.fault].title,
                FIXTURES[finding.fixture].title,
                verdict if finding.fault != "pytest-killed" else "-",
                finding.culprit,
                finding.cause,
                shown(finding.seconds) if judged else "-",
                "ends" if finding.ended else "**never ends**",
                finding.orphans,
                f"{finding.after} of 2" if finding.fault != "pytest-killed" else "-",
            ]
        )
    headers = ["fault", "fixture", "verdict", "culprit named", "cause named", "s", "session", "orphans", "tests after"]
    return tabulate(rows, headers, "github", disable_numparse=True)


def totals(findings: list[Finding]) -> str:
    """One row for each fixture: of how many faults it makes what."""
    rows = []
    for fixture in dict.fromkeys(finding.fixture for finding in findings):
        mine = [finding for finding in findings if finding.fixture == fixture]
        named = [f for f in mine if f.fault not in NO_VERDICT]
        followed = [f for f in mine if f.fault != "pytest-killed"]
        rows.append(
            [
                FIXTURES[fixture].title,
                f"{sum(f.right for f in named)} of {len(named)}",
                f"{sum(f.culprit == 'yes' for f in named)} of {len(named)}",
                f"{sum(f.cause == 'yes' for f in named)} of {len(named)}",
                f"{sum(not f.ended for f in mine)} of {len(mine)}",
                sum(f.orphans for f in mine),
                f"{sum(f.after == 2 for f in followed)} of {len(followed)}",
            ]
        )
    headers = ["fixture", "right verdict", "culprit named", "cause named", "never ends", "orphans", "tests after pass"]
    return tabulate(rows, headers, "github", disable_numparse=True)


def caption(arguments: argparse.Namespace) -> str:
    """How the table was made, to stand under it."""
    detail = "; TORCH_DISTRIBUTED_DEBUG=DETAIL for torch's fixtures" if arguments.detail else ""
    return (
        f"2 ranks, gloo, torch {torch.__version__}, Python {platform.python_version()}. Rank 1 is at fault. Limit of a "
        f"test: {RANK_TIMEOUT} s under zharness; torch's defaults divided by 10, which are 30 s and, for the group of "
        f"the continuous fixture, 12 s: such seconds are a limit waited out{detail}. A session is killed after "
        f"{arguments.cap:g} s. Seconds run from the test's start to its verdict, the start of its ranks included. "
        "Bold: not as it should be."
    )


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--only", action="append", choices=list(FAULTS), metavar="FAULT", help=f"{', '.join(FAULTS)}")
    parser.add_argument("--fixture", action="append", choices=COMPARED, help="only this one; repeatable")
    parser.add_argument("--cap", type=float, default=90.0, help="seconds until a session is killed (default 90)")
    parser.add_argument("--jobs", type=int, default=1, help="sessions at a time (default 1)")
    parser.add_argument("--detail", action="store_true", help="give torch's fixtures TORCH_DISTRIBUTED_DEBUG=DETAIL")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep every session's output there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings there")
    return parser.parse_args()


def investigate(arguments: argparse.Namespace, scratch: Path) -> list[Finding]:
    """Every fault under every fixture, fault by fault."""
    cells = [(f, x) for f in arguments.only or FAULTS for x in arguments.fixture or COMPARED]
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if arguments.detail else {}
    one = partial(examine, cap=arguments.cap, environment=environment, scratch=scratch)
    findings = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for finding in pool.map(one, *zip(*cells, strict=True)):
            findings.append(finding)
            words = f"{finding.outcome}, {shown(finding.seconds)} s, {finding.orphans} orphans"
            print(f"{len(findings)}/{len(cells)} {finding.fault}, {finding.fixture}: {words}", file=sys.stderr)
    return findings


def main() -> None:
    arguments = parse()
    if not {"process", "continuous"}.isdisjoint(arguments.fixture or COMPARED):
        complain_without_expecttest()
    with tempfile.TemporaryDirectory(prefix="fixtures-") as scratch:
        findings = investigate(arguments, arguments.output or Path(scratch))
    print(totals(findings), table(findings), caption(arguments), sep="\n\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    missed = [(f, words) for f in findings if FIXTURES[f.fixture].ours for words in f.failings()]
    for finding, words in missed:
        print(f"MISSED {FIXTURES[finding.fixture].title}, {finding.fault}: {words}", file=sys.stderr)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
