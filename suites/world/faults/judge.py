"""The judge of the matrix: what is wrong with a verdict, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from suites.world.faults.fault import TIMEOUT, Fault
from suites.world.faults.sessions import Told, lines_marked

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
LAST = "the_end"  # the healthy test behind the last fault; of one rank, so that other ranks are torn down before it


@dataclass(frozen=True)
class Place:
    """Which rank of how many goes wrong, and in which mode."""

    mode: str
    world_size: int
    culprit: int

    def __str__(self) -> str:
        return f"{self.mode}, rank {self.culprit} of {self.world_size}"


def module_of(fault: Fault, place: Place) -> str:
    """The text of the module with the fault; a healthy test stands before it, behind the fault before.

    It shares the ranks where they live on; where they do not, two will do.
    """
    healthy = place.world_size if place.mode == "pooled" else 2
    return preamble(fault.name, place, healthy) + fault.source + "\n"


def preamble(name: str, place: Place, healthy: int) -> str:
    what = {"culprit": place.culprit, "world_size": place.world_size, "timeout": TIMEOUT}
    return PREAMBLE.format(name=name, healthy=healthy, **what)


def modules(faults: tuple[Fault, ...], place: Place) -> dict[str, str]:
    """The modules of one session by name, in their order, with a healthy one at the end."""
    files = {f"test_{at:02}.py": module_of(fault, place) for at, fault in enumerate(faults)}
    return {**files, f"test_{len(faults):02}.py": preamble(LAST, place, 1)}


def ranks_in(text: str) -> set[int]:
    """``{0, 2, 3}`` for the ranks that ``ranks 0, 2-3 ...`` begins with; empty when it begins with none."""
    found = re.match(r"ranks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", text)
    ranks: set[int] = set()
    for run in found[1].split(", ") if found else ():
        first, _, last = run.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def complaints(fault: Fault, place: Place, told: Told | None, folder: Path) -> Iterator[str]:
    """What is wrong with the verdict on ``fault``, beside its time."""
    if told is None:
        yield "was not run"
        return
    outcome = tuple(told.outcome(when) for when in ("setup", "call", "teardown"))
    if outcome[2] == "passed, failed":  # ranks that lived on have left, and it is told of the test that they ran last
        outcome = (*outcome[:2], "failed")
    if any(got != expected != "any" for got, expected in zip(outcome, fault.outcome, strict=True)):
        yield f"setup, call and teardown: got {outcome}, expected {fault.outcome}"
    if "failed" not in outcome:
        yield "a false green"
        return
    report = next(report for report in told.reports if report.outcome == "failed")
    yield from of_headline(fault, place, report.headline)
    whole = report.text + "".join(f"\n{title}\n{text}" for title, text in report.sections)
    for pattern in fault.words:
        if not re.search(pattern.replace("CULPRIT", str(place.culprit)), whole):
            yield f"nowhere in the report: {pattern}"
    yield from of_sites(fault, place, whole)
    yield from of_stacks(fault, place, report.text)
    if len(whole) > 400_000:
        yield f"the report has {len(whole):,} characters"
    yield from of_examples(fault, place, folder)
    if told.left:
        yield f"left processes behind: {told.left}"


def of_sites(fault: Fault, place: Place, text: str) -> Iterator[str]:
    """The lines that the text has to name."""
    for line in lines_marked(module_of(fault, place)):
        if not re.search(rf"test_\d+\.py(?::|, line |\", line ){line}\b", text):
            yield f"line {line} is not named: {module_of(fault, place).splitlines()[line - 1].strip()}"


def of_the_end(fault: Fault, place: Place, told: Told | None, output: str) -> Iterator[str]:
    """What is wrong with how a session ended that ``fault`` has ended: pytest tells of it in a line of !!!!."""
    last = " ".join(line for line in output.splitlines() if line.startswith("!!!!"))
    if f"rank {place.culprit}" not in last or fault.headline not in last:
        yield f"the end does not name rank {place.culprit} and {fault.headline!r}: {last.replace('!', '')}"
    yield from of_sites(fault, place, output)
    if told is None or told.reports:
        yield "expected no report, as without ranks"


def of_headline(fault: Fault, place: Place, headline: str) -> Iterator[str]:
    """Whom the first words blame, and for what."""
    headline = headline.removeprefix("while the rank pool was torn down; this was the last test that it ran:\n")
    everybody = set(range(place.world_size))
    expected = {
        "culprit": {place.culprit},
        "all": everybody,
        "others": everybody - {place.culprit},
        "either": ranks_in(headline),
    }[fault.blamed]
    if ranks_in(headline) != expected:
        yield f"blames {sorted(ranks_in(headline))}, expected {sorted(expected)}: {headline[:300]}"
    pattern = fault.headline.replace("CULPRIT", str(place.culprit))
    if not re.search(pattern, headline, re.DOTALL):
        yield f"the headline does not say {pattern!r}: {headline[:300]}"


def of_stacks(fault: Fault, place: Place, text: str) -> Iterator[str]:
    """Whose stacks are shown."""
    shown: set[int] = set()
    for title in re.findall(r"stack of (ranks? .*)", text):
        shown |= ranks_in(title)
    expected = set(range(place.world_size)) if fault.stacks != "none" else set()
    if fault.stacks == "others":
        expected -= {place.culprit}
    if not expected <= shown:
        yield f"stacks of ranks {sorted(shown)}, expected {sorted(expected)}"


def of_examples(fault: Fault, place: Place, folder: Path) -> Iterator[str]:
    """A Hypothesis test ran the same examples on every rank, and the last one is the minimum."""
    notes = folder / "notes" / fault.name
    if "x=100" not in fault.words:
        return
    seen: dict[str, list[str]] = {}
    for line in notes.read_text().splitlines():
        rank, x = line.split()
        seen.setdefault(rank, []).append(x)
    if len(seen) != place.world_size or len({tuple(examples) for examples in seen.values()}) != 1:
        yield f"the ranks ran different examples: {seen}"
    if any(examples[-1] != "100" for examples in seen.values()):
        yield f"the last examples are {[examples[-1] for examples in seen.values()]}, expected 100"
