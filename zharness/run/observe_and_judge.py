"""Run the two halves of a cell: observe an engine on every rank, and judge the evidence in a separate process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zharness import engines
from zharness.cell import Cell
from zharness.device import on_compute_device, rank_device
from zharness.device.determinism import collect_nondeterministic_operators
from zharness.device.float32_products import multiply_with
from zharness.engines import Capabilities, EngineConfig
from zharness.engines.options import merge_options
from zharness.errors import EngineContractError, HarnessFault, UnknownStage, UsageError
from zharness.law_kit.default_training import DEFAULT_TRAINING, TrainingConfig
from zharness.law_kit.dtypes import choose_products
from zharness.law_kit.judge_context import stop_at_first_mismatch
from zharness.law_kit.setting import DEFAULT_SETTING, Setting
from zharness.law_kit.training_run import build_curves
from zharness.laws import DTYPES, LOSS_SCALES, JudgeContext, Law, RankContext, get_law
from zharness.mesh import DEFAULT_MESH, TENSOR, Mesh
from zharness.parity import Comparison, Mismatch, Tier
from zharness.parity.baseline import Baseline, CastCache
from zharness.parity.baseline_cache import with_cache
from zharness.parity.contamination import describe_nondeterminism, read_process_conditions, require_clean_torch
from zharness.parity.junctions import with_junctions
from zharness.parity.mismatch_report import MismatchReport, TrainingCurve, build_mismatch_report
from zharness.parity.snapshot import EvidenceWriter, open_evidence_writer, read_evidence
from zharness.raising_frame import describe_exception
from zharness.run.configuration import cell_setting, is_config_file, load_variant_configuration, translate_configuration
from zharness.workload import ModelSpec, model_spec
from zharness.workload.shipped_plans import read_shipped_plan
from zharness.workload.user_model import is_user_model
from zharness.world.limits import keep_freed_memory
from zharness.world.rank import seed_torch

MAX_UNDETERMINED_SHARE = 1 / 2  # with more undetermined elements, a comparison without a mismatch proves nothing


@dataclass(frozen=True)
class Judgement:
    """The result of all comparisons of a cell: the first mismatch, the loosest tier and the largest ratio.

    In every compared tensor, the comparisons would have detected a relative scale error above ``smallest_scale_error``,
    and ``wrong_elements`` wrong elements. ``elements`` is the number of compared elements, and ``undetermined`` the
    number of elements that are smaller than their bound. ``why_blind`` is the note of a calibrated comparison that
    could have found no error. ``exhibit`` is the data about the mismatch that the report shows.
    """

    comparisons: int
    tier: Tier
    ratio: float
    smallest_scale_error: float
    mismatch: Mismatch | None
    elements: int = 0
    undetermined: int = 0
    wrong_elements: int = 1
    notes: tuple[str, ...] = ()
    why_blind: str = ""
    exhibit: MismatchReport | None = None

    @property
    def is_inconclusive(self) -> bool:
        """Return whether too many elements are smaller than their bound for a pass; a mismatch does not matter here."""
        return self.undetermined > MAX_UNDETERMINED_SHARE * self.elements


def observe(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, options: Mapping[str, Any]) -> None:
    """Run the law on the engine, on every rank, and write the recorded tensors into ``evidence_dir``."""
    if is_user_model(cell.model):  # no law that measures memory runs on users' models
        keep_freed_memory()
    ctx = build_cell_context(cell, salt, capabilities, options, Path(evidence_dir))
    # Use the same seed on all ranks, so that an engine that draws random numbers draws the same numbers on each rank.
    seed_torch(cell.seed(salt))
    with multiply_with(choose_products(cell.dtype)), collect_nondeterministic_operators() as operators:
        get_law(cell.law).observe(ctx)
        ctx.finish(operators)


def build_cell_context(
    cell: Cell, salt: int, capabilities: Capabilities, options: Mapping[str, Any], evidence_dir: Path | None = None
) -> RankContext:
    """Build this rank's context of a cell.

    Recorded tensors are written into ``evidence_dir``. If ``evidence_dir`` is None, they are written into a temporary
    file and discarded.
    """
    spec = model_spec(cell.model)
    config = EngineConfig(
        stage=cell.stage,
        dtype=cell.storage_dtype,
        loss_scale=LOSS_SCALES[cell.storage_dtype],
        options=merge_options(engine_options(cell, capabilities), options),
        mesh=cell.mesh,
        tp_plan=find_plan(cell, spec, salt),
        pp_plan=spec.pp_plan,
        ep_plan=tuple(spec.ep_plan),
        cp_plan=spec.cp_plan,
    )
    training = load_variant_configuration(cell.engine_variant).training
    return build_rank_context(
        cell.engine,
        spec,
        cell.seed(salt),
        config,
        claims_with_setting(cell, capabilities),
        evidence_dir,
        cell.variant,
        training,
        cell_setting(cell.engine_variant),
    )


def find_plan(cell: Cell, spec: ModelSpec, salt: int) -> Mapping[str, str]:
    """Return the plan by which the axis tp splits the cell's model; a user's model has to ship its own plan.

    Raises UsageError for a user's model without a plan.
    """
    if not is_user_model(cell.model) or TENSOR not in cell.mesh.axes:
        return spec.tp_plan
    return read_shipped_plan(cell.model, spec.model(cell.seed(salt)), cell.mesh.size(TENSOR))


def engine_options(cell: Cell, capabilities: Capabilities) -> Mapping[str, Any]:
    """Return the engine options of a cell: those of its configuration file, or of its named engine variant.

    For a user's model, the engine's default options for such models also apply unless the cell overrides them.
    """
    defaults = capabilities.own_model if is_user_model(cell.model) else {}
    if not cell.engine_variant or is_config_file(cell.engine_variant):
        return merge_options(defaults, translate_configuration(cell.engine, cell.engine_variant).options)
    options: dict[str, Any] = dict(defaults)
    for name in cell_setting(cell.engine_variant).options:
        options = merge_options(options, capabilities.engine_options[name].options)
    return options


def claims_with_setting(cell: Cell, capabilities: Capabilities) -> Capabilities:
    """Return the capabilities of the cell's engine under the cell's options.

    A configuration file changes no capability except ``sharded_dtypes``, the shards of a pipeline: if the file has all
    values of a named option, the sharded dtypes of that option are added.
    """
    claims = capabilities.with_options(cell_setting(cell.engine_variant).options).on_mesh(cell.mesh)
    options, named = engine_options(cell, capabilities), capabilities.engine_options.values()
    sharded = (each.sharded_dtypes for each in named if merge_options(options, each.options) == options)
    return replace(claims, sharded_dtypes=claims.sharded_dtypes.union(*sharded))


def build_rank_context(
    engine: str,
    spec: ModelSpec,
    seed: int,
    config: EngineConfig,
    capabilities: Capabilities,
    evidence_dir: Path | None,
    variant: str = "",
    training: TrainingConfig = DEFAULT_TRAINING,
    setting: Setting = DEFAULT_SETTING,
) -> RankContext:
    """Build the context of this rank of the default process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return RankContext(
        spec=spec,
        seed=seed,
        rank=rank,
        world_size=world_size,
        config=config,
        factory=engines.get(engine),
        capabilities=capabilities,
        variant=variant,
        device=rank_device(rank),
        # Open the file here, not at the first record, because a law may count the open files of the process.
        records=EvidenceWriter(tempfile.TemporaryFile())
        if evidence_dir is None
        else open_evidence_writer(evidence_dir, rank),
        training=training,
        setting=setting,
    )


