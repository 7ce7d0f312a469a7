"""Define the laws of pipeline state across meshes: pipelines with other stages and the plain model can load it.

Every rank trains the micro-batch of the first data coordinate, so the gradient is the same on all meshes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.integer_steps import BIAS_SIGNS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.tied_uses import compute_use_means
from zharness.laws.mesh_state import (
    FROM_OTHERS,
    SAVED,
    TO_OTHERS,
    MeshTraining,
    build_other_model,
    compare_loaded_engine,
    compare_state_dicts,
    judge_meshes,
    load_full_state_dict,
    observe_meshes,
)
from zharness.laws.pipeline import (
    DIVIDED_BY_TWO_STAGES_HINT,
    MICRO_BATCHES,
    is_divided_by_two_stages,
    pipeline_law,
    train_micro_batches,
)
from zharness.mesh import Mesh
from zharness.parity import Comparison, Mismatch
from zharness.parity.compare import check_names

MESHES = tuple(map(Mesh.parse, ("pp1", "pp2", "pp4", "tp2,pp2")))  # on pp1, one stage holds all modules
WAYS = (TO_OTHERS, FROM_OTHERS)
TWO_STAGES_ON_A_RANK = ("interleaved", "zbv")


def run_shared_batch(ctx: RankContext, engine: Engine, step: int, label: str, micro_batches: int = 1) -> None:
    """Run a batch that repeats the first data coordinate's micro-batch, and record its loss and the gradients.

    The mean gradient of equal micro-batches is the gradient of one.
    """
    batch = ctx.spec.micro_batch(ctx.seed, 0, step).to(DTYPES[ctx.config.dtype], ctx.device)
    loss, *_ = train_micro_batches(engine, [batch] * micro_batches, ctx.spec.loss).values()
    ctx.record(f"loss-{label}", {"loss": loss}, step)
    grads = engine.full_grads()
    check_names("full_grads", engine.full_params(), grads)  # a parameter without a gradient would have no state to save
    ctx.record(f"grads-{label}", grads, step)


def choose_training(variant: str) -> MeshTraining:
    """Return the training of a law variant; the variant's name may end in the schedule on the cell's mesh.

    With such a schedule, a rank holds two stages that are not adjacent in the model.
    """
    schedule = variant.removeprefix(TO_OTHERS).removeprefix(FROM_OTHERS).removeprefix("_")
    micro_batches = MICRO_BATCHES if schedule else 1
    run_batch = partial(run_shared_batch, micro_batches=micro_batches)
    return MeshTraining(BIAS_SIGNS, MESHES, run_batch, schedule, micro_batches, explain_tied_grad)


def explain_tied_grad(ctx: JudgeContext, mismatch: Mismatch, label: str) -> str:
    """Return the hint that two stages of a rank divided the gradient of their tied weight, or '' if they did not."""
    weights = ctx.rank_records(f"params-{label}", SAVED)[0]
    uses = compute_use_means(ctx.baseline, mismatch.parameter, [SAVED] * MICRO_BATCHES, weights, data_ranks=[0])
    grad = ctx.rank_records(f"grads-{label}", SAVED)[mismatch.seen_on][mismatch.parameter]
    return DIVIDED_BY_TWO_STAGES_HINT if is_divided_by_two_stages(grad, uses) else ""


def observe_other_mesh(ctx: RankContext) -> None:
    """Save after a step, and load on other stages, in the direction and with the schedule that the variant names."""
    observe_meshes(ctx, choose_training(ctx.variant))


def judge_other_mesh(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the state that each mesh loaded bitwise with the saved state, and judge the next step."""
    yield from judge_meshes(ctx, choose_training(ctx.variant))


def add_buffers(model: nn.Module, plan: tuple[str, ...]) -> nn.Module:
    """Add to each module that ``plan`` names a buffer with a different value, and return the model."""
    for number, name in enumerate(dict.fromkeys(plan)):
        model.get_submodule(name).register_buffer("place", torch.tensor([number + 0.5]))
    return model


def observe_full_state_dict(ctx: RankContext) -> None:
    """Make a step, load the full state dict into a plain model, build a second engine around it, and run a batch."""
    models = (add_buffers(model, ctx.spec.pp_plan) for model in (ctx.spec.model(ctx.seed), build_other_model(ctx)))
    load_full_state_dict(ctx, MeshTraining(BIAS_SIGNS, (), run_shared_batch), *models)


def judge_full_state_dict(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare names, shapes and values of the full state dict on every rank, and the engine around the loaded model."""
    for rank, full in enumerate(ctx.rank_records("full")):
        plain = ctx.baseline.build_module(ctx.rank_records("params", SAVED)[rank])
        yield from compare_state_dicts(ctx, add_buffers(plain, ctx.baseline.spec.pp_plan).state_dict(), full, rank)
    yield from compare_loaded_engine(ctx)


LAWS = (
    pipeline_law(
        "other_mesh",
        "a pipeline with any other stages loads a pipeline's checkpoint bitwise, and continues training from it",
        observe_other_mesh,
        judge_other_mesh,
        (
            *(Variant(way) for way in WAYS),
            *(
                Variant(f"{way}_{schedule}", schedules=(schedule,), micro_batches=MICRO_BATCHES)
                for schedule in TWO_STAGES_ON_A_RANK
                for way in WAYS
            ),
        ),
        Feature.CHECKPOINT,
        Feature.MESH_RESHARD,
        kept_because="the only law of a pipeline that loads a checkpoint of another number of stages",
    ),
    pipeline_law(
        "full_state_dict",
        "on every rank, the full state dict of a pipeline has every key of the plain model, with full tensors",
        observe_full_state_dict,
        judge_full_state_dict,
        (Variant(),),
        Feature.CHECKPOINT,
        kept_because="the only law of the full state dict of a pipeline",
    ),
)
