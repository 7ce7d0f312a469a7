"""The two halves of a cell: what runs in every rank, and what runs in the judge's own process."""

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
from zharness.engines import Capabilities, EngineConfig
from zharness.engines.options import merge_options
from zharness.errors import EngineContractError, HarnessFault, UsageError
from zharness.law_kit.construction import construct_engine, require_gradients, require_initial_weights
from zharness.law_kit.default_training import DEFAULT_TRAINING, TrainingConfig
from zharness.law_kit.judge_context import stop_at_first_mismatch
from zharness.law_kit.training_run import build_curves
from zharness.laws import DTYPES, LOSS_SCALES, JudgeContext, Law, RankContext, get_law
from zharness.parity import Comparison, Mismatch, Tier
from zharness.parity.baseline import Baseline
from zharness.parity.contamination import read_process_conditions, require_clean_torch
from zharness.parity.junctions import with_junctions
from zharness.parity.mismatch_report import MismatchReport, TrainingCurve, build_mismatch_report
from zharness.parity.snapshot import EvidenceWriter, open_evidence_writer, read_evidence
from zharness.run.configuration import configuration_for, is_config_file
from zharness.workload import ModelSpec, model_spec
from zharness.workload.user_model import is_user_model
from zharness.world.rank import rank_device, seed_torch

MAX_UNDETERMINED_SHARE = 1 / 2  # the share of elements beyond which a cell that found nothing has shown nothing


@dataclass(frozen=True)
class Judgement:
    """What the judge found: the first mismatch, and over all comparisons the loosest tier and the largest ratio.

    In every tensor compared, a scale error above ``smallest``, and ``wrong_elements`` lost ones, would have been
    caught. ``undetermined`` of ``elements`` are smaller than their bound. ``exhibit`` is what the mismatch has to show.
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
    exhibit: MismatchReport | None = None

    @property
    def is_inconclusive(self) -> bool:
        """Whether the bounds leave more open than they show, so that no mismatch is no pass."""
        return self.undetermined > MAX_UNDETERMINED_SHARE * self.elements


def observe(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities, options: Mapping[str, Any]) -> None:
    """In every rank: run the check's observer on the engine, and write what it saw into ``room``."""
    bench = build_cell_context(cell, salt, capabilities, options, Path(evidence_dir))
    # Seeded alike on all ranks: an engine that drew numbers of its own would draw the same ones everywhere.
    seed_torch(cell.seed(salt))
    get_law(cell.law).observe(bench)
    bench.finish()


def build_cell_context(
    cell: Cell, salt: int, capabilities: Capabilities, options: Mapping[str, Any], evidence_dir: Path | None = None
) -> RankContext:
    """This rank of the cell, whose records go into ``room``; None: nowhere that anyone finds them."""
    config = EngineConfig(
        stage=cell.stage,
        dtype=cell.dtype,
        loss_scale=LOSS_SCALES[cell.dtype],
        options=merge_options(engine_options(cell, capabilities), options),
    )
    spec, training = model_spec(cell.model), configuration_for(cell.engine_variant).training
    return build_rank_context(
        cell.engine, spec, cell.seed(salt), config, capabilities, evidence_dir, cell.variant, training
    )


def engine_options(cell: Cell, capabilities: Capabilities) -> Mapping[str, Any]:
    """What the case's engine variant stands for: a file's options, or a named set of the engine's.

    They are laid over those that the engine wants for anyone's model, where it is one.
    """
    usual = capabilities.own_model if is_user_model(cell.model) else {}
    if not cell.engine_variant or is_config_file(cell.engine_variant):
        return merge_options(usual, configuration_for(cell.engine_variant).options)
    return merge_options(usual, capabilities.variants[cell.engine_variant])


def build_rank_context(
    engine: str,
    spec: ModelSpec,
    seed: int,
    config: EngineConfig,
    capabilities: Capabilities,
    evidence_dir: Path | None,
    variant: str = "",
    training: TrainingConfig = DEFAULT_TRAINING,
) -> RankContext:
    """A bench on this rank of the default group."""
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
        device=rank_device(rank, world_size),
        # Now, and not at the first record: a law may count the files that are open.
        records=EvidenceWriter(tempfile.TemporaryFile())
        if evidence_dir is None
        else open_evidence_writer(evidence_dir, rank),
        training=training,
    )


def build_baseline(cell: Cell, salt: int, capabilities: Capabilities) -> Baseline:
    """What the cell is held against."""
    spec, dtype, scale = baseline_spec(cell, capabilities), DTYPES[cell.dtype], LOSS_SCALES[cell.dtype]
    autocast = configuration_for(cell.engine_variant).autocast_dtype
    return Baseline(spec, cell.seed(salt), cell.world_size, dtype, scale, autocast)


def baseline_spec(cell: Cell, capabilities: Capabilities) -> ModelSpec:
    """The plain model of the case; anyone's has the nodes in its graph that the engine puts there.

    The workload's own models need none: no engine's nodes part the uses of one of their tensors.
    """
    spec, junctions = model_spec(cell.model), capabilities.junctions
    if junctions is None or not is_user_model(cell.model):
        return spec
    return with_junctions(spec, junctions, engine_options(cell, capabilities))


