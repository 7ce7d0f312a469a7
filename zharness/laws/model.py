"""Define the laws of a user's model: configured training and activation checkpointing give plain PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from zharness.engines.protocol import AccumulationOwner, Feature
from zharness.errors import UsageError
from zharness.law_kit.accumulation import (
    accumulate,
    build_configured_engine,
    judge_engine_divided_gradients,
    select_accumulation_owner,
)
from zharness.law_kit.clipping import NO_CLIPPING, judge_clip_factor
from zharness.law_kit.judge_context import JudgeContext, divide_loss_by
from zharness.law_kit.law import Law, ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_forward, compare_initial_weights
from zharness.law_kit.setting import OWNER_FEATURES
from zharness.law_kit.training_run import make_training_run
from zharness.parity import Comparison, Part, Tier, compare_ranks, compare_within_bound
from zharness.parity.bounds import gamma, mean_and_bound
from zharness.parity.certificate import is_power_of_two
from zharness.parity.compare import check_names
from zharness.workload import ModelSpec
from zharness.workload.synchronized_norm import has_independent_ranks

DEFAULT_STEPS = "3"

WINDOW = 2  # micro-batches; dividing by two is exact, so an engine may divide loss or gradient

CHECKPOINT_KINDS = ("reentrant", "non_reentrant")


def observe_configured(ctx: RankContext) -> None:
    """Run the training that the user configured, and record weights, gradients, norm and state in every step."""
    training, owner = ctx.training, select_accumulation_owner(ctx)
    own_kernels = ctx.config.stage in ctx.capabilities.own_kernels
    ctx.record("setting", {"own kernels": torch.tensor(own_kernels), "engine": torch.tensor(owner is owner.ENGINE)})
    engine = build_configured_engine(ctx)
    run = make_training_run(training, int(ctx.variant))
    for step in range(run.steps):
        ctx.record_training_state(engine, step)
        accumulate(ctx, engine, owner, run.micro_steps(step), "loss", engine.backward)
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        norm = engine.grad_norm()
        ctx.record("norm", {} if norm is None else {"norm": torch.tensor(norm, dtype=torch.float64)}, step)
    ctx.record_training_state(engine, int(ctx.variant))
    engine.close()


def judge_configured(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge each step of the configured training, starting from the engine's weights before the step.

    If the engine has its own kernels, its gradients are not compared here, because the law training.kernels judges
    them.
    """
    yield from compare_initial_weights(ctx)
    for step in range(int(ctx.variant)):
        if not ctx.rank_records("setting")[0]["own kernels"]:
            yield from compare_step_grads(ctx, step)
        grads, factor = ctx.rank_records("grads", step)[0], NO_CLIPPING
        if ctx.training.clip is not None:
            factor = yield from judge_clip_factor(ctx, "norm", step, grads, ctx.training.clip)
        yield from judge_step(ctx, ctx.training.optimizer, grads, RecordedStep(step, "masters"), factor)
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))
        yield from compare_published_weights(ctx, RecordedStep(step + 1, "masters"), "params")


def compare_step_grads(ctx: JudgeContext, step: int) -> Iterator[Comparison]:
    """Compare the losses of one step bitwise, and the gradients with the mean over micro-batches and ranks.

    If the engine owns the accumulation, it may divide either the loss or the gradient.
    """
    parts, params = ctx.training.accumulation, ctx.rank_records("params", step)[0]
    micros = make_training_run(ctx.training, int(ctx.variant)).micro_steps(step)
    divided = [ctx.compute_local_grads(micro, params, weigh=divide_loss_by(parts)) for micro in micros]
    for micro, local in zip(micros, divided, strict=True):
        yield from compare_forward(ctx, step, local, micro)
    if ctx.rank_records("setting")[0]["engine"] and parts > 1:
        yield from judge_engine_divided_gradients(ctx, "grads", step, micros, params, divided)
    else:
        yield from ctx.compare_reduced_grads("grads", divided, step, scale=parts)


def build_checkpointed_model(spec: ModelSpec, kind: str) -> nn.Module:
    """Build the model and enable its own activation checkpointing. Raise UsageError if it has no such checkpointing."""
    model: Any = spec.build()
    if not can_checkpoint(model):
        raise UsageError(
            f"the model of {spec.name} has no gradient_checkpointing_enable(), which models of transformers have and "
            "this law calls; if the model checkpoints in another way, every law runs with that checkpointing already"
        )
    reentrant = kind == "reentrant"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and not any(weight.requires_grad for weight in model.get_input_embeddings().parameters()):
        model.enable_input_require_grads()  # otherwise a reentrant checkpoint gives no gradient
    return model  # type: ignore[no-any-return]


def can_checkpoint(model: nn.Module) -> bool:
    """Return whether the model supports activation checkpointing with the methods of models in transformers."""
    return callable(getattr(model, "gradient_checkpointing_enable", None)) and bool(
        getattr(model, "supports_gradient_checkpointing", False)
    )


