"""Detect a run on a user's model that compared no gradient, so that its passing laws prove little."""

from __future__ import annotations

from collections.abc import Sequence

from zharness.laws import get_law
from zharness.run.record import Record, Verdict


def explain_uncompared_gradients(records: Sequence[Record], chosen_laws: Sequence[str] = ()) -> str:
    """Explain why a run without failures still proves nothing.

    Returns an empty string if gradients were compared at every stage that ran, or if one of the ``chosen_laws`` of the
    user passed. ``records`` are the records of one model on one engine.
    """
    if not any(record.verdict is Verdict.PASS for record in records):
        reasons = dict.fromkeys(record.cause for record in records if record.cause)
        return f"NO PASS: no law passed ({'; '.join(reasons)})"
    if chosen_laws:
        return ""
    run_records = [record for record in records if record.verdict is not Verdict.UNSUPPORTED]
    compared_stages = {
        record.cell.stage
        for record in run_records
        if record.verdict in (Verdict.PASS, Verdict.CONTRACT) and get_law(record.cell.law).is_gradient_law
    }
    missing = sorted({record.cell.stage for record in run_records} - compared_stages)
    if not missing:
        return ""
    # If the other gradient laws do not apply, the record of the calibrated law says why no gradient could be compared.
    calibrated = [r for r in records if get_law(r.cell.law).is_calibrated]
    causes = dict.fromkeys(record.cause for record in calibrated if record.cell.stage in missing)
    where = f"stage{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"NO PASS: no gradient was compared at {where}{''.join(f' ({cause})' for cause in causes)}"
