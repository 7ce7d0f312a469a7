"""Decide from an engine's claims whether a cell is supported, and why it is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from zharness.cell import Cell
from zharness.engines import Capabilities, Feature
from zharness.engines.optimizers import reason_not_in_torch
from zharness.engines.options import find_exclusion
from zharness.laws import LOSS_SCALES, Law, find_laws
from zharness.mesh import CONTEXT, TENSOR, Mesh
from zharness.parity import Tier
from zharness.parity.certificate import is_power_of_two
from zharness.run.configuration import cell_setting, translate_configuration
from zharness.run.mesh_claims import explain_missing_data_option, is_split_exactly, needs_mesh, reason_mesh_not_stated
from zharness.workload import model_spec
from zharness.workload.user_model import is_user_model


@dataclass(frozen=True)
class PlannedCell:
    """A cell, with the reason why it is unsupported; the reason is empty for a cell that is run.

    ``refused_feature`` is the feature that the engine does not claim, if the cell is unsupported only for that reason.
    """

    cell: Cell
    unsupported_reason: str = ""
    refused_feature: Feature | None = None

    @property
    def case(self) -> Cell:
        """Return ``cell``; this is the older name of the field, which users' tests may read."""
        return self.cell


def plan_cell(law: Law, cell: Cell, capabilities: Capabilities) -> PlannedCell:
    """Plan one cell: decide from the engine's claims whether it is unsupported, and why."""
    return CellPlanner(capabilities).plan_cell(law, cell)


@dataclass(frozen=True)
class CellPlanner:
    """Plans cells of one engine at one stage, from the ``capabilities`` that the engine claims there."""

    capabilities: Capabilities
    _claims_of_settings: dict[tuple[tuple[str, ...], Mesh], Capabilities] = field(default_factory=dict)

    def plan_cell(self, law: Law, cell: Cell) -> PlannedCell:
        """Decide from the engine's claims whether ``cell`` is unsupported, and why."""
        not_stated = reason_not_stated(law, cell, self.capabilities)
        if not_stated:
            return PlannedCell(cell, not_stated)
        setting = cell_setting(cell.engine_variant)
        with_options = self._get_claims(setting.options, cell.mesh)
        not_comparable = reason_not_comparable(law, cell, with_options)
        for feature in (*setting.required_features(), *law.required_features(cell.variant)):
            refusal = with_options.refusal(feature)
            if refusal is not None:
                reason = f"{cell.engine} does not claim {feature.value}: {refusal}"
                return PlannedCell(cell, reason, None if not_comparable else feature)
        return PlannedCell(cell, not_comparable)

    def _get_claims(self, options: tuple[str, ...], mesh: Mesh) -> Capabilities:
        """Return the claims of the engine under ``options`` on ``mesh``, which are computed once and cached."""
        key = (options, mesh)
        if key not in self._claims_of_settings:
            self._claims_of_settings[key] = self.capabilities.with_options(options).on_mesh(mesh)
        return self._claims_of_settings[key]


