"""Build the rows of ``zharness list`` for laws, models and mutants."""

from __future__ import annotations

from zharness.laws import LAWS
from zharness.mutants import MUTANTS
from zharness.report.listing import Rows
from zharness.workload import MODELS


def law_rows() -> Rows:
    """List every law, its group, and its tier on random weights."""
    return [
        {
            "check": law.name,
            "group": law.name.partition(".")[0],
            "law": law.statement,
            "tier": law.tier.value,
            "variants": ", ".join(variant.name for variant in law.variants if variant.name),
        }
        for law in LAWS.values()
    ]


def model_rows() -> Rows:
    """List every model of the workload."""
    return [{"model": spec.name, "what": spec.summary} for spec in MODELS.values()]


def mutant_rows() -> Rows:
    """List every mutant."""
    return [
        {
            "mutant": mutant.name,
            "over": f"{mutant.wraps} {','.join(map(str, mutant.stages))}",
            "kind": mutant.kind.value,
            "what": mutant.description,
            "imitates": mutant.imitates,
        }
        for mutant in MUTANTS.values()
    ]


def killed_mutants() -> dict[str, list[str]]:
    """Return the mutants that name each law as a target, by the law's name."""
    return {law: [name for name, mutant in MUTANTS.items() if law in mutant.named_laws] for law in LAWS}
