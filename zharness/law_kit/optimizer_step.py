"""One optimizer step, judged on its own: the replay of its formula on the numbers that the engine had before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zharness.engines.optimizers import optimizer_class
from zharness.engines.protocol import GroupSpec, OptimizerSpec
from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor
from zharness.law_kit.hints import add_hint, hint_unmoved
from zharness.law_kit.judge_context import JudgeContext
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_ranks, compare_within_bound
from zharness.parity.bounds import BoundedTensor, unit_roundoff
from zharness.parity.compare import (
    CHUNK_ELEMENTS,
    attach_plain_values,
    build_plain_match,
    check_names,
    compare_in_chunks,
    is_bitwise_equal,
)
from zharness.parity.comparison import TensorLocation
from zharness.parity.replay import replay_step

OptimizerState = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class RecordedStep:
    """Labels and step under which weights and optimizer state were recorded, and how many steps before were skipped.

    ``idle`` are those, by parameter, in which it had no gradient, so that it did not take part in them.
    """

    step: int
    params_label: str = "params"
    state_label: str = "state"
    skipped_steps: int = 0
    idle_steps: Mapping[str, int] = field(default_factory=dict)


def judge_step(
    ctx: JudgeContext,
    spec: OptimizerSpec,
    grads: Mapping[str, Tensor],
    recorded_step: RecordedStep,
    clip_factor: ClipFactor = NO_CLIPPING,
) -> Iterator[Comparison]:
    """Weights and state recorded one step after ``moment`` are the replay of the formula on those recorded at it.

    The optimizer has made ``moment.step`` steps before, less those skipped, so the engine's own count has to agree, and
    the schedule is that many steps on. The step is made with the gradients times ``clipped_by``.
    """
    step, made = recorded_step.step, recorded_step.step - recorded_step.skipped_steps
    before, after = (
        ctx.rank_records(recorded_step.params_label, step)[0],
        ctx.rank_records(recorded_step.params_label, step + 1)[0],
    )
    kept, state = (
        unflatten(ctx.rank_records(recorded_step.state_label, step)[0]),
        unflatten(ctx.rank_records(recorded_step.state_label, step + 1)[0]),
    )
    check_names("full_params", before, after)
    yield from compare_step_counts(ctx, kept, made, step, recorded_step.idle_steps)
    for name, weight in before.items():
        if name not in grads:
            stayed = compare_bitwise(ctx.location(name, Part.OPTIMIZER, step), weight, after[name])
            yield add_hint(stayed, "the step moved a parameter that has no gradient")
            continue
        own = {"step": torch.tensor(float(made - recorded_step.idle_steps.get(name, 0)))} | dict(kept.get(name, {}))
        one = ParameterStep(
            weight,
            after[name],
            grads[name],
            own,
            state.get(name, {}),
            step_hyperparameters(spec, name, made),
            clip_factor,
        )
        home = ctx.location(name, Part.OPTIMIZER, step)
        yield from one.compare_in_pieces(spec.name, home) or one.compare_with_replay(spec.name, home)
    moved = {name: entry for name, entry in state.items() if name in grads}
    yield from compare_step_counts(ctx, moved, made + 1, step, recorded_step.idle_steps)


@dataclass(frozen=True)
class ParameterStep:
    """One parameter, its gradient and its state around a step with the arguments ``settings``.

    The gradient is ``clipped_by`` a factor.
    """

    weight: Tensor
    weight_after: Tensor
    grad: Tensor
    state_before: Mapping[str, Tensor]
    state_after: Mapping[str, Tensor]
    hyperparameters: Mapping[str, Any]
    clip_factor: ClipFactor = NO_CLIPPING

    def compare_in_pieces(self, optimizer: str, location: TensorLocation) -> list[Comparison]:
        """``held`` of a large parameter in which nothing is wrong; else nothing.

        A piece that is bitwise what torch.optim's own step makes of the same numbers needs no bound.
        """
        shaped = [
            self.weight_after,
            self.grad,
            *list_state_tensors(self.state_before),
            *list_state_tensors(self.state_after),
        ]
        count = self.weight.numel()
        if count <= CHUNK_ELEMENTS or any(tensor.shape != self.weight.shape for tensor in shaped):
            return []
        flat = self.map_tensors(torch.flatten)
        parts = {
            start: flat.slice_elements(slice(start, start + CHUNK_ELEMENTS))
            for start in range(0, count, CHUNK_ELEMENTS)
        }
        own = dict(zip(parts, run_torch_steps(optimizer, [*parts.values()]), strict=False))

        def compare_piece(piece: slice) -> list[Comparison]:
            part = parts[piece.start]
            return part.compare_with_torch(own.get(piece.start, {}), location) or list(
                part.compare_with_replay(optimizer, location)
            )

        return compare_in_chunks(compare_piece, count)

    def slice_elements(self, piece: slice) -> ParameterStep:
        """These elements of a flat parameter."""
        return self.map_tensors(lambda tensor: tensor[piece])

    def compare_with_torch(self, torch_tensors: Mapping[str, Tensor], location: TensorLocation) -> list[Comparison]:
        """``held`` where weight and state are bitwise ``own``, that of the weight under no name; else nothing."""
        found = {**self.state_after, "": self.weight_after}
        if not torch_tensors or any(
            key not in found or not is_bitwise_equal(tensor, found[key]) for key, tensor in torch_tensors.items()
        ):
            return []
        moments = [
            build_plain_match(
                replace(location, name=f"{location.name}/{key}"),
                tensor,
                moment_bound(self.state_before.get(key), tensor),
            )
            for key, tensor in torch_tensors.items()
            if key
        ]
        return [*moments, compare_torch_step(location, self.weight, self.weight_after)]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> ParameterStep:
        """The same with ``function`` of every tensor but the counts of steps."""

        def map_state(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return {key: tensor if key == "step" else function(tensor) for key, tensor in state.items()}

        weight, moved, grad = map(function, (self.weight, self.weight_after, self.grad))
        return ParameterStep(
            weight,
            moved,
            grad,
            map_state(self.state_before),
            map_state(self.state_after),
            self.hyperparameters,
            self.clip_factor,
        )

    def compare_with_replay(self, optimizer: str, location: TensorLocation) -> Iterator[Comparison]:
        """The state after the step and then the weight, held against the replay of ``optimizer``."""
        grad = self.clip_factor.apply_to(BoundedTensor.exact(self.grad))
        expected, moments = replay_step(optimizer, self.weight, grad, self.state_before, self.hyperparameters)
        plain = partial(run_plain_step, optimizer, self.weight, grad, self.state_before, self.hyperparameters)
        for key, value in moments.items():
            found = self.state_after.get(key, torch.full_like(value.value, torch.nan))
            # State of a weight's own shape is sharded as the weight is.
            pieces = location.pieces if found.shape == self.weight.shape else ()
            place = replace(location, name=f"{location.name}/{key}", pieces=pieces)
            yield attach_plain_values(
                compare_within_bound(place, value.value, found, value.error, Tier.STAGED), partial(plain, key)
            )
        way = expected.value - self.weight.double()
        comparison = compare_within_bound(location, expected.value, self.weight_after, expected.error, signal=way)
        yield hint_unmoved(attach_plain_values(comparison, plain), self.weight, self.weight_after)


@dataclass(frozen=True)
class ClippedSgdStep:
    """A weight, its gradient, and the factor by which that is clipped before a step of SGD at a rate of 1."""

    weight: Tensor
    grad: Tensor
    clip_factor: ClipFactor

    def compare_in_pieces(
        self, ctx: JudgeContext, copies: Sequence[Tensor], location: TensorLocation
    ) -> list[Comparison]:
        """``held`` of every rank's copy of a large weight after the step, where all are right; else nothing."""
        weight, grad = self.weight.flatten(), self.grad.flatten()

        def compare_piece(piece: slice, weight_after: Tensor) -> list[Comparison]:
            part = ClippedSgdStep(weight[piece], grad[piece], self.clip_factor)
            if torch.equal(part.weight - part.grad * self.clip_factor.value, weight_after):
                return [compare_torch_step(location, part.weight, weight_after)]
            return [part.compare_weight(location, weight_after)]

        alike_shaped = all(each.shape == self.weight.shape for each in (self.grad, *copies))
        return ctx.compare_pieces_once(copies, compare_piece) if alike_shaped else []

    def compare_weight(self, location: TensorLocation, weight_after: Tensor) -> Comparison:
        """What the step made of the weight, ``moved``, held against w - factor x g."""
        right = BoundedTensor.exact(self.weight) - self.clip_factor.apply_to(BoundedTensor.exact(self.grad))
        return compare_within_bound(location, right.value, weight_after, right.error)