def unsupported_reason(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why a cell is unsupported, or '' if the cell is run."""
    return plan_cell(law, cell, capabilities).unsupported_reason


def reason_not_stated(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the matrix excludes this cell regardless of the engine's features, or '' if it does not."""
    if capabilities.absent:
        return f"{cell.engine} cannot be built: {capabilities.absent}"
    if reason := reason_mesh_not_stated(law, cell, capabilities):
        return reason
    reason = reason_setting_not_stated(law, cell, capabilities)
    if reason:
        return reason
    if cell.storage_dtype not in capabilities.dtypes:
        return f"{cell.engine} supports only the dtypes {', '.join(sorted(capabilities.dtypes))}"
    if cell.storage_dtype not in law.dtypes:
        return f"{law.name} applies only to the dtypes {', '.join(law.dtypes)}"
    optimizer = law.get_variant(cell.variant).optimizer
    if optimizer and (reason := reason_not_in_torch(optimizer)):
        return reason
    required = (*law.required_features(cell.variant), *cell_setting(cell.engine_variant).required_features())
    if Feature.TENSOR_BACKWARD in required and LOSS_SCALES[cell.storage_dtype] != 1:
        return f"{cell.dtype} needs a loss scale, which a plain loss.backward() does not apply"
    return ""


def reason_setting_not_stated(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the engine or the law does not support the cell's setting, or '' if both support it."""
    setting, known = cell_setting(cell.engine_variant), capabilities.engine_options
    if not_supported := setting.reason_unsupported(law.name, law.setting_support):
        return not_supported
    if missing := explain_missing_data_option(cell, setting.options, capabilities):
        return missing
    for name in setting.options:
        if name not in known:
            return f"{cell.engine} has no variant {name} at stage {cell.stage}"
        if axis := next((axis for axis in cell.mesh.axes if name in capabilities.options_not_on.get(axis, ())), ""):
            return f"{cell.engine} cannot have the option {name} on a mesh with the axis {axis}"
        option = known[name]
        if refusal := (
            option.explain_cell_limit(cell.world_size, cell.storage_dtype, cell.mesh)
            or option.explain_law_limit(cell.law, cell.variant, cell.model)
            or option.explain_schedule_conflict(law.get_variant(cell.variant).schedules)
        ):
            return f"this cell cannot set the option {name}: {refusal}"
    unknown = capabilities.unknown_option(translate_configuration(cell.engine, cell.engine_variant).options)
    if unknown:
        return f"{cell.engine} does not know an option of {cell.engine_variant}: {unknown}"
    if capabilities.engine_windows and setting.has_direct_backwards(law.setting_support):
        return f"{law.name} is not stated for {setting.window} on {cell.engine}: {capabilities.engine_windows}"
    return find_exclusion({name: known[name] for name in setting.options})


@cache
def list_calibrated_laws(mesh: Mesh) -> str:
    """Return the names of the calibrated laws that have cells on ``mesh``, joined by "and"."""
    calibrated = (law for law in find_laws(()) if law.is_calibrated)
    return " and ".join(law.name for law in calibrated if mesh.sizes or not needs_mesh(law))


def allows_for_split_sums(law: Law, cell: Cell) -> bool:
    """Return whether the law can judge the cell although tp computes sums of its model as partial sums on each rank."""
    is_random = is_user_model(cell.model) or not model_spec(cell.model).exact
    return law.judges_split_sums and TENSOR in cell.mesh.axes and cell.storage_dtype == "fp32" and is_random


def reason_not_comparable(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why no tolerance can be justified for a cell, or '' if one can be justified."""
    reduce_dtype = capabilities.reduce_dtypes.get(cell.storage_dtype, cell.storage_dtype)
    compares_itself = law.get_variant(cell.variant).compares_engine_with_itself
    # A reduction in fp32 rounds no more than a reduction in the dtype of the cell.
    if reduce_dtype not in (*law.dtypes, "fp32") and not compares_itself:
        stated = ", ".join(law.dtypes)
        return f"{law.name} applies only to the dtypes {stated}, and gradients are reduced in {reduce_dtype}"
    has_exact_splits = is_split_exactly(cell.model)
    if CONTEXT in cell.mesh.axes and cell.dtype != "fp32" and not (compares_itself or has_exact_splits):
        return (
            f"each part of a sequence rounds its gradient to {cell.dtype} before the sum over {cell.mesh.label}, and "
            f"no bound of {law.name} allows for that"
        )
    kernels = capabilities.own_kernels.get(cell.stage)
    exact = law.weights_stay_integers and not is_user_model(cell.model) and model_spec(cell.model).exact
    is_calibrated = law.is_calibrated or allows_for_split_sums(law, cell)
    is_tolerant = is_calibrated or compares_itself
    needs_exact_sums = (law.weights_stay_integers and law.tier is Tier.EXACT) or is_calibrated
    # The law of Muon also compares the momentum bitwise with the exact mean.
    is_exact_mean = (needs_exact_sums and not compares_itself) or Feature.MUON in law.features
    if is_exact_mean and cell.storage_dtype == "fp32" and reduce_dtype != "fp32":
        return (
            f"{law.name} is stated for gradients that are summed in fp32, and here they are rounded to {reduce_dtype}"
        )
    if kernels is not None and not exact and not is_tolerant and not has_exact_splits:
        laws = list_calibrated_laws(cell.mesh)
        return f"only exact models and {laws} can judge kernels other than torch's ({kernels})"
    terms = cell.mesh.data_size(cell.world_size)
    refusal = capabilities.refusal(Feature.SUM) or capabilities.scaled_sum
    if refusal and law.get_variant(cell.variant).exact_by_sum and not is_power_of_two(terms):
        return f"a mean over {terms} ranks is rounded, and {cell.engine} has no exact sum: {refusal}"
    return ""
