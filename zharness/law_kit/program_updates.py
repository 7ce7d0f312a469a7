"""Compare the optimizer steps of a program with the optimizer's formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zharness.engines.protocol import OptimizerSpec
from zharness.law_kit.hints import MOVED_WITHOUT_GRADIENT_HINT, add_hint, hint_unmoved
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext
from zharness.law_kit.optimizer_step import step_hyperparameters, unflatten
from zharness.law_kit.record_comparisons import UNBOUNDED_ERROR, compare_records
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_within_bound
from zharness.parity.compare import check_names, is_bitwise_equal
from zharness.parity.replay import replay_step
from zharness.workload.programs import PendingGradients


@dataclass(frozen=True)
class StepCounts:
    """The number of steps that the optimizer has made, and for each parameter the number of steps with a gradient."""

    steps: int = 0
    by_parameter: Mapping[str, int] = field(default_factory=dict)

    def with_step(self, names: Mapping[str, object]) -> StepCounts:
        """Return the counts after one more step in which the parameters ``names`` had gradients."""
        return StepCounts(
            self.steps + 1, {**self.by_parameter, **{name: self.by_parameter.get(name, 0) + 1 for name in names}}
        )


def judge_parameter_updates(
    ctx: JudgeContext,
    spec: OptimizerSpec,
    grads: BoundedGrads,
    weights_version: int,
    step_counts: StepCounts,
    position: int,
    pending: PendingGradients,
) -> Iterator[Comparison]:
    """Compare each parameter's update with the optimizer's formula; a parameter without a gradient must not change."""
    before, after = ctx.rank_records("masters", weights_version)[0], ctx.rank_records("masters", weights_version + 1)[0]
    old_state = unflatten(ctx.rank_records("state", weights_version)[0])
    new_state = unflatten(ctx.rank_records("state", weights_version + 1)[0])
    check_names("full_params", before, after)
    for name, weight in before.items():
        here = ctx.location(name, Part.OPTIMIZER, position)
        if name not in grads:
            yield add_hint(compare_bitwise(here, weight, after[name]), MOVED_WITHOUT_GRADIENT_HINT)
            yield from judge_unmoved_state(ctx, name, old_state, new_state, position)
            continue
        steps = step_counts.by_parameter.get(name, 0)
        previous = dict(old_state.get(name, {})) | {"step": torch.tensor(float(steps))}
        # Before the first step torch.optim has no state, but an engine may already have state of zeros.
        moments = previous if steps else {"step": previous["step"]}
        expected, wanted = replay_step(
            spec.name, weight, grads[name], moments, step_hyperparameters(spec, name, step_counts.steps)
        )
        found = new_state.get(name, {})
        if "step" in found:
            counted = ctx.location(f"{name}/step", Part.OPTIMIZER, position)
            yield compare_bitwise(counted, torch.tensor(steps + 1.0), found["step"].double().reshape(()))
        for key, value in wanted.items():
            moment = found.get(key, torch.full_like(weight, torch.nan))
            yield compare_within_bound(
                ctx.location(f"{name}/{key}", Part.OPTIMIZER, position), value.value, moment, value.error, Tier.STAGED
            )
        # If a gradient was not recorded and is hardly larger than its bound, Adam's step is unbounded: Adam divides by
        # the root of its square, which may be zero.
        error = expected.error
        if pending is PendingGradients.UNSEEN:
            error = error.where(grads[name].error == 0, error.nan_to_num(nan=UNBOUNDED_ERROR, posinf=UNBOUNDED_ERROR))
        moved = expected.value - weight.double()
        yield hint_unmoved(
            compare_within_bound(here, expected.value, after[name], error, signal=moved), weight, after[name]
        )


def compare_edit(ctx: JudgeContext, name: str, value: float, weights_version: int) -> Iterator[Comparison]:
    """Check that an edit changed the master of ``name`` to ``value`` on every rank, and nothing else."""
    versions = weights_version, weights_version + 1
    for rank, before in enumerate(ctx.rank_records("masters", versions[0])):
        after = ctx.rank_records("masters", versions[1])[rank]
        for other, weight in before.items():
            expected = weight
            if other == name:
                # The edit does not change an element that already had this value, so the element's master may stay
                # unrounded.
                computed = ctx.rank_records("params", versions[0])[rank][other]
                stayed = (computed == value) & (after[other] == weight)
                expected = weight.where(stayed, value)
            yield compare_bitwise(ctx.location(other, Part.GATHER, 0, rank), expected, after[other])
    yield from compare_records(ctx, "state", "state", *versions, Part.OPTIMIZER)


def find_changed_parameters(ctx: JudgeContext, weights_version: int) -> list[str]:
    """Return the names of the parameters whose weight or optimizer state the step after ``weights_version`` changed."""
    before, after = (ctx.rank_records("masters", version)[0] for version in (weights_version, weights_version + 1))
    old, new = (unflatten(ctx.rank_records("state", version)[0]) for version in (weights_version, weights_version + 1))
    return [
        name
        for name, weight in before.items()
        if not is_bitwise_equal(weight, after[name]) or has_changed(old.get(name, {}), new.get(name, {}))
    ]


def has_changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Return whether the optimizer state of one parameter has other names or numbers than ``before``."""
    return before.keys() != after.keys() or any(not is_bitwise_equal(before[key], after[key]) for key in before)


def judge_unmoved_state(
    ctx: JudgeContext,
    name: str,
    state_before: Mapping[str, Mapping[str, Tensor]],
    state_after: Mapping[str, Mapping[str, Tensor]],
    position: int,
) -> Iterator[Comparison]:
    """Check that the step did not change the optimizer state of a parameter without a gradient."""
    for key, tensor in state_before.get(name, {}).items():
        found = state_after.get(name, {}).get(key, torch.full_like(tensor, torch.nan))
        yield compare_bitwise(ctx.location(f"{name}/{key}", Part.OPTIMIZER, position), tensor, found)