def build_baseline(cell: Cell, salt: int, capabilities: Capabilities) -> Baseline:
    """Build the baseline of a cell."""
    spec, dtype, scale = baseline_spec(cell, capabilities), DTYPES[cell.storage_dtype], LOSS_SCALES[cell.storage_dtype]
    autocast = load_variant_configuration(cell.engine_variant).autocast_dtype
    data_size = cell.mesh.data_size(cell.world_size)
    casts = choose_cast_cache(cell.stage, capabilities)
    products = choose_products(cell.dtype)
    return with_cache(
        Baseline(spec, cell.seed(salt), data_size, dtype, scale, autocast, cast_cache=casts, products=products)
    )


@contextmanager
def as_in_plain_torch(cell: Cell) -> Iterator[None]:
    """In the block, let plain PyTorch compute on the device of the cell's ranks, with products as on the ranks."""
    with on_compute_device(), multiply_with(choose_products(cell.dtype)):
        yield


def choose_cast_cache(stage: int, capabilities: Capabilities) -> CastCache:
    """Return when the plain model casts a weight under autocast, so that it rounds as the engine does at ``stage``."""
    return CastCache.EACH_USE if stage in capabilities.uncached_casts else CastCache.ONCE


def run_plain_model(cell: Cell, salt: int, capabilities: Capabilities) -> None:
    """Run forward and backward of the plain model of a cell on the first micro-batch of every rank.

    Raises any exception of the model's code.
    """
    with as_in_plain_torch(cell):
        baseline = build_baseline(cell, salt, capabilities)
        for rank in range(baseline.data_size):
            baseline.run_rank(rank, 0)


