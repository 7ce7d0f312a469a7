"""One optimizer step, judged on its own: the replay of its formula on the numbers that the engine had before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zharness.checks.trial import Trial
from zharness.engines.optimizers import optimizer_class
from zharness.engines.protocol import GroupSpec, OptimizerSpec
from zharness.parity import Comparison, Part, Tier, identical, ranks_agree, within
from zharness.parity.bounds import Bounded, gamma, unit_roundoff
from zharness.parity.compare import PIECE, alike, beside, check_names, in_pieces, same_as_torch
from zharness.parity.facts import Place
from zharness.parity.replay import replay

State = Mapping[str, Mapping[str, Tensor]]

CLIPPING = 3  # roundings of torch.nn.utils.clip_grad_norm_'s factor: of the norm, of norm + 1e-6, of the quotient


@dataclass(frozen=True)
class Factor:
    """By what gradients are clipped: 1 where they are not, NaN where the norm is, as torch's.

    ``unknown`` is how far, relative to it, an engine's may be beyond CLIPPING: the rounding of a norm that it does not
    report.
    """

    value: float = 1.0
    unknown: float = 0.0

    @classmethod
    def within(cls, limit: float, norm: Tensor, error: Tensor, reported: Tensor | None) -> Factor:
        """That of torch.nn.utils.clip_grad_norm_ to ``limit``, by the norm ``reported``; where there is none, by
        ``norm``, which an engine's may be off by ``error``."""
        if reported is not None:
            return cls(float(clipping(limit, reported)))
        value, norms = clipping(limit, norm), ((norm - error).clamp(min=0.0), norm + error)
        return cls(
            float(value), float(torch.stack([(clipping(limit, one) - value).abs() for one in norms]).max() / value)
        )

    def of(self, grad: Bounded) -> Bounded:
        """``grad`` times the factor; ``grad`` itself where nobody clips."""
        if self == Factor():
            return grad
        value = torch.tensor(self.value, dtype=torch.float64)
        return grad * Bounded(value, value * (gamma(CLIPPING - 1, grad.dtype) + self.unknown), grad.dtype)


