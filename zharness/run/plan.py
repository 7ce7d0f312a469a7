"""Plan the cells of a request, each with the reason if the engine does not support it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zharness import engines
from zharness.cell import Cell, is_cell_id
from zharness.engines import Capabilities, Feature
from zharness.errors import UsageError
from zharness.laws import DTYPES, LOSS_SCALES, Law, find_laws, get_law
from zharness.parity import Tier
from zharness.parity.certificate import is_power_of_two
from zharness.run.configuration import is_config_file, load_configuration
from zharness.workload import MODELS, model_spec
from zharness.workload.user_model import is_user_model
from zharness.world.limits import check_world_size

STAGES = (0, 1, 2, 3)

ClaimsLookup = Callable[[str, int], Capabilities]


@dataclass(frozen=True)
class Request:
    """The cells to run: glob patterns of laws or whole cell ids, and the values of each axis of the matrix.

    For each axis (engine, stage, world size, dtype, model), an empty tuple selects all values.
    """

    patterns: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("reference",)
    stages: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = (2,)
    dtypes: tuple[str, ...] = ("fp32",)
    models: tuple[str, ...] = ()
    engine_variant: str = ""


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
        """Return ``cell``, by its older name, which tests that use the fixture ``cell`` may read."""
        return self.cell


def choose_patterns(laws: tuple[str, ...], checks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns of the parameter ``laws`` or of its older name ``checks``. Raises UsageError for both."""
    if laws and checks:
        raise UsageError(f"got laws={laws!r} and checks={checks!r}; expected laws, or its older name checks, not both")
    return laws or checks


def plan(request: Request, claims: ClaimsLookup) -> list[PlannedCell]:
    """Return the cells of ``request`` in the order of the matrix, each once.

    ``claims(engine, stage)`` returns an engine's capabilities. Raises UsageError for anything that does not exist.
    """
    validate_request(request)
    ids = [pattern for pattern in request.patterns if is_cell_id(pattern)]
    globs = tuple(pattern for pattern in request.patterns if not is_cell_id(pattern))
    cells = [plan_named_cell(Cell.parse(text), claims) for text in ids]
    if globs or not ids:
        for engine in request.engines:
            cells.extend(plan_engine_cells(engine, request, find_laws(globs), claims))
    if not cells:
        raise UsageError(
            f"nothing to run: no law among {', '.join(request.patterns) or 'all'} uses "
            f"{'the models ' + ', '.join(request.models) if request.models else 'these options'}; "
            "`zharness list laws` and `zharness list models` list the possible names"
        )
    return list({cell.cell: cell for cell in cells}.values())


def shuffle_cells(cells: Sequence[PlannedCell], seed: int) -> list[PlannedCell]:
    """Shuffle ``cells`` by ``seed``.

    Pooled ranks run cells one after the other, so another order may reveal state that a cell leaves behind.
    """
    return random.Random(seed).sample(cells, len(cells))  # noqa: S311 - not a secret


def validate_request(request: Request) -> None:
    """Raise UsageError for an engine, stage, dtype, model, world size or law that does not exist."""
    for engine in request.engines:
        engines.require(engine)
    for stage in request.stages:
        if stage not in STAGES:
            raise UsageError.unknown_name("stage", stage, STAGES)
    for dtype in request.dtypes:
        if dtype not in DTYPES:
            raise UsageError.unknown_name("dtype", dtype, DTYPES)
    for model in request.models:
        model_spec(model)
    for world_size in request.world_sizes:
        check_world_size(world_size)
    find_laws(tuple(pattern for pattern in request.patterns if not is_cell_id(pattern)))
    for pattern in filter(is_cell_id, request.patterns):
        get_law(Cell.parse(pattern).law)


def plan_named_cell(cell: Cell, claims: ClaimsLookup) -> PlannedCell:
    """Plan a cell that the request names by its id. Raises UsageError if the matrix has no such cell."""
    law = get_law(cell.law)
    law.required_features(cell.variant)  # raises UsageError for an unknown variant
    validate_request(Request((), (cell.engine,), (cell.stage,), (cell.world_size,), (cell.dtype,), (cell.model,)))
    if is_user_model(cell.model):
        require_any_model_law(law, cell)
    elif cell.model not in law.models:
        raise UsageError.unknown_name(f"model for {law.name}", cell.model, law.models)
    stages = select_stages(cell.engine, (cell.stage,), claims)
    require_variant(cell.engine, cell.engine_variant, stages, claims)
    return plan_cell(law, cell, claims(cell.engine, stages[0]))


def plan_engine_cells(engine: str, request: Request, laws: list[Law], claims: ClaimsLookup) -> Iterator[PlannedCell]:
    """Yield every cell of one engine. Raises UsageError for a stage or variant that the engine does not have."""
    engine_stages = select_stages(engine, request.stages, claims)
    require_variant(engine, request.engine_variant, engine_stages, claims)
    for stage in request.stages or engine_stages:
        capabilities = claims(engine, stage) if stage in engine_stages else None
        for law in laws:
            for cell in expand_law_cells(law, engine, stage, request):
                if capabilities is None:
                    yield PlannedCell(cell, f"{engine} has no stage {stage}")
                else:
                    yield plan_cell(law, cell, capabilities)