def baseline_spec(cell: Cell, capabilities: Capabilities) -> ModelSpec:
    """Return the specification of the plain PyTorch model of a cell.

    A user's model gets autograd nodes at the same places as in the engine, so that gradients are added in the same
    order. Models of the workload do not need such nodes: in these models, no engine puts a node between two uses of a
    tensor.
    """
    spec, junctions = model_spec(cell.model), capabilities.junctions
    if junctions is None or not is_user_model(cell.model):
        return spec
    return with_junctions(spec, junctions, engine_options(cell, capabilities))


def judge(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities) -> Judgement:
    """Judge the evidence of every rank against the baseline, in a process that never imported the engine.

    Raises HarnessFault if functions of torch were replaced in this process. The judgement has a note for each setting
    of torch that a rank and this process do not share.
    """
    keep_freed_memory()
    with as_in_plain_torch(cell):
        return judge_against_baseline(build_baseline(cell, salt, capabilities), cell, evidence_dir, capabilities)


def judge_against_baseline(baseline: Baseline, cell: Cell, evidence_dir: str, capabilities: Capabilities) -> Judgement:
    """Judge the evidence of every rank against the given ``baseline`` of the cell.

    The function ``judge`` builds the baseline itself.
    """
    conditions = read_process_conditions()
    require_clean_torch(conditions)
    claims = claims_with_setting(cell, capabilities)
    ctx = build_judge_context(baseline, Path(evidence_dir), cell.storage_dtype, claims, cell.variant, cell.mesh)
    config = translate_configuration(cell.engine, cell.engine_variant)
    ctx = replace(
        ctx,
        training=config.training,
        setting=cell_setting(cell.engine_variant),
        declared_reduce_dtype=config.reduce_dtype or config.autocast_dtype or ctx.declared_reduce_dtype,
    )
    with collect_nondeterministic_operators() as operators:
        judgement = judge_law(ctx, get_law(cell.law))
    differences = (text for evidence in ctx.evidence for text in evidence.conditions.describe_differences(conditions))
    own = describe_nondeterminism("the baseline's", operators)
    return replace(judgement, notes=tuple(dict.fromkeys([*judgement.notes, *differences, *own])))


def build_judge_context(
    baseline: Baseline,
    evidence_dir: Path,
    dtype: str,
    capabilities: Capabilities,
    variant: str = "",
    mesh: Mesh = DEFAULT_MESH,
) -> JudgeContext:
    """Read the evidence of every rank from ``evidence_dir``, and combine it with the baseline."""
    reduce_dtype = capabilities.reduce_dtypes.get(dtype)
    return JudgeContext(
        baseline=baseline,
        evidence=tuple(read_evidence(evidence_dir, rank) for rank in range(mesh.world_size(baseline.data_size))),
        dtype=DTYPES[dtype],
        variant=variant,
        declared_reduce_dtype=None if reduce_dtype is None else DTYPES[reduce_dtype],
        claims=capabilities,
        mesh=mesh,
    )


