"""Derive a cell's verdict from the outcomes of its ranks, the judgement, and the expected failure that covers it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import zharness
from zharness.cell import TF32
from zharness.run.changes import failure_signature
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.observe_and_judge import Judgement
from zharness.run.record import Record, Verdict
from zharness.world import GroupOutcome, RankEnd, RankOutcome

# Packages of zharness that are under test like any engine: an exception from their code is a failure of the engine.
PACKAGES_UNDER_TEST = ("reference", "mutants")
# The exceptions that torch raises for unsuitable operands, and for a kernel that failed.
TORCH_ERRORS = ("builtins.RuntimeError", ".AcceleratorError")
# The package of zharness with the code of the models, which an engine calls with weights that it prepared.
MODEL_PACKAGE = "workload"


def make_failure_record(outcome: GroupOutcome, blank_record: Record) -> Record:
    """Build the record of a cell in which a rank did not return. The cause is the first failure of a rank.

    On a mesh the cause ends with the coordinates of that rank.
    """
    cause, cell = outcome.cause, blank_record.cell
    assert cause is not None, "called only for a group that failed"
    where = cell.mesh.describe_rank(cause.rank, cell.world_size)
    return replace(
        blank_record,
        verdict=verdict_of_rank_failure(cause),
        cause=f"{cause.describe()}; rank {cause.rank} is {where}" if where else cause.describe(),
        details=outcome.describe(),
        raising_frame=cause.raising_frame,
    )


def verdict_of_rank_failure(cause: RankOutcome) -> Verdict:
    """Return the verdict for a group of ranks whose first failure is ``cause``."""
    if cause.end is RankEnd.HUNG:
        return Verdict.HANG
    if cause.end is RankEnd.RAISED:
        return verdict_of_exception(cause.exception, cause.innermost_file)
    return Verdict.CRASH


def verdict_of_exception(exception: str, innermost_file: str) -> Verdict:
    """Return the verdict for an exception, from the name of its class and the file of its innermost frame.

    An EngineContractError is ``fail``, and an EngineRefusal is ``crash``, because the engine's own code raised it. Any
    other exception raised in the harness's own code is ``error``. For TORCH_ERRORS it is ``crash``, because torch
    raises them for unsuitable operands even if the harness calls torch, and CUDA reports the error of an engine's
    kernel in a later call.
    """
    if exception.endswith(".EngineContractError"):
        return Verdict.FAIL
    if exception.endswith(".EngineRefusal"):
        return Verdict.CRASH
    is_harness = find_package(innermost_file) not in ("", *PACKAGES_UNDER_TEST)
    return Verdict.ERROR if is_harness and not exception.endswith(TORCH_ERRORS) else Verdict.CRASH


def find_package(file: str) -> str:
    """Return the folder or file of the package zharness in which ``file`` lies, or '' if it lies elsewhere."""
    package = Path(zharness.__file__).parent
    return Path(file).relative_to(package).parts[0] if Path(file).is_relative_to(package) else ""


def is_raised_by_model(cause: RankOutcome) -> bool:
    """Return whether the code of a model raised an exception that the harness does not define, such as IndexError.

    An engine that leaves a weight sharded causes such an exception. A mistake in the model's code causes it too.
    """
    is_ours = cause.exception.startswith("zharness.")
    return cause.end is RankEnd.RAISED and find_package(cause.innermost_file) == MODEL_PACKAGE and not is_ours


def blame_engine(record: Record) -> Record:
    """Return ``record``, in which a model's code raised on a rank, as a crash, since the plain model does not raise."""
    note = "the model's code raised under the engine only: plain PyTorch runs its forward and backward"
    return replace(record, verdict=Verdict.CRASH, notes=(*record.notes, note))


def make_judged_record(outcome: GroupOutcome, blank_record: Record) -> Record:
    """Build the record of a cell from the outcome of its judge."""
    if outcome.cause is not None:
        return replace(
            blank_record,
            verdict=verdict_of_judge_failure(outcome.cause, blank_record.cell.dtype),
            cause=outcome.cause.describe(),
            details=outcome.describe(),
        )
    judgement: Judgement = outcome.ranks[0].value
    verdict, cause = conclude_judgement(judgement)
    return replace(
        blank_record,
        verdict=verdict,
        tier=judgement.tier.value,
        ratio=judgement.ratio,
        smallest_scale_error=judgement.smallest_scale_error,
        wrong_elements=judgement.wrong_elements,
        elements=judgement.elements,
        undetermined=judgement.undetermined,
        notes=judgement.notes,
        divergence=judgement.mismatch,
        evidence=judgement.exhibit,
        cause=cause,
    )


def verdict_of_judge_failure(cause: RankOutcome, dtype: str) -> Verdict:
    """Return ``fail`` if the judge found a broken engine contract, and ``error`` for any other failure of the judge.

    In TF32, a law is ``unsupported`` if plain PyTorch rounds its scenario.
    """
    if dtype == TF32 and cause.exception.endswith(".RoundedScenarioError"):
        return Verdict.UNSUPPORTED
    return Verdict.FAIL if cause.exception.endswith(".EngineContractError") else Verdict.ERROR