def select_stages(engine: str, requested_stages: tuple[int, ...], claims: ClaimsLookup) -> tuple[int, ...]:
    """Return the requested stages that the engine has, or all of its stages if none was requested.

    Raises UsageError if it has none of them.
    """
    engine_stages = first_buildable_claims(engine, requested_stages or STAGES, claims).stages
    selected = tuple(stage for stage in (requested_stages or STAGES) if stage in engine_stages)
    if not selected:
        raise UsageError.unknown_name(
            f"stage of engine {engine!r}", ", ".join(map(str, requested_stages)), sorted(engine_stages)
        )
    return selected


def require_variant(engine: str, variant: str, stages: tuple[int, ...], claims: ClaimsLookup) -> None:
    """Raise UsageError for a variant that ``engine`` has at none of ``stages``, or a file that cannot be read."""
    if is_config_file(variant):
        load_configuration(variant)
        return
    known = list(dict.fromkeys(name for stage in stages for name in claims(engine, stage).variants))
    if variant and variant not in known:
        raise UsageError.unknown_name(f"variant of engine {engine!r}", variant, known or ("(it has none)",))


def first_buildable_claims(engine: str, stages: tuple[int, ...], claims: ClaimsLookup) -> Capabilities:
    """Return the claims at the first of ``stages`` at which the engine can be built.

    Raises UsageError if the engine cannot be built at any of them.
    """
    for stage in stages[:-1]:
        try:
            return claims(engine, stage)
        except UsageError:
            continue
    return claims(engine, stages[-1])


def expand_law_cells(law: Law, engine: str, stage: int, request: Request) -> Iterator[Cell]:
    """Yield the cells of one law at one stage."""
    for world_size in request.world_sizes:
        for dtype in request.dtypes:
            for model, variant in select_models(law, request.models):
                yield Cell(law.name, engine, stage, world_size, dtype, model, variant, request.engine_variant)


def select_models(law: Law, requested_models: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each requested model to which ``law`` applies, with each variant of the law.

    Without a requested model, all models of the workload are considered.
    """
    for name in requested_models or MODELS:
        if is_user_model(name):
            yield from ((name, variant) for variant in law.user_model_variants)
        elif name in law.models:
            yield from ((name, variant.name) for variant in law.variants)


def require_any_model_law(law: Law, cell: Cell) -> None:
    """Raise UsageError for a law, or a variant of it, that does not apply to users' models."""
    if not law.get_variant(cell.variant).applies_to_user_models:
        applicable = [
            f"{applicable_law.name}{variant and f' ({variant})'}"
            for applicable_law in find_laws(())
            for variant in applicable_law.user_model_variants
        ]
        raise UsageError.unknown_name("law for a user's model", f"{law.name} {cell.variant}".strip(), applicable)


def plan_cell(law: Law, cell: Cell, capabilities: Capabilities) -> PlannedCell:
    """Plan one cell: decide from the engine's claims whether it is unsupported, and why."""
    not_stated, not_comparable = (
        reason_not_stated(law, cell, capabilities),
        reason_not_comparable(law, cell, capabilities),
    )
    if not_stated:
        return PlannedCell(cell, not_stated)
    for feature in law.required_features(cell.variant):
        refusal = capabilities.refusal(feature)
        if refusal is not None:
            reason = f"{cell.engine} does not claim {feature.value}: {refusal}"
            return PlannedCell(cell, reason, None if not_comparable else feature)
    return PlannedCell(cell, not_comparable)


def unsupported_reason(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why a cell is unsupported, or '' if the cell is run."""
    return plan_cell(law, cell, capabilities).unsupported_reason


def reason_not_stated(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why the matrix excludes this cell regardless of the engine's features, or '' if it does not."""
    if capabilities.absent:
        return f"{cell.engine} cannot be built: {capabilities.absent}"
    if cell.engine_variant not in ("", *capabilities.variants) and not is_config_file(cell.engine_variant):
        return f"{cell.engine} has no variant {cell.engine_variant} at stage {cell.stage}"
    option = capabilities.engine_options.get(cell.engine_variant)
    if option is not None and (refusal := option.refusal_at(cell.world_size, cell.dtype)):
        return f"{cell.engine} cannot be run with {cell.engine_variant}: {refusal}"
    if cell.dtype not in capabilities.dtypes:
        return f"{cell.engine} claims {', '.join(sorted(capabilities.dtypes))} only"
    if cell.dtype not in law.dtypes:
        return f"{law.name} is stated for {', '.join(law.dtypes)} only"
    if Feature.TENSOR_BACKWARD in law.required_features(cell.variant) and LOSS_SCALES[cell.dtype] != 1:
        return f"{cell.dtype} needs a loss scale, which a plain loss.backward() does not apply"
    return ""


def reason_not_comparable(law: Law, cell: Cell, capabilities: Capabilities) -> str:
    """Return the reason why no tolerance can be justified for a cell, or '' if one can be justified."""
    kernels = capabilities.own_kernels.get(cell.stage)
    exact = law.weights_stay_integers and not is_user_model(cell.model) and model_spec(cell.model).exact
    is_tolerant = law.tier is Tier.CALIBRATED or law.get_variant(cell.variant).compares_engine_with_itself
    if kernels is not None and not exact and not is_tolerant:
        return f"kernels other than torch's are judged by exact models, and by tier C in training.kernels ({kernels})"
    refusal = capabilities.refusal(Feature.SUM) or capabilities.scaled_sum
    if refusal and law.get_variant(cell.variant).exact_by_sum and not is_power_of_two(cell.world_size):
        return f"the mean over {cell.world_size} ranks is not exact, and {cell.engine} has no exact sum: {refusal}"
    return ""
