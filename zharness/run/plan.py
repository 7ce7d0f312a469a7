"""From what was asked for to the cells of the matrix, each with the reason why it cannot be run, if there is one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zharness import engines
from zharness.case import Case, looks_like_id
from zharness.checks import DTYPES, LOSS_SCALES, Check, check_named, find_checks
from zharness.engines import Capabilities, Feature
from zharness.errors import UsageError
from zharness.parity import Tier
from zharness.parity.certificate import is_power_of_two
from zharness.run.configuration import configuration, is_file
from zharness.workload import MODELS, model_spec
from zharness.workload.foreign import is_foreign
from zharness.world.limits import check_world_size

STAGES = (0, 1, 2, 3)

Claims = Callable[[str, int], Capabilities]


@dataclass(frozen=True)
class Request:
    """What to run: glob patterns of checks or whole case ids, and the axes. An empty tuple means every value."""

    patterns: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("reference",)
    stages: tuple[int, ...] = ()
    world_sizes: tuple[int, ...] = (2,)
    dtypes: tuple[str, ...] = ("fp32",)
    models: tuple[str, ...] = ()
    engine_variant: str = ""


@dataclass(frozen=True)
class Planned:
    """A cell, and why it is not run: the empty string where it is.

    ``refused`` is the feature that the engine does not claim, where that is the reason.
    """

    case: Case
    unsupported: str = ""
    refused: Feature | None = None


def plan(request: Request, claims: Claims) -> list[Planned]:
    """The cells of ``request`` in the order of the matrix, each once.

    ``claims(engine, stage)`` are an engine's capabilities. Raises UsageError for anything that does not exist.
    """
    validate(request)
    ids = [pattern for pattern in request.patterns if looks_like_id(pattern)]
    globs = tuple(pattern for pattern in request.patterns if not looks_like_id(pattern))
    cells = [named(Case.parse(text), claims) for text in ids]
    if globs or not ids:
        for engine in request.engines:
            cells.extend(cells_of(engine, request, find_checks(globs), claims))
    if not cells:
        raise UsageError(
            f"nothing to run: no check among {', '.join(request.patterns) or 'all'} uses "
            f"{'the models ' + ', '.join(request.models) if request.models else 'what was asked for'}; "
            "`zharness list checks` and `zharness list models` say what there is"
        )
    return list({cell.case: cell for cell in cells}.values())


def shuffled(cells: Sequence[Planned], seed: int) -> list[Planned]:
    """``cells`` in an order that follows from ``seed``: ranks that live on then meet them in another one."""
    return random.Random(seed).sample(cells, len(cells))  # noqa: S311 - an order, no secret


def validate(request: Request) -> None:
    """Raises UsageError for an engine, stage, dtype, model, world size or check that does not exist."""
    for engine in request.engines:
        engines.require(engine)
    for stage in request.stages:
        if stage not in STAGES:
            raise UsageError.unknown("stage", stage, STAGES)
    for dtype in request.dtypes:
        if dtype not in DTYPES:
            raise UsageError.unknown("dtype", dtype, DTYPES)
    for model in request.models:
        model_spec(model)
    for world_size in request.world_sizes:
        check_world_size(world_size)
    find_checks(tuple(pattern for pattern in request.patterns if not looks_like_id(pattern)))
    for pattern in filter(looks_like_id, request.patterns):
        check_named(Case.parse(pattern).check)


def named(case: Case, claims: Claims) -> Planned:
    """The one cell of a case id, held to the same rules as any other."""
    check = check_named(case.check)
    check.features(case.variant)
    validate(Request((), (case.engine,), (case.stage,), (case.world_size,), (case.dtype,), (case.model,)))
    if is_foreign(case.model):
        require_any_model(check, case)
    elif case.model not in check.models:
        raise UsageError.unknown(f"model for {check.name}", case.model, check.models)
    offered = stages_of(case.engine, (case.stage,), claims)
    require_variant(case.engine, case.engine_variant, offered, claims)
    return planned(check, case, claims(case.engine, offered[0]))


def cells_of(engine: str, request: Request, checks: list[Check], claims: Claims) -> Iterator[Planned]:
    """Every cell of one engine."""
    offered = stages_of(engine, request.stages, claims)
    require_variant(engine, request.engine_variant, offered, claims)
    for stage in request.stages or offered:
        capabilities = claims(engine, stage) if stage in offered else None
        for check in checks:
            for case in cases_of(check, engine, stage, request):
                if capabilities is None:
                    yield Planned(case, f"{engine} has no stage {stage}")
                else:
                    yield planned(check, case, capabilities)


def stages_of(engine: str, asked: tuple[int, ...], claims: Claims) -> tuple[int, ...]:
    """The stages to run: the engine's among those asked for. Raises UsageError when it has none of them."""
    offered = any_claims(engine, asked or STAGES, claims).stages
    found = tuple(stage for stage in (asked or STAGES) if stage in offered)
    if not found:
        raise UsageError.unknown(f"stage of engine {engine!r}", ", ".join(map(str, asked)), sorted(offered))
    return found


