"""Define the laws of clipping: the reported norm is the norm of all gradients, and clipping uses this norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Feature, Reduction
from zharness.law_kit.clipping import CLIP_ROUNDINGS, NO_CLIPPING, ClipFactor, judge_clip_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import MeshSupport, ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import ClippedSgdStep
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.setting import SettingSupport
from zharness.laws.training.common import MODELS, variation_law
from zharness.parity import Comparison, Part, compare_within_bound
from zharness.parity.bounds import gamma, mean_and_bound
from zharness.workload.exact_blocks import make_wide

CLIP_NORMS = (1e-2, 1e6)
SUM = "sum"  # the variant in which gradients are summed over ranks
WIDE_LAYER = "second"  # the layer with float64 weights in training.clip_wide


def observe_clip_and_norm(ctx: RankContext) -> None:
    """Make one step with each clipping norm, and record weights, gradients and the reported norm."""
    step_with_each_norm(ctx, lambda: ctx.spec.model(ctx.seed), Reduction.SUM if ctx.variant == SUM else Reduction.MEAN)


def observe_clip_wide(ctx: RankContext) -> None:
    """Make and record one step with each clipping norm, on a model in which one layer has float64 weights."""
    ctx.record("kernels", {"own": scalar(ctx.config.stage in ctx.capabilities.own_kernels)})
    step_with_each_norm(ctx, lambda: build_wide_model(ctx), Reduction.MEAN)


def step_with_each_norm(ctx: RankContext, build: Callable[[], nn.Module], reduction: Reduction) -> None:
    """Make one step of a new model with each clipping norm, and record weights, gradients and the reported norm."""
    for at, clip in enumerate(CLIP_NORMS):
        engine = ctx.build_engine_around(build(), optimizer=UNIT_LR_SGD, clip=clip, reduction=reduction)
        ctx.record_weights(engine, at, "-before")
        ctx.train(engine, 0, f"loss-{at}")
        ctx.record("grads", engine.full_grads(), at)
        engine.step()
        norm = engine.grad_norm()
        ctx.record("norm", {"norm": torch.tensor(torch.nan if norm is None else norm, dtype=torch.float64)}, at)
        ctx.record_weights(engine, at, "-after")
        engine.close()


def build_wide_model(ctx: RankContext) -> nn.Module:
    """Return the model, in which the layer WIDE_LAYER has float64 weights."""
    model = ctx.spec.model(ctx.seed)
    layer = model.get_submodule(WIDE_LAYER)
    assert isinstance(layer, nn.Linear)
    model.register_module(WIDE_LAYER, make_wide(layer))
    return model


def judge_clip_and_norm(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the norm with that of all gradients, and the weights with ``weight - factor * grad``.

    The factor is the factor of torch.nn.utils.clip_grad_norm_.
    """
    for at, clip in enumerate(CLIP_NORMS):
        grads, before = ctx.rank_records("grads", at)[0], ctx.rank_records("masters-before", at)[0]
        factor = yield from judge_clip_factor(ctx, "norm", at, grads, clip)
        after = ctx.rank_records("masters-after", at)
        for name, weight in before.items():
            rank_values, place = [record[name] for record in after], partial(ctx.location, name, Part.OPTIMIZER, at)
            step = ClippedSgdStep(weight, grads.get(name, torch.zeros_like(weight)), factor)
            if weight.dtype is torch.float64:
                step = replace(step, clip_factor=find_used_factor(step, rank_values[0]))
            yield from step.compare_in_pieces(rank_values, place(0)) or (
                step.compare_weight(place(rank), record) for rank, record in enumerate(rank_values)
            )


def judge_clip_wide(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the float64 gradients with the float64 mean over ranks, and judge the norm and the clipped step.

    The bound of the mean holds for torch's kernels, so gradients of an engine's own kernels are not compared.
    """
    if not ctx.rank_records("kernels")[0]["own"]:
        yield from compare_wide_means(ctx)
    yield from judge_clip_and_norm(ctx)


def compare_wide_means(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients of the float64 weights with the float64 mean of the ranks' local gradients.

    The bound is that of float64, or that of the reduce dtype if an option sets another one.
    """
    reduce_dtype = ctx.declared_reduce_dtype or torch.float64
    local = ctx.compute_local_grads(0)  # computed in float32, to which the layer casts its weights
    for name in (name for name in ctx.baseline.parameter_names if name.startswith(f"{WIDE_LAYER}.")):
        terms = [result.grads[name].double() for result in local] * ctx.setting.accumulation_steps
        mean, bound = mean_and_bound(terms, reduce_dtype, torch.float64)
        for rank, record in enumerate(ctx.rank_records("grads")):
            yield compare_within_bound(ctx.location(name, Part.REDUCTION, 0, rank), mean, record[name], bound)


def find_used_factor(step: ClippedSgdStep, after: Tensor) -> ClipFactor:
    """Return the factor with which the step clipped the largest element of a float64 gradient.

    torch computes the factor in float32 and multiplies every element by it in float64. So the factor may differ from
    that of ``step`` by the roundings of float32, but is the same for all elements. Returns the factor of ``step`` if it
    differs by more.
    """
    weight, grad, factor = step.weight.flatten(), step.grad.flatten(), step.clip_factor
    at = int(grad.abs().argmax())
    if factor == NO_CLIPPING or not bool(grad[at]):
        return factor
    used = float((weight[at] - after.flatten()[at]) / grad[at])
    error = float(gamma(2, torch.float64) * (weight[at].abs() + after.flatten()[at].abs()) / grad[at].abs())
    largest = factor.value * (gamma(CLIP_ROUNDINGS, torch.float32) + factor.uncertainty)
    return ClipFactor(used, error / abs(used)) if abs(used - factor.value) <= largest + error else factor


LAWS = (
    variation_law(
        "clip_and_norm",
        "the reported norm is the norm of all gradients together, and the step uses gradients clipped by this norm",
        observe_clip_and_norm,
        judge_clip_and_norm,
        models=MODELS,
        features=(Feature.CLIP,),
        weights_stay_integers=False,
        variants=(
            Variant(compares_engine_with_itself=True, model_scope=ModelScope.ANY),
            Variant(SUM, (Feature.SUM,), compares_engine_with_itself=True),
        ),
        steps=LawSteps(observe_clip_and_norm),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that clips below the norm and compares the norm",
    ),
    variation_law(
        "clip_wide",
        "a float64 gradient is reduced in float64, and clipped in float64 by the norm of all gradients together",
        observe_clip_wide,
        judge_clip_wide,
        features=(Feature.CLIP,),
        weights_stay_integers=False,
        dtypes=("fp32",),  # in low precision an engine casts all weights
        variants=(Variant(compares_engine_with_itself=True),),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that clips gradients of weights of two dtypes",
        mesh_support=MeshSupport.OWN_MODELS,
    ),
)