def moment_bound(before: Tensor | None, after: Tensor) -> Tensor:
    """No less than ``held``'s error of a moment: a mean of the one before and of what is at most their difference."""
    size = after.float().abs() if before is None else after.float().abs() + before.float().abs()
    return 16 * unit_roundoff(after.dtype) * size


def compare_torch_step(location: TensorLocation, weight: Tensor, weight_after: Tensor) -> Comparison:
    """``same_as_torch`` of a step from ``weight`` to ``moved``: a sum of two, of which one is a few operations old."""
    way = weight_after.float() - weight.float()
    sizes = 4 * (weight.float().abs() + weight_after.float().abs()) + 64 * way.abs()
    return build_plain_match(location, weight_after, unit_roundoff(weight_after.dtype) * sizes, way)


def list_state_tensors(state: Mapping[str, Tensor]) -> list[Tensor]:
    """What a state keeps beside the count of steps."""
    return [tensor for key, tensor in state.items() if key != "step"]


def run_torch_steps(optimizer_name: str, steps: Sequence[ParameterStep]) -> Iterator[Mapping[str, Tensor]]:
    """Weight, under no name, and state of each part after torch.optim's own step on its numbers; its pieces are one
    parameter's. Nothing where torch refuses what a wrong engine kept."""
    leaves = [part.weight.detach().clone() for part in steps]
    optimizer = optimizer_class(optimizer_name)(leaves, **steps[0].hyperparameters)
    for leaf, part in zip(leaves, steps, strict=True):
        leaf.grad = part.grad.to(leaf.dtype) * part.clip_factor.value
        if part.state_before.keys() - {"step"}:
            optimizer.state[leaf] = {entry: tensor.detach().clone() for entry, tensor in part.state_before.items()}
        elif float(part.state_before.get("step", torch.zeros(()))) > 0:
            return  # an engine that has made steps and kept nothing of them: torch would begin anew
    with suppress(KeyError, RuntimeError, TypeError):
        optimizer.step()
        for leaf in leaves:
            state = {key: value for key, value in optimizer.state[leaf].items() if isinstance(value, Tensor)}
            yield {**{key: value for key, value in state.items() if key != "step"}, "": leaf}