def require_variant(engine: str, name: str, stages: tuple[int, ...], claims: Claims) -> None:
    """Raises UsageError for a variant that ``engine`` has at none of ``stages``, or a file that cannot be read."""
    if is_file(name):
        configuration(name)
        return
    known = list(dict.fromkeys(each for stage in stages for each in claims(engine, stage).variants))
    if name and name not in known:
        raise UsageError.unknown(f"variant of engine {engine!r}", name, known or ("(it names none)",))


def any_claims(engine: str, stages: tuple[int, ...], claims: Claims) -> Capabilities:
    """The claims at the first of ``stages`` at which the engine can be built at all. Raises UsageError at none."""
    for stage in stages[:-1]:
        try:
            return claims(engine, stage)
        except UsageError:
            continue
    return claims(engine, stages[-1])


def cases_of(check: Check, engine: str, stage: int, request: Request) -> Iterator[Case]:
    """One check's cases at one stage."""
    for world_size in request.world_sizes:
        for dtype in request.dtypes:
            for model, variant in models_of(check, request.models):
                yield Case(check.name, engine, stage, world_size, dtype, model, variant, request.engine_variant)


def models_of(check: Check, asked: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The models among ``asked`` that a check is stated for, all of the workload's where none is; with its variants."""
    for name in asked or MODELS:
        if is_foreign(name):
            yield from ((name, variant) for variant in check.any_model)
        elif name in check.models:
            yield from ((name, variant) for variant, _ in check.variants)


def require_any_model(check: Check, case: Case) -> None:
    """Raises UsageError for a check, or a variant of it, that is not stated for anyone's model."""
    if not check.states(case.variant):
        stated = [f"{each.name}{variant and f' ({variant})'}" for each in find_checks(()) for variant in each.any_model]
        raise UsageError.unknown("check of a model of your own", f"{check.name} {case.variant}".strip(), stated)


def planned(check: Check, case: Case, capabilities: Capabilities) -> Planned:
    """The cell, and why it is not run, decided from claims alone."""
    excluded, kernels = not_stated(check, case, capabilities), not_comparable(check, case, capabilities)
    if excluded:
        return Planned(case, excluded)
    for feature in check.features(case.variant):
        refusal = capabilities.refusal(feature)
        if refusal is not None:
            reason = f"{case.engine} does not claim {feature.value}: {refusal}"
            return Planned(case, reason, None if kernels else feature)
    return Planned(case, kernels)


def unsupported(check: Check, case: Case, capabilities: Capabilities) -> str:
    """Why this cell is not run; the empty string when it is."""
    return planned(check, case, capabilities).unsupported


def not_stated(check: Check, case: Case, capabilities: Capabilities) -> str:
    """Why there is no such cell, whatever features are claimed; the empty string where there is."""
    if capabilities.absent:
        return f"{case.engine} cannot be built: {capabilities.absent}"
    if case.engine_variant not in ("", *capabilities.variants) and not is_file(case.engine_variant):
        return f"{case.engine} has no variant {case.engine_variant} at stage {case.stage}"
    if case.dtype not in capabilities.dtypes:
        return f"{case.engine} claims {', '.join(sorted(capabilities.dtypes))} only"
    if case.dtype not in check.dtypes:
        return f"{check.name} is stated for {', '.join(check.dtypes)} only"
    if Feature.TENSOR_BACKWARD in check.features(case.variant) and LOSS_SCALES[case.dtype] != 1:
        return f"{case.dtype} needs a loss scale, which a plain loss.backward() does not apply"
    return ""


def not_comparable(check: Check, case: Case, capabilities: Capabilities) -> str:
    """Why no honest tolerance exists for this cell; the empty string where one does."""
    kernels = capabilities.own_kernels.get(case.stage)
    exact = check.integral and not is_foreign(case.model) and model_spec(case.model).exact
    own = check.tier is Tier.CALIBRATED or check.own(case.variant)
    if kernels is not None and not exact and not own:
        return f"kernels that are not torch's are judged by exact models, and by tier C in training.kernels ({kernels})"
    refusal = capabilities.refusal(Feature.SUM) or capabilities.scaled_sum
    if refusal and case.variant in check.summed and not is_power_of_two(case.world_size):
        return f"the mean over {case.world_size} ranks is not exact, and {case.engine} has no exact sum: {refusal}"
    return ""