def judge_law(ctx: JudgeContext, law: Law) -> Judgement:
    """Run all comparisons of ``law`` up to the first mismatch; for a mismatch, add the data that the report shows."""
    remaining = law.judge(ctx)
    compared = list(stop_at_first_mismatch(remaining))
    judgement = summarize_comparisons(compared)
    if judgement.mismatch is None:
        return judgement
    judgement = replace(judgement, mismatch=add_coordinates(judgement.mismatch, ctx))
    try:
        curves = training_curves(ctx, law)
        exhibit = build_mismatch_report(compared, remaining, ctx.baseline.parameter_names, curves)
    except Exception as error:  # noqa: BLE001 - wrong numbers may break the exhibit, but must not change the verdict
        note = f"the report shows no evidence, because building it raised {type(error).__name__}: {error}"
        return replace(judgement, notes=(*judgement.notes, note))
    return replace(judgement, exhibit=exhibit)


def add_coordinates(mismatch: Mismatch, ctx: JudgeContext) -> Mismatch:
    """Add to the hint of a mismatch the mesh coordinates of the rank that owns the element and the rank that saw it."""
    if not ctx.mesh.sizes:
        return mismatch
    ranks = dict.fromkeys(rank for rank in (mismatch.owner, mismatch.seen_on) if rank is not None)
    places = [f"rank {rank} is {ctx.mesh.describe_rank(rank, ctx.world_size)}" for rank in ranks]
    return replace(mismatch, hint="; ".join([*filter(None, [mismatch.hint]), *places]))


def training_curves(ctx: JudgeContext, law: Law) -> Mapping[str, TrainingCurve]:
    """Return the engine's and the baseline's losses and gradient norms over the steps, by name.

    The mapping is empty if the law does not train, or if the evidence is too broken to draw curves from.
    """
    training_run = law.get_variant(ctx.variant).get_training_run(ctx.training)
    if training_run is None:
        return {}
    # A loss may be missing, not a tensor, or of another shape, and gradients may be missing.
    with suppress(EngineContractError, LookupError, TypeError, ValueError, RuntimeError):
        return build_curves(ctx, training_run)
    return {}


def summarize_comparisons(comparisons: Sequence[Comparison]) -> Judgement:
    """Summarize comparisons; only the last of them may be a mismatch.

    Raises HarnessFault if there are no comparisons.
    """
    if not comparisons:
        raise HarnessFault("the law compared nothing, so it cannot have passed")
    tiers = list(Tier)
    blind = next(filter(is_blind, comparisons), None)
    counted = comparisons if blind is None else (blind,)
    scale_errors = (comparison.smallest_detectable for comparison in comparisons)
    return Judgement(
        comparisons=len(comparisons),
        tier=max((comparison.tier for comparison in comparisons), key=tiers.index),
        ratio=max(comparison.ratio for comparison in comparisons),
        smallest_scale_error=max(filter(math.isfinite, scale_errors), default=math.inf),
        mismatch=comparisons[-1].mismatch,
        elements=sum(comparison.elements for comparison in counted),
        undetermined=sum(comparison.undetermined for comparison in counted),
        wrong_elements=1 + max(comparison.undetermined for comparison in comparisons),
        notes=tuple(dict.fromkeys(comparison.note for comparison in comparisons if comparison.note)),
        why_blind="" if blind is None else blind.note,
    )


def is_blind(comparison: Comparison) -> bool:
    """Return whether a calibrated comparison could not have found an error in most of its elements.

    The other comparisons of the law rely on this comparison, so that their elements cannot compensate for it.
    """
    is_calibrated = comparison.tier is Tier.CALIBRATED
    return is_calibrated and comparison.undetermined > MAX_UNDETERMINED_SHARE * comparison.elements


@contextmanager
def raise_as_usage_error(subject: str) -> Iterator[None]:
    """Convert an exception of the user's code in the ``with`` block to a UsageError that begins with ``subject``.

    An UnknownStage is raised again as an UnknownStage.
    """
    try:
        yield
    except (EngineContractError, UsageError) as error:  # these messages are written for the user
        kind = UnknownStage if isinstance(error, UnknownStage) else UsageError
        raise kind(f"{subject}: {error}") from error
    except Exception as error:
        raise UsageError(f"{subject} raised {describe_exception(error)}") from error
