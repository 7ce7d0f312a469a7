"""The judge of the fault matrix: compare the report of a fault with what the fault says that it has to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from suites.world.faults.fault import TIMEOUT, Fault
from suites.world.faults.sessions import RecordedTest, find_marked_lines

PREAMBLE = """\
import atexit, ctypes, os, resource, signal, subprocess, sys, threading
from pathlib import Path

import pytest, torch, torch.distributed as dist
from zharness.world import assert_together, exchange

CULPRIT, WORLD, TIMEOUT = {culprit}, {world_size}, {timeout}
pytestmark = pytest.mark.world_size(WORLD)

def note(what):
    with open(f"{{Path(__file__).parent}}/notes/{name}" + (".pids" if isinstance(what, int) else ""), "a") as file:
        file.write(f"{{what}}\\n")

@pytest.mark.world_size({healthy})
def test_healthy_before_{name}(rank, world_size, tmp_path):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size))
    assert list(tmp_path.iterdir()) == []


"""
HEALTHY = "test_healthy_before_"
LAST = "the_end"  # the healthy test after the last fault; of one rank, so that other ranks are torn down before it


@dataclass(frozen=True)
class FaultPlacement:
    """The isolation mode, the world size and the rank that goes wrong."""

    mode: str
    world_size: int
    culprit: int

    def __str__(self) -> str:
        return f"{self.mode}, rank {self.culprit} of {self.world_size}"


def build_module(fault: Fault, placement: FaultPlacement) -> str:
    """Return the text of the module with the fault, preceded by a healthy test.

    The healthy test has the world size of the fault if ranks are pooled, so that it runs on the ranks that the fault
    before left; else 2.
    """
    healthy = placement.world_size if placement.mode == "pooled" else 2
    return build_preamble(fault.name, placement, healthy) + fault.source + "\n"


def build_preamble(name: str, placement: FaultPlacement, healthy: int) -> str:
    """Return the imports, constants and the healthy test that precede a fault."""
    constants = {"culprit": placement.culprit, "world_size": placement.world_size, "timeout": TIMEOUT}
    return PREAMBLE.format(name=name, healthy=healthy, **constants)


def build_modules(faults: tuple[Fault, ...], placement: FaultPlacement) -> dict[str, str]:
    """Return the modules of one session by file name, in order, with a healthy one at the end."""
    files = {f"test_{at:02}.py": build_module(fault, placement) for at, fault in enumerate(faults)}
    return {**files, f"test_{len(faults):02}.py": build_preamble(LAST, placement, 1)}


def parse_ranks(text: str) -> set[int]:
    """Return the ranks that a text begins with: ``{0, 2, 3}`` for ``ranks 0, 2-3 ...``; empty if there are none."""
    match = re.match(r"ranks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text)
    ranks: set[int] = set()
    for run in match[1].split(", ") if match else ():
        first, _, last = run.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def find_complaints(
    fault: Fault, placement: FaultPlacement, record: RecordedTest | None, folder: Path
) -> Iterator[str]:
    """Yield what is wrong with the report of ``fault``, except its time."""
    if record is None:
        yield "was not run"
        return
    outcome = tuple(record.outcome(when) for when in ("setup", "call", "teardown"))
    if outcome[2] == "passed, failed":  # pooled ranks ended later, which is reported for the last test that they ran
        outcome = (*outcome[:2], "failed")
    if any(got != expected != "any" for got, expected in zip(outcome, fault.outcome, strict=True)):
        yield f"setup, call and teardown: got {outcome}, expected {fault.outcome}"
    if not any(report.outcome == "failed" for report in record.reports):
        yield "a false green"
        return
    report = next(report for report in record.reports if report.outcome == "failed")
    yield from check_headline(fault, placement, report.headline)
    whole = report.text + "".join(f"\n{title}\n{text}" for title, text in report.sections)
    for pattern in fault.patterns:
        if not re.search(pattern.replace("CULPRIT", str(placement.culprit)), whole):
            yield f"nowhere in the report: {pattern}"
    yield from check_sites(fault, placement, whole)
    yield from check_stacks(fault, placement, report.text)
    if len(whole) > 400_000:
        yield f"the report has {len(whole):,} characters"
    yield from check_examples(fault, placement, folder)
    if record.leftover_pids:
        yield f"left processes behind: {record.leftover_pids}"


def check_sites(fault: Fault, placement: FaultPlacement, text: str) -> Iterator[str]:
    """Yield the marked lines that the text does not name."""
    for line in find_marked_lines(build_module(fault, placement)):
        if not re.search(rf"test_\d+\.py(?::|, line |\", line ){line}\b", text):
            yield f"line {line} is not named: {build_module(fault, placement).splitlines()[line - 1].strip()}"


def check_session_end(
    fault: Fault, placement: FaultPlacement, record: RecordedTest | None, output: str
) -> Iterator[str]:
    """Yield what is wrong with the end of a session that ``fault`` ended, which pytest reports in a line of !!!!."""
    last = " ".join(line for line in output.splitlines() if line.startswith("!!!!"))
    if f"rank {placement.culprit}" not in last or fault.headline not in last:
        yield f"the end does not name rank {placement.culprit} and {fault.headline!r}: {last.replace('!', '')}"
    yield from check_sites(fault, placement, output)
    if record is None or record.reports:
        yield "expected no report, as in a test without ranks"


def check_headline(fault: Fault, placement: FaultPlacement, headline: str) -> Iterator[str]:
    """Yield wrongly blamed ranks and a wrong cause in the failure's message."""
    headline = headline.removeprefix("while the rank pool was torn down; this was the last test that it ran:\n")
    all_ranks = set(range(placement.world_size))
    expected = {
        "culprit": {placement.culprit},
        "all": all_ranks,
        "others": all_ranks - {placement.culprit},
        "either": parse_ranks(headline),
    }[fault.blamed]
    if parse_ranks(headline) != expected:
        yield f"blames {sorted(parse_ranks(headline))}, expected {sorted(expected)}: {headline[:300]}"
    pattern = fault.headline.replace("CULPRIT", str(placement.culprit))
    if not re.search(pattern, headline, re.DOTALL):
        yield f"the headline does not say {pattern!r}: {headline[:300]}"


def check_stacks(fault: Fault, placement: FaultPlacement, text: str) -> Iterator[str]:
    """Yield a complaint if a stack that has to be shown is missing."""
    shown: set[int] = set()
    for title in re.findall(r"stack of (ranks? .*)", text):
        shown |= parse_ranks(title)
    expected = set(range(placement.world_size)) if fault.stacks != "none" else set()
    if fault.stacks == "others":
        expected -= {placement.culprit}
    if not expected <= shown:
        yield f"stacks of ranks {sorted(shown)}, expected {sorted(expected)}"


def check_examples(fault: Fault, placement: FaultPlacement, folder: Path) -> Iterator[str]:
    """Yield a complaint unless a Hypothesis test ran the same examples on every rank and ended with the minimal one."""
    notes = folder / "notes" / fault.name
    if "x=100" not in fault.patterns:
        return
    seen: dict[str, list[str]] = {}
    for line in notes.read_text().splitlines():
        rank, x = line.split()
        seen.setdefault(rank, []).append(x)
    if len(seen) != placement.world_size or len({tuple(examples) for examples in seen.values()}) != 1:
        yield f"the ranks ran different examples: {seen}"
    if any(examples[-1] != "100" for examples in seen.values()):
        yield f"the last examples are {[examples[-1] for examples in seen.values()]}, expected 100"
