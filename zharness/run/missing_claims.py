"""Report which further claim of an engine would add which laws to a run."""

from __future__ import annotations

from collections.abc import Sequence

from zharness.cell import Cell
from zharness.engines import Feature
from zharness.laws import get_law
from zharness.run.cell_planner import PlannedCell
from zharness.run.configuration import cell_setting
from zharness.run.outcomes import count_cells
from zharness.run.plan import ClaimsLookup
from zharness.workload.user_model import is_user_model

MUTANTS = "zharness.mutants:"
MAX_LISTED_LAWS = 3


def describe_missing_claims(cells: Sequence[PlannedCell], claims: ClaimsLookup) -> list[str]:
    """Return a line for each feature that a user's engine refuses, if the refusal alone keeps cells from running."""
    kept_out: dict[tuple[str, Feature], list[Cell]] = {}
    for planned in cells:
        if planned.refused_feature is not None and is_users_engine(planned.cell.engine):
            refused = refused_features(planned.cell, claims)
            if len(refused) == 1:
                kept_out.setdefault((planned.cell.engine, refused[0]), []).append(planned.cell)
    largest_first = sorted(kept_out.items(), key=lambda item: -len(item[1]))
    return [describe_claim(engine, feature, found) for (engine, feature), found in largest_first]


def is_users_engine(engine: str) -> bool:
    """Return whether an engine is named by the path of its factory, and is not one of the package's mutants."""
    return is_user_model(engine) and not engine.startswith(MUTANTS)


def refused_features(cell: Cell, claims: ClaimsLookup) -> list[Feature]:
    """Return the features that the cell needs and that its engine refuses, each once."""
    setting = cell_setting(cell.engine_variant)
    capabilities = claims(cell.engine, cell.stage).with_options(setting.options)
    needed = dict.fromkeys((*setting.required_features(), *get_law(cell.law).required_features(cell.variant)))
    return [feature for feature in needed if capabilities.refusal(feature) is not None]


def describe_claim(engine: str, feature: Feature, cells: Sequence[Cell]) -> str:
    """Return the line of one feature: its name, its meaning, and the laws that it adds."""
    laws = list(dict.fromkeys(cell.law for cell in cells))
    more = f" and {len(laws) - MAX_LISTED_LAWS} more" if len(laws) > MAX_LISTED_LAWS else ""
    shown = ", ".join(laws[:MAX_LISTED_LAWS])
    return f"CLAIM Feature.{feature.name} ({feature.value}) in {engine} to add {count_cells(len(cells))}: {shown}{more}"
