"""Find the cells of a user's model that cannot be judged because of random numbers, buffers or branches."""

from __future__ import annotations

from dataclasses import replace

from zharness.engines import Feature
from zharness.laws import get_law
from zharness.run import PlannedCell
from zharness.run.model_facts import ModelFacts
from zharness.run.plan import ClaimsLookup

DROPOUT_REASON = (
    "the engine has its own kernels, whose law runs plain PyTorch on single samples, each with the random numbers "
    "that it has in the whole micro-batch; set the model's dropout to 0 to compare its gradients"
)
READ_BUFFERS_REASON = (
    "plain PyTorch starts each forward from the engine's weights and from the model's first buffers, but the model's "
    "forward reads buffers that earlier forwards wrote"
)
UNEVEN_LAW = "parameters.used_on_some_ranks"


def skip_unjudgeable(planned: PlannedCell, facts: ModelFacts, claims: ClaimsLookup) -> PlannedCell:
    """Mark the cell as unsupported if its law cannot be judged on this model with this engine."""
    if planned.unsupported_reason:
        return planned
    reason = (
        explain_shared_draws(planned, facts)
        or explain_read_buffers(planned, facts)
        or explain_uneven_ranks(planned, facts, claims)
        or explain_edited_parameters(planned, facts, claims)
    )
    return replace(planned, unsupported_reason=reason)


def explain_shared_draws(planned: PlannedCell, facts: ModelFacts) -> str:
    """Return a reason if the cell compares the engine's own kernels and samples share random numbers, or ''."""
    if not get_law(planned.cell.law).is_calibrated or not facts.shared_draws:
        return ""
    return f"{DROPOUT_REASON}: {facts.shared_draws}"


def explain_read_buffers(planned: PlannedCell, facts: ModelFacts) -> str:
    """Return a reason if the cell compares later forwards, which read buffers that earlier forwards wrote, or ''."""
    if not facts.read_buffers or not get_law(planned.cell.law).compares_later_forwards:
        return ""
    return f"{READ_BUFFERS_REASON} ({facts.read_buffers[0]})"


def explain_uneven_ranks(planned: PlannedCell, facts: ModelFacts, claims: ClaimsLookup) -> str:
    """Return a reason if ranks use different parameters and the engine allows it at most in a block, or ''."""
    if not facts.uneven_parameters or planned.cell.world_size == 1:
        return ""
    known = claims(planned.cell.engine, planned.cell.stage)
    refusal = known.refusal(Feature.UNEVEN_RANKS)
    if refusal:
        return f"ranks use different parameters in one step, which the engine refuses: {refusal}"
    if known.uneven_block:
        return (
            f"ranks use different parameters in one step, which the engine allows inside `with {known.uneven_block}` "
            f"alone; laws on users' models do not open this block, but {UNEVEN_LAW} does"
        )
    return ""


def explain_edited_parameters(planned: PlannedCell, facts: ModelFacts, claims: ClaimsLookup) -> str:
    """Return a reason if a forward edits weights and the engine refuses it, or ''.

    A law that compares only the gradients of the first forward is not affected.
    """
    law = get_law(planned.cell.law)
    refusal = claims(planned.cell.engine, planned.cell.stage).refusal(Feature.IN_PLACE_EDITS)
    if not facts.edited_parameters or not refusal or (law.is_gradient_law and not law.compares_later_forwards):
        return ""
    return (
        f"the forward edits parameters in place ({facts.edited_parameters[0]}), as an embedding with max_norm does, "
        f"which the engine refuses: {refusal}"
    )


def describe_uneven_ranks(facts: ModelFacts) -> str:
    """Return a line about a model whose ranks use different parameters in one step."""
    names = facts.uneven_parameters
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return (
        f"some micro-batches use {len(names)} parameters ({shown}), and others do not, so ranks use different "
        f"parameters in one step; the law {UNEVEN_LAW} tests whether an engine allows that"
    )
