"""Compare how zharness and torch's test fixtures report the same faults: verdict, rank, cause, leftover processes."""

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
from fixtures.session import FIXTURES, RANK_TIMEOUT, Fixture, Session, require_expecttest, wait_until
from tabulate import tabulate

EPILOG = """
Every fault runs in a pytest process of its own, in a file of four tests on 2 ranks: a healthy test, the fault of rank
1, two healthy tests. Verdict, culprit and cause are read from what a user sees: the outcome that pytest reported for
the faulty test, and strings in pytest's output. Orphans are processes of the run that are alive 5 s after pytest ended,
identified by a tag in their environment. The exit status is 1 if zharness misses a requirement: the right verdict in
time, the culprit and the cause are named, no process is left, the tests after the fault pass.

  python scripts/fixtures_faults.py                                every fault, every fixture: a quarter of an hour
  python scripts/fixtures_faults.py --only hang --fixture process
  python scripts/fixtures_faults.py --fixture fresh --fixture pooled
  python scripts/fixtures_faults.py --jobs 4                       faster; the seconds suffer on few cores
  python scripts/fixtures_faults.py --detail                       torch's fixtures with TORCH_DISTRIBUTED_DEBUG=DETAIL
"""

PATIENCE = 5.0  # seconds for a session's processes to end after pytest
QUICK, HANGING = 2.0, RANK_TIMEOUT + 3.0  # limits in seconds on the time until a verdict
COMPARED = ("fresh", "pooled", "process", "continuous")
# torch's defaults are 300 s for a test and, in MultiProcContinuousTest, 120 s for the group. Here both are divided by
# 10, not by more: the limit of MultiProcessTestCase includes the start of its processes, 10 s on a busy machine.
TORCH_TIMEOUTS = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "30", "FIXTURES_GROUP_TIMEOUT": "12"}
ATTEMPTS = 3  # runs: a run in which the healthy test before the fault fails cannot be judged


@dataclass(frozen=True)
class Fault:
    """One fault, its expected outcomes, and the patterns of the output that name its cause.

    With ``alone``, only rank 1 is at fault, so an output that names rank 0 first is wrong. Otherwise both ranks are
    involved and both have to be named. ``bar`` is the time limit in seconds.
    """

    title: str
    cause: tuple[str, ...]
    expected: tuple[str, ...] = ("failed",)
    alone: bool = True
    bar: float = QUICK


SIGNAL = r"SIG{0}\b|exit ?code:? -{1}\b|Exited with -{1}\b|got -{1}\b|signal {1}\b"
STATUS = r"(?i)exit\w*( with)?( code| status)?:?( \d but got)? 3\b"
# Lines that name ranks and types without regard to the fault: log lines, warnings at exit, source quoted by pytest.
CHATTER = r"^\[Gloo\]|^(\[rank\d+\]:)?\[W\d|Started process \d|^>|^    "
FAULTS = {
    "raise": Fault("exception, peer in a collective", ("ValueError: the halves do not fit",)),
    "segfault": Fault("segmentation fault", (SIGNAL.format("SEGV", 11) + "|Segmentation fault",)),
    "killed": Fault("SIGKILL", (SIGNAL.format("KILL", 9),)),
    "exit": Fault("os._exit(3) in the body", (STATUS,)),
    "exit-after": Fault("exit with 3 after the body", (STATUS,)),
    "hang": Fault("hang in Python", (r"\bhang_here\b", r"\breduce_with_peer\b"), alone=False, bar=HANGING),
    "collectives": Fault("different collectives", (r"(?i)all_?reduce", r"(?i)all_?gather"), alone=False),
    "shapes": Fault("different shapes", (r"\b1117\b", r"\b1223\b"), alone=False),
    "dtypes": Fault("different dtypes", (r"float32|\bFloat\b", r"float64|\bDouble\b"), alone=False),
    "skip": Fault("skip on one rank, peer in a collective", ("no such device here",)),
    "unpicklable": Fault("exception that pickle refuses", ("Unpicklable: an exception with a lock",)),
    "set-up": Fault("failure in set-up on one rank", ("OSError: the data set is gone",)),
    "child": Fault("a child process left behind", (), expected=("passed", "failed")),
    "pytest-killed": Fault("SIGKILL of pytest itself", (), expected=("none",)),
}
NO_VERDICT = ("child", "pytest-killed")  # faults that are judged by leftover processes only


