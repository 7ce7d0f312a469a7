"""Whether a run on anyone's model compared a gradient at all: where none was, all other laws say little."""

from __future__ import annotations

from collections.abc import Sequence

from zharness.run import Record, Verdict

KERNELS_LAW = "training.kernels"
# One of these compares every gradient of the model, on any engine: the second where kernels are the engine's own.
GRADIENT_LAWS = ("training.grads", KERNELS_LAW)


def explain_uncompared_gradients(records: Sequence[Record]) -> str:
    """Why a run without any failure is no pass, in words; empty where at each stage that ran gradients were compared.

    ``records`` are those of one model on one engine.
    """
    if not any(record.verdict is Verdict.PASS for record in records):
        reasons = dict.fromkeys(record.cause for record in records if record.cause)
        return f"NO PASS: no law passed ({'; '.join(reasons)})"
    ran = [record for record in records if record.verdict is not Verdict.UNSUPPORTED]
    compared = {record.cell.stage for record in ran if record.cell.law in GRADIENT_LAWS}
    missing = sorted({record.cell.stage for record in ran} - compared)
    if not missing:
        return ""
    why = dict.fromkeys(r.cause for r in records if r.cell.law == KERNELS_LAW and r.cell.stage in missing)
    where = f"stage{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"NO PASS: no gradient was compared at {where}{''.join(f' ({cause})' for cause in why)}"
