"""Render reproductions and their verdicts as tables."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from zharness.releases.repros import NOT_YET, Repro, ReproResult, ReproVerdict, load_catalogue

MAX_PRINTED_RUNS = 10  # with more runs, only the evidence of unexpected ones is printed
MAX_OUTPUT_LINES = 30
_COLUMN_TITLES = ("bug", "what is seen", "shown on", "absent from", "otherwise")


def list_repro_rows() -> list[dict[str, str]]:
    """Return one row for every reproduction, with its symptom, its report and the affected releases."""
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
    """Return a table with one row for each run, followed by the evidence of the runs.

    If there are more than ``MAX_PRINTED_RUNS`` runs, only the evidence of runs with an unexpected verdict follows.
    """
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
    shown = [result for result in results if len(results) <= MAX_PRINTED_RUNS or not result.is_expected]
    return "\n\n".join([head, *map(describe_run, shown)])


def describe_expected(result: ReproResult) -> str:
    """Return the verdict that the script's header predicts for the release of ``result``."""
    return result.expected_verdict.value if result.expected_verdict is not None else "reproduced or not reproduced"


def describe_run(result: ReproResult) -> str:
    """Return the evidence of one run, with the end of its output if the verdict is FAILED_OTHERWISE."""
    lines = [f"{result.repro.id} on {result.repro.engine} {result.release}: {result.evidence}"]
    if result.verdict is ReproVerdict.FAILED_OTHERWISE:
        lines += [f"  | {line}" for line in result.output.splitlines()[-MAX_OUTPUT_LINES:]]
    return "\n".join([*lines, f"  again: {result.command}"])


def render_summary(results: Sequence[ReproResult], seconds: float) -> str:
    """Return the last line of the output: the number of runs, the time, and the number of runs with each verdict."""
    counts = {verdict: sum(result.verdict is verdict for result in results) for verdict in ReproVerdict}
    parts = [f"{count} {verdict.value}" for verdict, count in counts.items() if count]
    unexpected = sum(not result.is_expected for result in results)
    tail = f"; {unexpected} not as expected" if unexpected else "; all as expected"
    return f"{len(results)} runs in {seconds:.1f} s: {', '.join(parts)}{tail}"


def render_markdown(all_results: Sequence[ReproResult]) -> str:
    """Return a Markdown table that lists, for each bug, the releases that show the bug and the releases that do not."""
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
    """Return the releases whose verdict is in ``verdicts``, each with its verdict if there are several verdicts."""
    return ", ".join(
        f"{result.repro.engine} {result.release}" + (f": {result.verdict.value}" if len(verdicts) > 1 else "")
        for result in results
        if result.verdict in verdicts
    )


def render_link(repro: Repro) -> str:
    """Return the id of ``repro``, as a Markdown link to its report if there is one."""
    return f"[{repro.id}]({repro.reported})" if repro.reported.startswith("https://") else repro.id


def exit_code(results: Sequence[ReproResult]) -> int:
    """Return the exit code of a run of reproductions.

    The exit code is 3 if any verdict is FAILED_OTHERWISE or NOT_RUN. Otherwise it is 1 if any verdict contradicts the
    prediction of the script's header, and 0 if none does.
    """
    if any(result.verdict in (ReproVerdict.FAILED_OTHERWISE, ReproVerdict.NOT_RUN) for result in results):
        return 3
    return 0 if all(result.is_expected for result in results) else 1