def clipping(limit: float, norm: Tensor) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s factor to ``limit``, in float64."""
    return (limit / (norm.double() + 1e-6)).clamp(max=1.0)


NO_CLIPPING = Factor()


@dataclass(frozen=True)
class Moment:
    """Labels and step under which weights and optimizer state were recorded, and how many steps before were skipped.

    ``idle`` are those, by parameter, in which it had no gradient, so that it did not take part in them.
    """

    step: int
    params: str = "params"
    state: str = "state"
    skipped: int = 0
    idle: Mapping[str, int] = field(default_factory=dict)


def judge_step(
    trial: Trial, spec: OptimizerSpec, grads: Mapping[str, Tensor], moment: Moment, clipped_by: Factor = NO_CLIPPING
) -> Iterator[Comparison]:
    """Weights and state recorded one step after ``moment`` are the replay of the formula on those recorded at it.

    The optimizer has made ``moment.step`` steps before, less those skipped, so the engine's own count has to agree, and
    the schedule is that many steps on. The step is made with the gradients times ``clipped_by``.
    """
    step, made = moment.step, moment.step - moment.skipped
    before, after = trial.copies(moment.params, step)[0], trial.copies(moment.params, step + 1)[0]
    kept, state = unflatten(trial.copies(moment.state, step)[0]), unflatten(trial.copies(moment.state, step + 1)[0])
    check_names("full_params", before, after)
    yield from same_count(trial, kept, made, step, moment.idle)
    for name, weight in before.items():
        if name not in grads:
            stayed = identical(trial.place(name, Part.OPTIMIZER, step), weight, after[name])
            yield told(stayed, "the step moved a parameter that has no gradient")
            continue
        own = {"step": torch.tensor(float(made - moment.idle.get(name, 0)))} | dict(kept.get(name, {}))
        one = Stepped(weight, after[name], grads[name], own, state.get(name, {}), hyper(spec, name, made), clipped_by)
        home = trial.place(name, Part.OPTIMIZER, step)
        yield from one.in_pieces(spec.name, home) or one.held(spec.name, home)
    moved = {name: entry for name, entry in state.items() if name in grads}
    yield from same_count(trial, moved, made + 1, step, moment.idle)


@dataclass(frozen=True)
class Stepped:
    """One parameter, its gradient and its state around a step with the arguments ``settings``.

    The gradient is ``clipped_by`` a factor.
    """

    weight: Tensor
    moved: Tensor
    grad: Tensor
    kept: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    clipped_by: Factor = NO_CLIPPING

    def in_pieces(self, optimizer: str, home: Place) -> list[Comparison]:
        """``held`` of a large parameter in which nothing is wrong; else nothing.

        A piece that is bitwise what torch.optim's own step makes of the same numbers needs no bound.
        """
        shaped = [self.moved, self.grad, *entries(self.kept), *entries(self.state)]
        count = self.weight.numel()
        if count <= PIECE or any(tensor.shape != self.weight.shape for tensor in shaped):
            return []
        flat = self.mapped(torch.flatten)
        parts = {start: flat.part(slice(start, start + PIECE)) for start in range(0, count, PIECE)}
        own = dict(zip(parts, torchs_steps(optimizer, [*parts.values()]), strict=False))

        def compare(piece: slice) -> list[Comparison]:
            part = parts[piece.start]
            return part.as_torch(own.get(piece.start, {}), home) or list(part.held(optimizer, home))

        return in_pieces(compare, count)

    def part(self, piece: slice) -> Stepped:
        """These elements of a flat parameter."""
        return self.mapped(lambda tensor: tensor[piece])

    def as_torch(self, own: Mapping[str, Tensor], home: Place) -> list[Comparison]:
        """``held`` where weight and state are bitwise ``own``, that of the weight under no name; else nothing."""
        found = {**self.state, "": self.moved}
        if not own or any(key not in found or not alike(tensor, found[key]) for key, tensor in own.items()):
            return []
        moments = [
            same_as_torch(replace(home, name=f"{home.name}/{key}"), tensor, moment_bound(self.kept.get(key), tensor))
            for key, tensor in own.items()
            if key
        ]
        return [*moments, step_as_torch(home, self.weight, self.moved)]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Stepped:
        """The same with ``function`` of every tensor but the counts of steps."""

        def of(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return {key: tensor if key == "step" else function(tensor) for key, tensor in state.items()}

        weight, moved, grad = map(function, (self.weight, self.moved, self.grad))
        return Stepped(weight, moved, grad, of(self.kept), of(self.state), self.settings, self.clipped_by)

    def held(self, optimizer: str, home: Place) -> Iterator[Comparison]:
        """The state after the step and then the weight, held against the replay of ``optimizer``."""
        grad = self.clipped_by.of(Bounded.exact(self.grad))
        expected, moments = replay(optimizer, self.weight, grad, self.kept, self.settings)
        plain = partial(plain_step, optimizer, self.weight, grad, self.kept, self.settings)
        for key, value in moments.items():
            found = self.state.get(key, torch.full_like(value.value, torch.nan))
            # State of a weight's own shape is sharded as the weight is.
            pieces = home.pieces if found.shape == self.weight.shape else ()
            place = replace(home, name=f"{home.name}/{key}", pieces=pieces)
            yield beside(within(place, value.value, found, value.error, Tier.STAGED), partial(plain, key))
        way = expected.value - self.weight.double()
        comparison = within(home, expected.value, self.moved, expected.error, signal=way)
        yield hinted(beside(comparison, plain), self.weight, self.moved)


@dataclass(frozen=True)
class Clipped:
    """A weight, its gradient, and the factor by which that is clipped before a step of SGD at a rate of 1."""

    weight: Tensor
    grad: Tensor
    factor: Factor

    def right_in_pieces(self, trial: Trial, everyone: Sequence[Tensor], place: Place) -> list[Comparison]:
        """``held`` of every rank's copy of a large weight after the step, where all are right; else nothing."""
        weight, grad = self.weight.flatten(), self.grad.flatten()

        def compare(piece: slice, moved: Tensor) -> list[Comparison]:
            part = Clipped(weight[piece], grad[piece], self.factor)
            if torch.equal(part.weight - part.grad * self.factor.value, moved):
                return [step_as_torch(place, part.weight, moved)]
            return [part.held(place, moved)]

        alike_shaped = all(each.shape == self.weight.shape for each in (self.grad, *everyone))
        return trial.once_for_all(everyone, compare) if alike_shaped else []

    def held(self, place: Place, moved: Tensor) -> Comparison:
        """What the step made of the weight, ``moved``, held against w - factor x g."""
        right = Bounded.exact(self.weight) - self.factor.of(Bounded.exact(self.grad))
        return within(place, right.value, moved, right.error)


def moment_bound(kept: Tensor | None, moved: Tensor) -> Tensor:
    """No less than ``held``'s error of a moment: a mean of the one before and of what is at most their difference."""
    size = moved.float().abs() if kept is None else moved.float().abs() + kept.float().abs()
    return 16 * unit_roundoff(moved.dtype) * size


def step_as_torch(place: Place, weight: Tensor, moved: Tensor) -> Comparison:
    """``same_as_torch`` of a step from ``weight`` to ``moved``: a sum of two, of which one is a few operations old."""
    way = moved.float() - weight.float()
    sizes = 4 * (weight.float().abs() + moved.float().abs()) + 64 * way.abs()
    return same_as_torch(place, moved, unit_roundoff(moved.dtype) * sizes, way)