def judge(cell: Cell, salt: int, evidence_dir: str, capabilities: Capabilities) -> Judgement:
    """In a process that never saw the engine: every rank's evidence against the baseline.

    Raises HarnessFault where torch's functions were replaced in this process. What was otherwise in the ranks is noted.
    """
    return judge_against_baseline(build_baseline(cell, salt, capabilities), cell, evidence_dir, capabilities)


def judge_against_baseline(baseline: Baseline, cell: Cell, evidence_dir: str, capabilities: Capabilities) -> Judgement:
    """``judge`` with the case's own ``baseline``, or one that is watched as it runs."""
    here = read_process_conditions()
    require_clean_torch(here)
    trial = build_judge_context(baseline, Path(evidence_dir), cell.dtype, capabilities, cell.variant)
    asked = configuration_for(cell.engine_variant)
    trial = replace(
        trial,
        training=asked.training,
        declared_reduce_dtype=asked.reduce_dtype or asked.autocast_dtype or trial.declared_reduce_dtype,
    )
    found = judge_law(trial, get_law(cell.law))
    unlike = (words for evidence in trial.evidence for words in evidence.conditions.describe_differences(here))
    return replace(found, notes=tuple(dict.fromkeys([*found.notes, *unlike])))


def build_judge_context(
    baseline: Baseline, evidence_dir: Path, dtype: str, capabilities: Capabilities, variant: str = ""
) -> JudgeContext:
    """What every rank wrote into ``room``, and the baseline that it has to match."""
    wire = capabilities.wires.get(dtype)
    return JudgeContext(
        baseline=baseline,
        evidence=tuple(read_evidence(evidence_dir, rank) for rank in range(baseline.world_size)),
        dtype=DTYPES[dtype],
        variant=variant,
        declared_reduce_dtype=None if wire is None else DTYPES[wire],
    )


def judge_law(ctx: JudgeContext, law: Law) -> Judgement:
    """What ``check`` finds, and where that is a mismatch, what there is to show of it."""
    comparisons = law.judge(ctx)
    seen = list(stop_at_first_mismatch(comparisons))
    found = summarize_comparisons(seen)
    if found.mismatch is None:
        return found
    try:
        return replace(
            found,
            exhibit=build_mismatch_report(seen, comparisons, ctx.baseline.parameter_names, training_curves(ctx, law)),
        )
    except Exception as error:  # noqa: BLE001 - the verdict stands, whatever the wrong numbers do to what is shown of it
        return replace(found, notes=(*found.notes, f"no evidence is shown: {type(error).__name__}: {error}"))


def training_curves(ctx: JudgeContext, law: Law) -> Mapping[str, TrainingCurve]:
    """How the training went; nothing where the check has none, or where what is wrong keeps it from being told."""
    course = law.get_variant(ctx.variant).get_training_run(ctx.training)
    if course is None:
        return {}
    # A loss that was not recorded, is no tensor, or has another shape; gradients of which there are none.
    with suppress(EngineContractError, LookupError, TypeError, ValueError, RuntimeError):
        return build_curves(ctx, course)
    return {}


def summarize_comparisons(comparisons: Sequence[Comparison]) -> Judgement:
    """All comparisons in one; only the last of them may be a mismatch. Raises HarnessFault where there are none."""
    if not comparisons:
        raise HarnessFault("the check compared nothing, so it cannot have passed")
    tiers = list(Tier)
    caught = [found.smallest_detectable for found in comparisons if math.isfinite(found.smallest_detectable)]
    return Judgement(
        comparisons=len(comparisons),
        tier=max((found.tier for found in comparisons), key=tiers.index),
        ratio=max(found.ratio for found in comparisons),
        smallest_scale_error=max(caught, default=math.inf),
        mismatch=comparisons[-1].mismatch,
        elements=sum(found.elements for found in comparisons),
        undetermined=sum(found.undetermined for found in comparisons),
        wrong_elements=1 + max(found.undetermined for found in comparisons),
        notes=tuple(dict.fromkeys(found.note for found in comparisons if found.note)),
    )


def probe_capabilities(engine: str, stage: int) -> Capabilities:
    """In a rank: build the engine once, and return what it claims.

    Raises UsageError for a factory that does not import, raises, returns something that is not an Engine, or changes
    the model that it was given; and for gradients of one backward under names or in shapes that are not the model's.
    """
    factory = engines.get(engine)
    config = EngineConfig(stage=stage)
    spec = model_spec("mlp")
    with raise_as_usage_error(f"factory {engine!r}"):
        built, _ = construct_engine(factory, spec.model(0), config)
    claims = built.capabilities
    with raise_as_usage_error(f"full_params() of the engine of {engine!r}"):
        require_initial_weights(built.full_params(), spec.model(0))
    # What a forward or a backward raises is the matter of the cells, which show it with every rank's report.
    with suppress(Exception):
        batch = spec.micro_batch(0, 0, 0)
        built.backward(spec.loss(built(batch.inputs), batch.target))
    with raise_as_usage_error(f"full_grads() of the engine of {engine!r}"):
        require_gradients(built.full_grads(), spec.model(0))
    with raise_as_usage_error(f"close() of the engine of {engine!r}"):
        built.close()
    return claims


@contextmanager
def raise_as_usage_error(subject: str) -> Iterator[None]:
    """A block of the user's code: whatever it raises, the user has to hear of it, as one UsageError."""
    try:
        yield
    except EngineContractError as error:
        raise UsageError(f"{subject}: {error}") from error
    except Exception as error:
        raise UsageError(f"{subject} raised {type(error).__name__}: {error}") from error