def add_checkpointing(spec: ModelSpec, kind: str) -> ModelSpec:
    """Return a copy of ``spec`` whose model uses its own activation checkpointing."""
    return replace(spec, build=partial(build_checkpointed_model, spec, kind))


def observe_checkpointing(ctx: RankContext) -> None:
    """Run backward while the model uses its own activation checkpointing, and record the loss and the gradients."""
    engine = ctx.build_engine_around(add_checkpointing(ctx.spec, ctx.variant).model(ctx.seed))
    engine.backward(ctx.loss(engine, step=0))
    ctx.record("grads", engine.full_grads())
    engine.close()


def judge_checkpointing(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients with those of plain PyTorch with the same activation checkpointing."""
    spec = add_checkpointing(ctx.baseline.spec, ctx.variant)
    plain = replace(ctx, baseline=replace(ctx.baseline, spec=spec))
    local = plain.compute_local_grads(step=0)
    yield from plain.compare_losses(0, local)
    yield from plain.compare_reduced_grads("grads", [local])


def observe_accumulation(ctx: RankContext) -> None:
    """Record the gradients of each rank's micro-batches alone, and those of a window that accumulates all of them."""
    owner = AccumulationOwner(ctx.variant)
    if not has_independent_ranks(ctx.spec.model(ctx.seed)):
        raise UsageError(
            f"the model of {ctx.spec.name} has a SyncBatchNorm, through which the loss of one rank reaches the "
            "gradients of the others, so that no micro-batch has a gradient of its own"
        )
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    for micro, chosen in product(range(WINDOW), range(ctx.data_size)):
        number = micro * ctx.data_size + chosen
        engine.backward(ctx.loss(engine, micro, f"loss-{number}") * float(chosen == ctx.data_coordinate))
        ctx.record("alone", engine.full_grads(), number)
        engine.step()
        engine.zero_grad()
    engine.close()
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD, accumulation_steps=WINDOW, accumulation_owner=owner)
    accumulate(ctx, engine, owner, range(WINDOW), "loss", engine.backward)
    ctx.record("grads", engine.full_grads())
    engine.close()


def judge_accumulation(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the gradients of the window with the mean of the engine's gradients of each micro-batch alone."""
    size = ctx.data_size
    alone = [ctx.rank_records("alone", number)[0] for number in range(WINDOW * size)]
    windows = ctx.rank_records("grads")
    names = dict.fromkeys(name for grads in alone for name in grads)
    for record in windows:
        check_names("full_grads", names, record)
    for name in names:
        grad = windows[0][name]
        # Only one rank's loss counted, so the engine has divided a single gradient by the world size.
        terms = [grads[name].double() * size if name in grads else torch.zeros_like(grad).double() for grads in alone]
        reduce_dtype = ctx.get_reduce_dtype(name, grad.dtype)
        mean, bound = mean_and_bound(terms, reduce_dtype, grad.dtype)
        if not is_power_of_two(size):  # the engine's division has rounded
            bound = bound + gamma(1, reduce_dtype) * sum(term.abs() for term in terms) / len(terms)
        for rank, record in enumerate(windows):
            yield compare_within_bound(ctx.location(name, Part.ACCUMULATION, 0, rank), mean, record[name], bound)
        yield from compare_ranks(ctx.location(name, Part.ACCUMULATION), [record[name] for record in windows])


LAWS = (
    Law(
        name="model.configured",
        statement="each step of the configured training follows the formulas of its optimizer and clipping",
        tier=Tier.STAGED,
        models=(),
        observe=observe_configured,
        judge=judge_configured,
        weights_stay_integers=False,
        variants=(
            Variant(DEFAULT_STEPS, compares_engine_with_itself=True, model_scope=ModelScope.ANY, is_step_count=True),
        ),
        compares_later_forwards=True,
        steps=LawSteps(observe_configured),
        is_long=True,
    ),
    Law(
        name="model.accumulation",
        statement="a window gives the mean of the gradients that the engine computes for each micro-batch alone",
        tier=Tier.STAGED,
        models=(),
        observe=observe_accumulation,
        judge=judge_accumulation,
        variants=tuple(
            Variant(owner.value, (feature,), compares_engine_with_itself=True, model_scope=ModelScope.ANY)
            for owner, feature in OWNER_FEATURES.items()
        ),
        compares_later_forwards=True,
        applies_to_module=has_independent_ranks,
        only_own_kernels=True,  # for torch's kernels, training.accumulation compares with plain PyTorch
    ),
    Law(
        name="model.checkpointing",
        statement="with the model's own activation checkpointing, the engine's gradients equal plain PyTorch's",
        tier=Tier.STAGED,
        models=(),
        observe=observe_checkpointing,
        judge=judge_checkpointing,
        features=(Feature.RECOMPUTATION,),
        applies_to_module=can_checkpoint,
        variants=tuple(Variant(kind, model_scope=ModelScope.ANY) for kind in CHECKPOINT_KINDS),
    ),
)