def conclude_judgement(judgement: Judgement) -> tuple[Verdict, str]:
    """Return the verdict of a judgement, and the cause of the verdict; the cause of a pass is empty."""
    if judgement.mismatch is not None:
        return Verdict.FAIL, judgement.mismatch.describe()
    if judgement.is_inconclusive and judgement.why_blind:
        return Verdict.UNDETERMINED, judgement.why_blind
    if judgement.is_inconclusive:
        share = (
            f"{judgement.undetermined} of {judgement.elements} elements are smaller than the bound of their rounding"
        )
        return (
            Verdict.UNDETERMINED,
            f"{share}, so a comparison without mismatch proves nothing; use a wider dtype or a larger learning rate",
        )
    return Verdict.PASS, ""


def apply_expected_failure(record: Record, expected_failure: ExpectedFailure) -> Record:
    """Mark ``record`` as an expected failure, or mark the expected failure as stale if the law holds.

    If the law failed in another way than expected, ``record`` is returned unchanged. If the law holds, ``record`` is
    also returned unchanged unless the entry is stale on its cell.
    """
    if record.verdict is Verdict.ERROR:
        return record
    if not record.verdict.is_broken:
        if not expected_failure.is_stale_on(record.cell):
            return record
        stale = (
            f"the law holds, but was expected to fail ({expected_failure.upstream}): narrow or delete the entry "
            f"{expected_failure.location}"
        )
        return replace(record, stale_reason=stale)
    is_expected = expected_failure.describes_failure(record.verdict.value, record.cause, record.details)
    return replace(record, expected_failure=expected_failure.upstream) if is_expected else record


def apply_remedy(
    record: Record,
    expected_failure: ExpectedFailure,
    remedy_record: Record,
    second_failure: ExpectedFailure | None = None,
) -> Record:
    """Return the record of a documented failure after the same cell ran again with the documented remedy.

    ``record`` is the failure and ``remedy_record`` the second run. If the second run passed, the returned record has
    the verdict ``contract``. If it did not pass, the returned record has the failure of the second run, which counts as
    expected only if ``second_failure``, an entry for the options of the cell, describes it. A note has the cause of
    the first failure in both cases.
    """
    first = f"without the remedy: {record.verdict.value}: {' '.join(record.cause.split())}"
    if remedy_record.verdict is Verdict.PASS:
        return replace(
            remedy_record,
            verdict=Verdict.CONTRACT,
            documentation_url=expected_failure.documented,
            cause=expected_failure.reason,
            notes=(*remedy_record.notes, first),
        )
    return replace(
        remedy_record,
        expected_failure=second_failure.upstream if second_failure else "",
        cause=f"the law fails with the documented remedy {dict(expected_failure.remedy)} too: {remedy_record.cause}",
        notes=(*remedy_record.notes, first),
    )


def apply_lacking_remedy(record: Record, expected_failure: ExpectedFailure, lacking: str) -> Record:
    """Add to ``record``, which stays an expected failure, the reason ``lacking`` why the release lacks the remedy."""
    return replace(record, cause=f"{record.cause}; the remedy {dict(expected_failure.remedy)} is lacking: {lacking}")


def note_pool_difference(pooled: Record, fresh: Record, explanation: ExpectedFailure | None = None) -> Record:
    """Return the record of a cell that failed on pooled ranks and was run again on fresh ranks.

    The result is the record on fresh ranks. If the two runs ended differently, it also describes the failure on pooled
    ranks, as a note if ``explanation`` expects the difference, else as ``pool_difference``.
    """
    if not differs_on_fresh_ranks(pooled, fresh):
        return fresh
    cause = " ".join((pooled.stale_reason or pooled.cause or pooled.verdict.value).split())
    difference = f"{pooled.verdict.value} on ranks that earlier cells had used, {fresh.verdict.value} on fresh ranks"
    if explanation is not None:
        return replace(fresh, notes=(*fresh.notes, f"{difference}; expected: {explanation.upstream}"))
    return replace(fresh, pool_difference=f"{difference}: {cause}")


def differs_on_fresh_ranks(pooled: Record, fresh: Record) -> bool:
    """Return whether a cell failed differently on fresh ranks than on pooled ranks, or did not fail on fresh ranks.

    Two wrong numbers are the same failure if the first wrong tensor is the same. Two exceptions or hangs are the same
    failure if their messages differ only in numbers and folders.
    """
    if pooled.verdict is not fresh.verdict or pooled.is_expected != fresh.is_expected:
        return True
    first, second = pooled.divergence, fresh.divergence
    if first is None or second is None:
        return failure_signature(pooled) != failure_signature(fresh)
    return (first.step, first.part, first.parameter) != (second.step, second.part, second.parameter)