def entries(state: Mapping[str, Tensor]) -> list[Tensor]:
    """What a state keeps beside the count of steps."""
    return [tensor for key, tensor in state.items() if key != "step"]


def torchs_steps(name: str, parts: Sequence[Stepped]) -> Iterator[Mapping[str, Tensor]]:
    """Weight, under no name, and state of each part after torch.optim's own step on its numbers; its pieces are one
    parameter's. Nothing where torch refuses what a wrong engine kept."""
    leaves = [part.weight.detach().clone() for part in parts]
    optimizer = optimizer_class(name)(leaves, **parts[0].settings)
    for leaf, part in zip(leaves, parts, strict=True):
        leaf.grad = part.grad.to(leaf.dtype) * part.clipped_by.value
        if part.kept.keys() - {"step"}:
            optimizer.state[leaf] = {entry: tensor.detach().clone() for entry, tensor in part.kept.items()}
        elif float(part.kept.get("step", torch.zeros(()))) > 0:
            return  # an engine that has made steps and kept nothing of them: torch would begin anew
    with suppress(KeyError, RuntimeError, TypeError):
        optimizer.step()
        for leaf in leaves:
            state = {key: value for key, value in optimizer.state[leaf].items() if isinstance(value, Tensor)}
            yield {**{key: value for key, value in state.items() if key != "step"}, "": leaf}


def plain_step(
    name: str, weight: Tensor, grad: Bounded, state: Mapping[str, Tensor], settings: Mapping[str, Any], key: str = ""
) -> Tensor:
    """The weight, or the entry ``key`` of its state, after torch.optim's own step on the same numbers.

    Raises KeyError where ``state`` has some of what torch keeps and not all.
    """
    leaf = weight.detach().clone()
    leaf.grad = grad.value.to(leaf.dtype)
    optimizer = optimizer_class(name)([leaf], **settings)
    if state.keys() - {"step"}:
        optimizer.state[leaf] = {entry: tensor.detach().clone() for entry, tensor in state.items()}
    optimizer.step()
    return optimizer.state[leaf][key] if key else leaf


def published(trial: Trial, moment: Moment, params: str) -> Iterator[Comparison]:
    """On every rank the model computes with the optimizer's weights, rounded once where its dtype is narrower."""
    for rank, (masters, held) in enumerate(
        zip(trial.copies(moment.params, moment.step), trial.copies(params, moment.step), strict=True)
    ):
        for name, master in masters.items():
            place = trial.place(name, Part.GATHER, moment.step - 1, rank)
            yield identical(place, master.to(held[name].dtype), held[name])


def same_count(
    trial: Trial, state: State, steps: int, at: int, idle: Mapping[str, int] | None = None
) -> Iterator[Comparison]:
    """Where the engine counts the steps of a parameter, there are ``steps``, less those in which it was ``idle``.

    Before the first, moments are zero.
    """
    for name, entries in state.items():
        made = steps - (idle or {}).get(name, 0)
        for key, tensor in entries.items():
            place = trial.place(f"{name}/{key}", Part.OPTIMIZER, at)
            if made == 0:
                clean = torch.zeros_like(tensor)
                yield told(identical(place, clean, tensor), "the optimizer has stepped before the first step")
            elif key == "step":
                yield identical(place, torch.tensor(float(made)), tensor.double().reshape(()))


def hinted(comparison: Comparison, before: Tensor, after: Tensor) -> Comparison:
    """Say so when the wrong weight is a weight that did not move at all."""
    return told(comparison, "the step did not move this parameter") if torch.equal(before, after) else comparison


def told(comparison: Comparison, hint: str) -> Comparison:
    """``comparison`` with ``hint``, where it is a mismatch."""
    if comparison.mismatch is None:
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, hint=hint))


def norm_told(comparison: Comparison) -> Comparison:
    """Say so when a norm is wrong because there is none: it is recorded as NaN."""
    absent = comparison.mismatch is not None and math.isnan(comparison.mismatch.actual)
    return told(comparison, "the engine reports none") if absent else comparison


def hyper(spec: OptimizerSpec, name: str, step: int) -> dict[str, Any]:
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


def everyone_agrees(trial: Trial, moment: Moment) -> Iterator[Comparison]:
    """Every rank reports the same weights and the same state, under the same names."""
    for label in (moment.params, moment.state):
        copies = trial.copies(label, moment.step)
        for copy in copies[1:]:
            check_names(f"what a rank reports as {label}, beside rank 0's,", copies[0], copy)
        for name in copies[0]:
            place = trial.place(name, Part.GATHER, moment.step - 1)
            yield from ranks_agree(place, [copy[name] for copy in copies])
