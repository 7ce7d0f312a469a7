"""The laws of anyone's model that the models of the workload need not: its own configuration, its own checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zharness.checks.accumulation import accumulate, clipped, divided_by_engine
from zharness.checks.bench import Bench
from zharness.checks.course import Course
from zharness.checks.law import Check
from zharness.checks.optimizer_step import NO_CLIPPING, Moment, everyone_agrees, judge_step, published
from zharness.checks.trajectory import forward, initial_weights
from zharness.checks.trial import Trial, divided_by
from zharness.checks.usual import Training
from zharness.engines.protocol import AccumulationOwner, Engine, Feature
from zharness.errors import UsageError
from zharness.parity import Comparison, Tier
from zharness.workload import ModelSpec

STEPS = "3"
KINDS = ("reentrant", "non_reentrant")


def owner_of(bench: Bench) -> AccumulationOwner:
    """Who owns the accumulation of a training as configured: the engine, where it can."""
    engine = AccumulationOwner.ENGINE in bench.owners()
    return AccumulationOwner.ENGINE if engine else AccumulationOwner.CALLER


def engine_of(bench: Bench) -> Engine:
    """The engine in the user's configuration, around the model."""
    training = bench.training
    return bench.engine(
        optimizer=training.optimizer,
        clip=training.clip,
        accumulation_steps=training.accumulation,
        accumulation_owner=owner_of(bench),
    )


def observe_configured(bench: Bench) -> None:
    training, owner = bench.training, owner_of(bench)
    own = bench.config.stage in bench.capabilities.own_kernels
    bench.record("setting", {"own kernels": torch.tensor(own), "engine": torch.tensor(owner is owner.ENGINE)})
    engine = engine_of(bench)
    course = course_of(training, bench.variant)
    for step in range(course.steps):
        bench.record_trained(engine, step)
        accumulate(bench, engine, owner, course.micros(step), "loss", engine.backward)
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
        norm = engine.grad_norm()
        bench.record("norm", {} if norm is None else {"norm": torch.tensor(norm, dtype=torch.float64)}, step)
    bench.record_trained(engine, int(bench.variant))
    engine.close()


def course_of(training: Training, steps: str) -> Course:
    """So many steps of a training as configured."""
    return Course(training.optimizer, int(steps), training.clip, training.accumulation)


def judge_configured(trial: Trial) -> Iterator[Comparison]:
    """Each step from the engine's own weights; with kernels of its own, its gradients are another law's matter."""
    yield from initial_weights(trial)
    for step in range(int(trial.variant)):
        if not trial.copies("setting")[0]["own kernels"]:
            yield from gradients(trial, step)
        grads, factor = trial.copies("grads", step)[0], NO_CLIPPING
        if trial.training.clip is not None:
            factor = yield from clipped(trial, "norm", step, grads, trial.training.clip)
        yield from judge_step(trial, trial.training.optimizer, grads, Moment(step, "masters"), factor)
        yield from everyone_agrees(trial, Moment(step + 1))
        yield from published(trial, Moment(step + 1, "masters"), "params")


def gradients(trial: Trial, step: int) -> Iterator[Comparison]:
    """Losses bitwise, and the mean over micro-batches, of which an engine may divide the loss or the gradient."""
    parts, params = trial.training.accumulation, trial.copies("params", step)[0]
    micros = course_of(trial.training, trial.variant).micros(step)
    divided = [trial.locals(micro, params, weigh=divided_by(parts)) for micro in micros]
    for micro, local in zip(micros, divided, strict=True):
        yield from forward(trial, step, local, micro)
    if trial.copies("setting")[0]["engine"] and parts > 1:
        yield from divided_by_engine(trial, "grads", step, micros, params, divided)
    else:
        yield from trial.reduced("grads", divided, step, scale=parts)


def checkpointed(spec: ModelSpec, kind: str) -> nn.Module:
    """The model with its own activation checkpointing on. Raises UsageError for a model that has none."""
    model: Any = spec.build()
    if not can_checkpoint(model):
        raise UsageError(
            f"the model of {spec.name} has no gradient_checkpointing_enable() as models of transformers have; one "
            "that checkpoints in another way does so in every law, as its factory made it"
        )
    reentrant = kind == "reentrant"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and not any(weight.requires_grad for weight in model.get_input_embeddings().parameters()):
        model.enable_input_require_grads()  # a reentrant region gives no gradient where no input of it requires one
    return model  # type: ignore[no-any-return]


def can_checkpoint(model: nn.Module) -> bool:
    """Whether the model has checkpointing of the transformers package's kind, and supports it."""
    return callable(getattr(model, "gradient_checkpointing_enable", None)) and bool(
        getattr(model, "supports_gradient_checkpointing", False)
    )


def with_checkpoints(spec: ModelSpec, kind: str) -> ModelSpec:
    """``spec`` with its model under its own activation checkpointing."""
    return replace(spec, build=partial(checkpointed, spec, kind))


def observe_checkpointing(bench: Bench) -> None:
    engine = bench.around(with_checkpoints(bench.spec, bench.variant).model(bench.seed))
    engine.backward(bench.loss(engine, step=0))
    bench.record("grads", engine.full_grads())
    engine.close()


def judge_checkpointing(trial: Trial) -> Iterator[Comparison]:
    """Plain PyTorch's gradients with the same checkpointing."""
    spec = with_checkpoints(trial.baseline.spec, trial.variant)
    plain = replace(trial, baseline=replace(trial.baseline, spec=spec))
    local = plain.locals(step=0)
    yield from plain.same_loss(0, local)
    yield from plain.reduced("grads", [local])


CHECKS = (
    Check(
        name="model.configured",
        law="each step of the training as configured is the replay of its optimizer, clipping and accumulation",
        tier=Tier.STAGED,
        models=(),
        observe=observe_configured,
        judge=judge_configured,
        integral=False,
        variants=((STEPS, ()),),
        own_numbers=(STEPS,),
        any_model=(STEPS,),
        counted=True,
    ),
    Check(
        name="model.checkpointing",
        law="under the model's own activation checkpointing gradients are plain PyTorch's under the same",
        tier=Tier.STAGED,
        models=(),
        observe=observe_checkpointing,
        judge=judge_checkpointing,
        needs=(Feature.RECOMPUTATION,),
        variants=tuple((kind, ()) for kind in KINDS),
        any_model=KINDS,
    ),
)
