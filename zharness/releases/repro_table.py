"""Reproductions and their verdicts as tables."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from zharness.releases.repros import NOT_YET, Repro, ReproResult, ReproVerdict, load_catalogue

MAX_PRINTED_RUNS = 10  # runs whose evidence is printed whatever it is; of more, only what is not as expected
MAX_OUTPUT_LINES = 30
_COLUMN_TITLES = ("bug", "what is seen", "shown on", "absent from", "otherwise")


def list_repro_rows() -> list[dict[str, str]]:
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
        for repro in load_catalogue()
    ]


def render_repro_results(results: Sequence[ReproResult]) -> str:
    """One row for each run, and below the evidence: of all when they are few, else of what was not expected."""
    body = [
        [
            result.repro.id,
            f"{result.repro.engine} {result.release}",
            result.verdict.value,
            "as expected" if result.is_expected else f"expected {describe_expected(result)}",
            f"{result.seconds:.1f} s",
        ]
        for result in results
    ]
    head = tabulate(body, ["id", "release", "verdict", "", "took"], tablefmt="simple", disable_numparse=True)
    told = [result for result in results if len(results) <= MAX_PRINTED_RUNS or not result.is_expected]
    return "\n\n".join([head, *map(describe_run, told)])


def describe_expected(result: ReproResult) -> str:
    """What the header says that the release should show."""
    return result.expected_verdict.value if result.expected_verdict is not None else "reproduced or not reproduced"


def describe_run(result: ReproResult) -> str:
    """The evidence of one run; the end of what was printed where it failed otherwise."""
    lines = [f"{result.repro.id} on {result.repro.engine} {result.release}: {result.evidence}"]
    if result.verdict is ReproVerdict.FAILED_OTHERWISE:
        lines += [f"  | {line}" for line in result.output.splitlines()[-MAX_OUTPUT_LINES:]]
    return "\n".join([*lines, f"  again: {result.command}"])


def render_summary(results: Sequence[ReproResult], seconds: float) -> str:
    """The last line of a run."""
    counts = {verdict: sum(result.verdict is verdict for result in results) for verdict in ReproVerdict}
    parts = [f"{count} {verdict.value}" for verdict, count in counts.items() if count]
    unexpected = sum(not result.is_expected for result in results)
    tail = f"; {unexpected} not as expected" if unexpected else "; all as expected"
    return f"{len(results)} runs in {seconds:.1f} s: {', '.join(parts)}{tail}"


def render_markdown(all_results: Sequence[ReproResult]) -> str:
    """Bugs x releases as Markdown: a row for each bug, with the releases that show it and those that do not."""
    by_bug: dict[Repro, list[ReproResult]] = {}
    for result in all_results:
        by_bug.setdefault(result.repro, []).append(result)
    body = [
        [
            render_link(repro),
            repro.symptom.replace("|", "\\|"),
            *(render_releases(results, kind) for kind in _COLUMN_VERDICTS),
        ]
        for repro, results in by_bug.items()
    ]
    return tabulate(body, _COLUMN_TITLES, tablefmt="github", disable_numparse=True)


_COLUMN_VERDICTS = (
    (ReproVerdict.REPRODUCED,),
    (ReproVerdict.NOT_REPRODUCED,),
    (ReproVerdict.FAILED_OTHERWISE, ReproVerdict.UNSUPPORTED, ReproVerdict.NOT_RUN),
)


def render_releases(results: Sequence[ReproResult], verdicts: Sequence[ReproVerdict]) -> str:
    """The releases whose verdict is of ``kind``; with the verdict where ``kind`` has several."""
    return ", ".join(
        f"{result.repro.engine} {result.release}" + (f": {result.verdict.value}" if len(verdicts) > 1 else "")
        for result in results
        if result.verdict in verdicts
    )


def render_link(repro: Repro) -> str:
    """The id, with a link to the report where there is one."""
    return f"[{repro.id}]({repro.reported})" if repro.reported.startswith("https://") else repro.id


def exit_code(results: Sequence[ReproResult]) -> int:
    """0 when every release showed what it should, 1 when one did not, 3 when a run failed otherwise or was not made."""
    if any(result.verdict in (ReproVerdict.FAILED_OTHERWISE, ReproVerdict.NOT_RUN) for result in results):
        return 3
    return 0 if all(result.is_expected for result in results) else 1