@dataclass(frozen=True)
class Finding:
    """How one fixture reported one fault."""

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

    def describe_misses(self) -> Iterator[str]:
        """Yield a message for each requirement that this finding misses."""
        fault, has_verdict = FAULTS[self.fault], self.fault not in NO_VERDICT
        if not self.right:
            yield f"the verdict is {self.outcome}"
        if has_verdict and (self.seconds is None or self.seconds > fault.bar):
            yield f"the verdict took {format_seconds(self.seconds)} s, at most {fault.bar:g}"
        if has_verdict and self.culprit != "yes":
            yield f"the culprit is named: {self.culprit}"
        if has_verdict and self.cause != "yes":
            yield "the cause is not named"
        if self.orphans:
            yield f"{self.orphans} processes left"
        if self.fault != "pytest-killed" and self.after < 2:
            yield f"{self.after} of the 2 tests after it passed"


def examine(fault: str, fixture: str, cap: float, environment: dict[str, str], scratch: Path) -> Finding:
    """Run one fault under one fixture and judge the first run in which the healthy test before it passed."""
    for attempt in range(ATTEMPTS):
        session, ended, orphans = run_fault(fault, fixture, cap, environment, scratch / f"{fault}-{fixture}-{attempt}")
        if any(test.outcome == "passed" for test in session.tests() if "before" in test.name):
            break
        print(f"{fault}, {fixture}: the test before the fault did not pass; is the machine busy?", file=sys.stderr)
    return judge(session, fault, fixture, ended, orphans)


def run_fault(
    fault: str, fixture: str, cap: float, environment: dict[str, str], folder: Path
) -> tuple[Session, bool, int]:
    """Run one fault once; return the session, whether it ended by itself, and how many processes it left."""
    session = start_session(FIXTURES[fixture], fault, folder, environment)
    try:
        if fault == "pytest-killed":
            marks = [folder / str(rank) for rank in range(2)]
            wait_until(lambda: all(mark.exists() for mark in marks) or session.process.poll() is not None, cap)
            ended = all(mark.exists() for mark in marks)
            session.kill()
        else:
            ended = session.wait(cap)
    finally:
        orphans = session.kill_leftovers(PATIENCE)
    return session, ended, orphans


def start_session(fixture: Fixture, fault: str, folder: Path, environment: dict[str, str]) -> Session:
    """Start the pytest session of one fault; ``environment`` is set for torch's fixtures only."""
    variables = {"FIXTURES_RANKS": "2", "FIXTURES_FAULT": fault, "FIXTURES_MARKS": str(folder)}
    limits = ("--rank-timeout", str(RANK_TIMEOUT)) if fixture.ours else ()
    return Session(fixture, folder, variables if fixture.ours else variables | TORCH_TIMEOUTS | environment, limits)


def judge(session: Session, name: str, fixture: str, ended: bool, orphans: int) -> Finding:
    """Return the finding of a session that has ended."""
    fault, output = FAULTS[name], extract_failures(session.output())
    tests = {part: test for test in session.tests() for part in ("fault", "3_after", "4_after") if part in test.name}
    faulty = tests.get("fault")
    outcome = faulty.outcome if faulty else "none"
    return Finding(
        name,
        fixture,
        outcome,
        outcome in fault.expected and ended,
        "-" if name in NO_VERDICT else judge_culprit(output, fault.alone),
        "-" if not fault.cause else yes_or_no(all(re.search(pattern, output) for pattern in fault.cause)),
        faulty.seconds if faulty else None,
        ended,
        orphans,
        sum(tests[part].outcome == "passed" for part in ("3_after", "4_after") if part in tests),
    )


def extract_failures(output: str) -> str:
    """Return the part of pytest's output about failures and skips, without ``CHATTER``."""
    start = re.search(r"^=+ (FAILURES|ERRORS) =+$|^=+ short test summary", output, re.MULTILINE)
    lines = output[start.start() if start else 0 :].splitlines()
    return "\n".join(line for line in lines if not re.search(CHATTER, line))


def judge_culprit(output: str, alone: bool) -> str:
    """Return ``yes`` if the output names rank 1 first (for ``alone``) or both ranks, else the ranks that it names."""
    ranks = re.findall(r"(?i)\b(?:rank|process)\W{0,2}(\d+)\b", output)
    if ranks[:1] == ["1"] if alone else {"0", "1"} <= set(ranks):
        return "yes"
    return f"no, rank {ranks[0]}{'' if alone else ' only'}" if ranks else "no"


def yes_or_no(is_true: bool) -> str:
    return "yes" if is_true else "no"


def format_seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f}"