def run_plain_step(
    optimizer_name: str,
    weight: Tensor,
    grad: BoundedTensor,
    state: Mapping[str, Tensor],
    hyperparameters: Mapping[str, Any],
    key: str = "",
) -> Tensor:
    """The weight, or the entry ``key`` of its state, after torch.optim's own step on the same numbers.

    Raises KeyError where ``state`` has some of what torch keeps and not all.
    """
    leaf = weight.detach().clone()
    leaf.grad = grad.value.to(leaf.dtype)
    optimizer = optimizer_class(optimizer_name)([leaf], **hyperparameters)
    if state.keys() - {"step"}:
        optimizer.state[leaf] = {entry: tensor.detach().clone() for entry, tensor in state.items()}
    optimizer.step()
    return optimizer.state[leaf][key] if key else leaf


def compare_published_weights(
    ctx: JudgeContext, recorded_step: RecordedStep, params_label: str
) -> Iterator[Comparison]:
    """On every rank the model computes with the optimizer's weights, rounded once where its dtype is narrower."""
    for rank, (masters, held) in enumerate(
        zip(
            ctx.rank_records(recorded_step.params_label, recorded_step.step),
            ctx.rank_records(params_label, recorded_step.step),
            strict=True,
        )
    ):
        for name, master in masters.items():
            place = ctx.location(name, Part.GATHER, recorded_step.step - 1, rank)
            yield compare_bitwise(place, master.to(held[name].dtype), held[name])


def compare_step_counts(
    ctx: JudgeContext, state: OptimizerState, steps: int, step: int, idle_steps: Mapping[str, int] | None = None
) -> Iterator[Comparison]:
    """Where the engine counts the steps of a parameter, there are ``steps``, less those in which it was ``idle``.

    Before the first, moments are zero.
    """
    for name, entries in state.items():
        made = steps - (idle_steps or {}).get(name, 0)
        for key, tensor in entries.items():
            place = ctx.location(f"{name}/{key}", Part.OPTIMIZER, step)
            if made == 0:
                clean = torch.zeros_like(tensor)
                yield add_hint(compare_bitwise(place, clean, tensor), "the optimizer has stepped before the first step")
            elif key == "step":
                yield compare_bitwise(place, torch.tensor(float(made)), tensor.double().reshape(()))


def step_hyperparameters(spec: OptimizerSpec, name: str, step: int) -> dict[str, Any]:
    """The arguments that hold for one parameter in one step: its group's overrides, the schedule's factor on lr."""
    group = next((g for g in spec.groups if fnmatchcase(name, g.pattern)), GroupSpec(name, {}))
    merged = {**spec.args, **group.overrides}
    factor = spec.schedule[min(step, len(spec.schedule) - 1)]
    return {**merged, "lr": merged["lr"] * factor}


def unflatten(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """``parameter/key`` entries as a dictionary for each parameter."""
    nested: dict[str, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        name, _, key = path.rpartition("/")
        nested.setdefault(name, {})[key] = tensor
    return nested


def compare_ranks_after_step(ctx: JudgeContext, recorded_step: RecordedStep) -> Iterator[Comparison]:
    """Every rank reports the same weights and the same state, under the same names."""
    for label in (recorded_step.params_label, recorded_step.state_label):
        copies = ctx.rank_records(label, recorded_step.step)
        for copy in copies[1:]:
            check_names(f"what a rank reports as {label}, beside rank 0's,", copies[0], copy)
        for name in copies[0]:
            place = ctx.location(name, Part.GATHER, recorded_step.step - 1)
            yield from compare_ranks(place, [copy[name] for copy in copies])
