"""Reproductions and their verdicts as tables."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from zharness.releases.repros import NOT_YET, Repro, ReproResult, Verdict, catalogue

FEW = 10  # runs whose evidence is printed whatever it is; of more, only what is not as expected
LAST_LINES = 30
_HEAD = ("bug", "what is seen", "shown on", "absent from", "otherwise")


def rows() -> list[dict[str, str]]:
    """Every reproduction: what it shows, where it was reported, which releases have it."""
    return [
        {
            "id": repro.id,
            "engine": repro.engine,
            "symptom": repro.symptom,
            "affects": repro.affects,
            "fixed": repro.fixed or NOT_YET,
            "reported": repro.reported,
        }
        for repro in catalogue()
    ]


def table(found: Sequence[ReproResult]) -> str:
    """One row for each run, and below the evidence: of all when they are few, else of what was not expected."""
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
    told = [result for result in found if len(found) <= FEW or not result.as_expected]
    return "\n\n".join([head, *map(paragraph, told)])


def expectation(result: ReproResult) -> str:
    """What the header says that the release should show."""
    return result.expected.value if result.expected is not None else "reproduced or not reproduced"


def paragraph(result: ReproResult) -> str:
    """The evidence of one run; the end of what was printed where it failed otherwise."""
    lines = [f"{result.repro.id} on {result.repro.engine} {result.release}: {result.evidence}"]
    if result.verdict is Verdict.FAILED_OTHERWISE:
        lines += [f"  | {line}" for line in result.output.splitlines()[-LAST_LINES:]]
    return "\n".join([*lines, f"  again: {result.command}"])


def summary(found: Sequence[ReproResult], seconds: float) -> str:
    """The last line of a run."""
    counts = {verdict: sum(result.verdict is verdict for result in found) for verdict in Verdict}
    parts = [f"{count} {verdict.value}" for verdict, count in counts.items() if count]
    unexpected = sum(not result.as_expected for result in found)
    tail = f"; {unexpected} not as expected" if unexpected else "; all as expected"
    return f"{len(found)} runs in {seconds:.1f} s: {', '.join(parts)}{tail}"


def markdown(found: Sequence[ReproResult]) -> str:
    """Bugs x releases as Markdown: a row for each bug, with the releases that show it and those that do not."""
    by_bug: dict[Repro, list[ReproResult]] = {}
    for result in found:
        by_bug.setdefault(result.repro, []).append(result)
    body = [
        [named(repro), repro.symptom.replace("|", "\\|"), *(cell(results, kind) for kind in _KINDS)]
        for repro, results in by_bug.items()
    ]
    return tabulate(body, _HEAD, tablefmt="github", disable_numparse=True)


_KINDS = (
    (Verdict.REPRODUCED,),
    (Verdict.NOT_REPRODUCED,),
    (Verdict.FAILED_OTHERWISE, Verdict.UNSUPPORTED, Verdict.NOT_RUN),
)


def cell(results: Sequence[ReproResult], kind: Sequence[Verdict]) -> str:
    """The releases whose verdict is of ``kind``; with the verdict where ``kind`` has several."""
    return ", ".join(
        f"{result.repro.engine} {result.release}" + (f": {result.verdict.value}" if len(kind) > 1 else "")
        for result in results
        if result.verdict in kind
    )


def named(repro: Repro) -> str:
    """The id, with a link to the report where there is one."""
    return f"[{repro.id}]({repro.reported})" if repro.reported.startswith("https://") else repro.id


def exit_code(found: Sequence[ReproResult]) -> int:
    """0 when every release showed what it should, 1 when one did not, 3 when a run failed otherwise or was not made."""
    if any(result.verdict in (Verdict.FAILED_OTHERWISE, Verdict.NOT_RUN) for result in found):
        return 3
    return 0 if all(result.as_expected for result in found) else 1