def render_table(findings: list[Finding]) -> str:
    """Return a table with one row per fault and fixture."""
    rows = []
    for finding in findings:
        has_verdict = finding.fault not in NO_VERDICT
        verdict = finding.outcome if finding.right else f"**{finding.outcome}**"
        rows.append(
            [
                FAULTS[finding.fault].title,
                FIXTURES[finding.fixture].title,
                verdict if finding.fault != "pytest-killed" else "-",
                finding.culprit,
                finding.cause,
                format_seconds(finding.seconds) if has_verdict else "-",
                "ends" if finding.ended else "**never ends**",
                finding.orphans,
                f"{finding.after} of 2" if finding.fault != "pytest-killed" else "-",
            ]
        )
    headers = ["fault", "fixture", "verdict", "culprit named", "cause named", "s", "session", "orphans", "tests after"]
    return tabulate(rows, headers, "github", disable_numparse=True)


def render_totals(findings: list[Finding]) -> str:
    """Return a table with one row per fixture: the numbers of faults that the fixture reported correctly."""
    rows = []
    for fixture in dict.fromkeys(finding.fixture for finding in findings):
        fixture_findings = [finding for finding in findings if finding.fixture == fixture]
        with_verdict = [f for f in fixture_findings if f.fault not in NO_VERDICT]
        followed = [f for f in fixture_findings if f.fault != "pytest-killed"]
        rows.append(
            [
                FIXTURES[fixture].title,
                f"{sum(f.right for f in with_verdict)} of {len(with_verdict)}",
                f"{sum(f.culprit == 'yes' for f in with_verdict)} of {len(with_verdict)}",
                f"{sum(f.cause == 'yes' for f in with_verdict)} of {len(with_verdict)}",
                f"{sum(not f.ended for f in fixture_findings)} of {len(fixture_findings)}",
                sum(f.orphans for f in fixture_findings),
                f"{sum(f.after == 2 for f in followed)} of {len(followed)}",
            ]
        )
    headers = ["fixture", "right verdict", "culprit named", "cause named", "never ends", "orphans", "tests after pass"]
    return tabulate(rows, headers, "github", disable_numparse=True)


def render_caption(arguments: argparse.Namespace) -> str:
    """Return the caption of the tables: versions and limits."""
    detail = "; TORCH_DISTRIBUTED_DEBUG=DETAIL for torch's fixtures" if arguments.detail else ""
    return (
        f"2 ranks, gloo, torch {torch.__version__}, Python {platform.python_version()}. Rank 1 is at fault. Limit of a "
        f"test: {RANK_TIMEOUT} s under zharness; torch's defaults divided by 10, which are 30 s and, for the group of "
        f"the continuous fixture, 12 s: such seconds mean that the limit was reached{detail}. A session is killed "
        f"after {arguments.cap:g} s. Seconds start with the test and include the start of its ranks. "
        "Bold: wrong."
    )


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--only", action="append", choices=list(FAULTS), metavar="FAULT", help=f"{', '.join(FAULTS)}")
    parser.add_argument("--fixture", action="append", choices=COMPARED, help="only this fixture; repeatable")
    parser.add_argument("--cap", type=float, default=90.0, help="seconds until a session is killed (default 90)")
    parser.add_argument("--jobs", type=int, default=1, help="sessions at a time (default 1)")
    parser.add_argument("--detail", action="store_true", help="give torch's fixtures TORCH_DISTRIBUTED_DEBUG=DETAIL")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep every session's output in FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings to FILE")
    return parser.parse_args()


def investigate(arguments: argparse.Namespace, scratch: Path) -> list[Finding]:
    """Run every fault under every fixture, fault by fault; return the findings."""
    cells = [(f, x) for f in arguments.only or FAULTS for x in arguments.fixture or COMPARED]
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if arguments.detail else {}
    examine_cell = partial(examine, cap=arguments.cap, environment=environment, scratch=scratch)
    findings = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for finding in pool.map(examine_cell, *zip(*cells, strict=True)):
            findings.append(finding)
            result = f"{finding.outcome}, {format_seconds(finding.seconds)} s, {finding.orphans} orphans"
            print(f"{len(findings)}/{len(cells)} {finding.fault}, {finding.fixture}: {result}", file=sys.stderr)
    return findings


def main() -> None:
    arguments = parse_arguments()
    if not {"process", "continuous"}.isdisjoint(arguments.fixture or COMPARED):
        require_expecttest()
    with tempfile.TemporaryDirectory(prefix="fixtures-") as scratch:
        findings = investigate(arguments, arguments.output or Path(scratch))
    print(render_totals(findings), render_table(findings), render_caption(arguments), sep="\n\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
    missed = [(f, message) for f in findings if FIXTURES[f.fixture].ours for message in f.describe_misses()]
    for finding, message in missed:
        print(f"MISSED {FIXTURES[finding.fixture].title}, {finding.fault}: {message}", file=sys.stderr)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
