"""Reproductions and their verdicts as tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from tabulate import tabulate
from tqdm import tqdm

from zharness.errors import UsageError
from zharness.releases.repros import Repro, ReproResult, Verdict, catalogue, find, run


def rows() -> list[dict[str, str]]:
    """Every reproduction: what it shows, where it was reported, which releases have it."""
    return [
        {
            "id": repro.id,
            "engine": repro.engine,
            "symptom": repro.symptom,
            "affects": repro.affects,
            "fixed": repro.fixed or "not yet",
            "reported": repro.reported,
        }
        for repro in catalogue()
    ]


def chosen(identifiers: Sequence[str], every: bool) -> list[Repro]:
    """The reproductions asked for. Raises UsageError for an unknown id, and where none is asked for."""
    if every:
        return list(catalogue())
    if not identifiers:
        raise UsageError("no reproduction was named; name one by its issue, as in `zharness repro 7352`, or pass --all")
    return [find(identifier) for identifier in identifiers]


def results(repros: Sequence[Repro], engine: str | None, release: str | None) -> Iterator[ReproResult]:
    """Run each reproduction on ``release``, or on the sides that its header names, with progress on standard error.

    Raises UsageError when ``engine`` is given and a reproduction is not of that engine.
    """
    for repro in repros:
        if engine is not None and repro.engine != engine:
            raise UsageError(
                f"reproduction {repro.id} is of {repro.engine}, not of {engine!r}; name it with its engine"
            )
    sides = [(repro, side) for repro in repros for side in ((release,) if release else repro.sides())]
    with tqdm(sides, unit="run", leave=False, disable=not sys.stderr.isatty()) as bar:
        for repro, side in bar:
            bar.set_postfix_str(f"{repro.id} on {repro.engine} {side or '(installed)'}")
            yield run(repro, side)


def table(found: Sequence[ReproResult]) -> str:
    """One row for each run, and the evidence of each below."""
    body = [
        [
            result.repro.id,
            f"{result.repro.engine} {result.release}",
            result.verdict.value,
            "as expected" if result.as_expected else f"expected {expectation(result)}",
            f"{result.seconds:.1f} s",
        ]
        for result in found
    ]
    head = tabulate(body, ["id", "release", "verdict", "", "took"], tablefmt="simple", disable_numparse=True)
    return "\n\n".join([head, *(paragraph(result) for result in found)])


def expectation(result: ReproResult) -> str:
    """What the header says that the release should show."""
    return result.expected.value if result.expected is not None else "reproduced or not reproduced"


def paragraph(result: ReproResult) -> str:
    """The evidence of one run; the end of what was printed where it failed otherwise."""
    lines = [f"{result.repro.id} on {result.repro.engine} {result.release}: {result.evidence}"]
    if result.verdict is Verdict.FAILED_OTHERWISE:
        lines += [f"  | {line}" for line in result.output.splitlines()[-30:]]
    return "\n".join([*lines, f"  again: {result.command}"])


def exit_code(found: Sequence[ReproResult]) -> int:
    """0 when every release showed what it should, 1 when one did not, 3 when a run failed otherwise."""
    if any(result.verdict is Verdict.FAILED_OTHERWISE for result in found):
        return 3
    return 0 if all(result.as_expected for result in found) else 1
