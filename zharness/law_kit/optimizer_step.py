"""Judge one optimizer step: apply the optimizer's formula to the numbers that the engine had before the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zharness.engines.optimizers import optimizer_class
from zharness.engines.protocol import GroupSpec, OptimizerSpec
from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor
from zharness.law_kit.hints import (
    MOVED_WITHOUT_GRADIENT_HINT,
    NO_STATE_HINT,
    add_hint,
    hint_learning_rate,
    hint_step_count,
    hint_unmoved,
)
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.record_comparisons import compare_record_of_ranks
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_within_bound
from zharness.parity.bounds import BoundedTensor, unit_roundoff
from zharness.parity.compare import (
    CHUNK_ELEMENTS,
    attach_plain_values,
    build_plain_match,
    check_names,
    compare_in_chunks,
    is_bitwise_equal,
    match_equal_tensors,
)
from zharness.parity.comparison import TensorLocation
from zharness.parity.exact_step import is_exact_step
from zharness.parity.replay import replay_step

OptimizerState = Mapping[str, Mapping[str, Tensor]]
NO_ERRORS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class RecordedStep:
    """Where ranks recorded weights and optimizer state before an optimizer step: the labels and the number of the step.

    ``skipped_steps`` is the number of earlier steps that the engine skipped. ``idle_steps`` maps the name of a
    parameter to the number of earlier steps in which the parameter had no gradient, so that the optimizer did not
    update it.
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
    grad_errors: Mapping[str, Tensor] = NO_ERRORS,
) -> Iterator[Comparison]:
    """Compare weights and state one step after ``recorded_step`` with the result of the optimizer's formula.

    The formula uses the gradients, which may differ by ``grad_errors``, times ``clip_factor``. Before this step, the
    optimizer has made ``recorded_step.step`` steps minus the skipped steps; the engine's step counts and the schedule
    have to agree with this number.
    """
    step, steps_made = recorded_step.step, recorded_step.step - recorded_step.skipped_steps
    before, after = (
        ctx.rank_records(recorded_step.params_label, step)[0],
        ctx.rank_records(recorded_step.params_label, step + 1)[0],
    )
    old_state, new_state = (
        unflatten(ctx.rank_records(recorded_step.state_label, step)[0]),
        unflatten(ctx.rank_records(recorded_step.state_label, step + 1)[0]),
    )
    check_names("full_params", before, after)
    yield from compare_step_counts(ctx, old_state, steps_made, step, recorded_step.idle_steps)
    for name, weight in before.items():
        if name not in grads:
            comparison = compare_bitwise(ctx.location(name, Part.OPTIMIZER, step), weight, after[name])
            yield add_hint(comparison, MOVED_WITHOUT_GRADIENT_HINT)
            continue
        state_before = {"step": torch.tensor(float(steps_made - recorded_step.idle_steps.get(name, 0)))} | dict(
            old_state.get(name, {})
        )
        parameter_step = ParameterStep(
            weight,
            after[name],
            grads[name],
            state_before,
            new_state.get(name, {}),
            step_hyperparameters(spec, name, steps_made),
            clip_factor,
            grad_errors.get(name),
        )
        place = ctx.location(name, Part.OPTIMIZER, step)
        in_pieces = parameter_step.compare_in_pieces(spec.name, place)
        yield from in_pieces or parameter_step.compare_with_replay(spec.name, place)
    updated = {name: entry for name, entry in new_state.items() if name in grads}
    yield from compare_step_counts(ctx, updated, steps_made + 1, step, recorded_step.idle_steps)


@dataclass(frozen=True)
class ParameterStep:
    """The weight and optimizer state of one parameter before and after a step, its gradient, and the clip factor.

    ``grad_error`` bounds the error of the gradient; it is None if the gradient is exact.
    """

    weight: Tensor
    weight_after: Tensor
    grad: Tensor
    state_before: Mapping[str, Tensor]
    state_after: Mapping[str, Tensor]
    hyperparameters: Mapping[str, Any]
    clip_factor: ClipFactor = NO_CLIPPING
    grad_error: Tensor | None = None

    def compare_in_pieces(self, optimizer: str, location: TensorLocation) -> list[Comparison]:
        """Compare a large parameter piece by piece. Return an empty list if the parameter is small or wrong.

        No bound is computed for a piece that is bitwise equal to the result of torch.optim on the same numbers.
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
        torch_results = dict(zip(parts, run_torch_steps(optimizer, [*parts.values()]), strict=False))

        def compare_piece(piece: slice) -> list[Comparison]:
            """Compare one piece with the result of torch.optim and, if they differ, with the optimizer's formula."""
            part = parts[piece.start]
            return part.compare_with_torch(torch_results.get(piece.start, {}), location) or list(
                part.compare_with_replay(optimizer, location)
            )

        return compare_in_chunks(compare_piece, count)

    def slice_elements(self, piece: slice) -> ParameterStep:
        """Return this step for only the elements ``piece`` of a flat parameter."""
        return self.map_tensors(lambda tensor: tensor[piece])

    def compare_with_torch(self, torch_tensors: Mapping[str, Tensor], location: TensorLocation) -> list[Comparison]:
        """Return passed comparisons if weight and state are bitwise equal to ``torch_tensors``, else an empty list.

        ``torch_tensors`` holds the state by key, and the weight under the empty key.
        """
        engine_tensors = {**self.state_after, "": self.weight_after}
        if not torch_tensors or any(
            key not in engine_tensors or not is_bitwise_equal(tensor, engine_tensors[key])
            for key, tensor in torch_tensors.items()
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
        """Return a copy of the step in which ``function`` is applied to every tensor except step counts."""

        def map_state(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            """Apply ``function`` to every tensor of an optimizer state except the step count."""
            return {key: tensor if key == "step" else function(tensor) for key, tensor in state.items()}

        weight, weight_after, grad = map(function, (self.weight, self.weight_after, self.grad))
        return ParameterStep(
            weight,
            weight_after,
            grad,
            map_state(self.state_before),
            map_state(self.state_after),
            self.hyperparameters,
            self.clip_factor,
            None if self.grad_error is None else function(self.grad_error),
        )

    def compare_with_replay(self, optimizer: str, location: TensorLocation) -> Iterator[Comparison]:
        """Compare the state and then the weight after the step with the optimizer's formula, within error bounds.

        A step that rounds nothing is compared bitwise, by tier X.
        """
        exact = BoundedTensor.exact(self.grad)
        grad = self.clip_factor.apply_to(exact if self.grad_error is None else replace(exact, error=self.grad_error))
        tier = Tier.EXACT if self.rounds_nothing(optimizer) else Tier.STAGED
        expected, moments = replay_step(optimizer, self.weight, grad, self.state_before, self.hyperparameters)
        plain = partial(run_plain_step, optimizer, self.weight, grad, self.state_before, self.hyperparameters)
        for key, value in moments.items():
            moment = self.state_after.get(key, torch.full_like(value.value, torch.nan))
            place = replace(location, name=f"{location.name}/{key}")
            bound = value.error if tier is Tier.STAGED else torch.zeros_like(value.error)
            comparison = attach_plain_values(
                compare_within_bound(place, value.value, moment, bound, tier), partial(plain, key)
            )
            yield comparison if key in self.state_after else add_hint(comparison, NO_STATE_HINT)
        change = expected.value - self.weight.double()
        bound = expected.error if tier is Tier.STAGED else torch.zeros_like(expected.error)
        comparison = compare_within_bound(location, expected.value, self.weight_after, bound, tier, signal=change)
        comparison = hint_step_count(attach_plain_values(comparison, plain), self.state_before, self.state_after)
        if optimizer == "sgd" and self.clip_factor == NO_CLIPPING:
            update = self.weight_after.double() - self.weight.double()
            comparison = hint_learning_rate(comparison, update, self.grad.double(), self.hyperparameters)
        yield hint_unmoved(comparison, self.weight, self.weight_after)

    def rounds_nothing(self, optimizer: str) -> bool:
        """Return whether no operation of the step rounds, so that every order of the operations gives the same bits."""
        buffer = self.state_before.get("momentum_buffer")
        return self.clip_factor == NO_CLIPPING and is_exact_step(
            optimizer, self.weight, self.grad, buffer, self.hyperparameters
        )


@dataclass(frozen=True)
class ClippedSgdStep:
    """A weight, its gradient, and the clip factor, before an SGD step with a learning rate of 1."""

    weight: Tensor
    grad: Tensor
    clip_factor: ClipFactor

    def compare_in_pieces(self, records: Sequence[Tensor], location: TensorLocation) -> list[Comparison]:
        """Compare a large weight after the step on every rank. Return an empty list if the weight is small or wrong."""
        weight, grad = self.weight.flatten(), self.grad.flatten()

        def compare_piece(piece: slice, weight_after: Tensor) -> list[Comparison]:
            """Compare one piece of the weight after the step with ``weight - clip_factor * grad``."""
            part = ClippedSgdStep(weight[piece], grad[piece], self.clip_factor)
            if torch.equal(part.weight - part.grad * self.clip_factor.value, weight_after):
                return [compare_torch_step(location, part.weight, weight_after)]
            return [part.compare_weight(location, weight_after)]

        same_shape = all(tensor.shape == self.weight.shape for tensor in (self.grad, *records))
        return match_equal_tensors(records, compare_piece) if same_shape else []

    def compare_weight(self, location: TensorLocation, weight_after: Tensor) -> Comparison:
        """Compare the weight after the step with ``weight - clip_factor * grad``."""
        right = BoundedTensor.exact(self.weight) - self.clip_factor.apply_to(BoundedTensor.exact(self.grad))
        return compare_within_bound(location, right.value, weight_after, right.error)


def moment_bound(before: Tensor | None, after: Tensor) -> Tensor:
    """Return an upper bound on the rounding error of a moment (such as Adam's ``exp_avg``) in the optimizer's formula.

    The new moment is a weighted mean of the old moment and a term from the gradient, so the absolute values of the old
    and the new moment bound the rounding error of the new moment.
    """
    size = after.float().abs() if before is None else after.float().abs() + before.float().abs()
    return 16 * unit_roundoff(after.dtype) * size


def compare_torch_step(location: TensorLocation, weight: Tensor, weight_after: Tensor) -> Comparison:
    """Return the passed comparison of a weight that is bitwise equal to torch's result. Its bound is the formula's."""
    change = weight_after.float() - weight.float()
    sizes = 4 * (weight.float().abs() + weight_after.float().abs()) + 64 * change.abs()
    return build_plain_match(location, weight_after, unit_roundoff(weight_after.dtype) * sizes, change)


def list_state_tensors(state: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tensors of an optimizer state except the step count."""
    return [tensor for key, tensor in state.items() if key != "step"]


def run_torch_steps(optimizer_name: str, steps: Sequence[ParameterStep]) -> Iterator[Mapping[str, Tensor]]:
    """Yield the weight and state of each piece of one parameter after torch.optim's own step.

    The weight has the empty key. If torch raises an error, nothing is yielded, because the engine may have recorded a
    wrong state.
    """
    leaves = [part.weight.detach().clone() for part in steps]
    optimizer = optimizer_class(optimizer_name)(leaves, **steps[0].hyperparameters)
    for leaf, part in zip(leaves, steps, strict=True):
        leaf.grad = part.grad.to(leaf.dtype) * part.clip_factor.value
        if part.state_before.keys() - {"step"}:
            optimizer.state[leaf] = {entry: tensor.detach().clone() for entry, tensor in part.state_before.items()}
        elif float(part.state_before.get("step", torch.zeros(()))) > 0:
            return  # the engine recorded no state of earlier steps: torch would start as before the first step
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
    """Return the weight, or the entry ``key`` of its state, after torch.optim's own step on the same numbers.

    Raise KeyError if ``state`` lacks an entry that torch keeps.
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
    """Check that every rank's model weights equal the optimizer's master weights, rounded to the model's dtype."""
    for rank, (masters, published) in enumerate(
        zip(
            ctx.rank_records(recorded_step.params_label, recorded_step.step),
            ctx.rank_records(params_label, recorded_step.step),
            strict=True,
        )
    ):
        found = {name: weight for name, weight in published.items() if name in masters}
        check_names(f"the weights of rank {rank}, compared with those that the optimizer updates,", masters, found)
        for name, master in masters.items():
            place = ctx.location(name, Part.GATHER, max(0, recorded_step.step - 1), rank)
            yield compare_bitwise(place, master.to(published[name].dtype), published[name])


def compare_step_counts(
    ctx: JudgeContext, state: OptimizerState, steps: int, step: int, idle_steps: Mapping[str, int] | None = None
) -> Iterator[Comparison]:
    """Check that the engine's step counts equal ``steps`` minus each parameter's ``idle_steps``.

    Before a parameter's first step, all of its optimizer state has to be zero.
    """
    for name, entries in state.items():
        expected_count = steps - (idle_steps or {}).get(name, 0)
        for key, tensor in entries.items():
            place = ctx.location(f"{name}/{key}", Part.OPTIMIZER, step)
            if expected_count == 0:
                zeros = torch.zeros_like(tensor)
                yield add_hint(compare_bitwise(place, zeros, tensor), "the optimizer has stepped before the first step")
            elif key == "step":
                yield compare_bitwise(place, torch.tensor(float(expected_count)), tensor.double().reshape(()))


def step_hyperparameters(spec: OptimizerSpec, name: str, step: int) -> dict[str, Any]:
    """Return one parameter's optimizer arguments in one step, after the overrides of its group and the schedule."""
    group = next((g for g in spec.groups if fnmatchcase(name, g.pattern)), GroupSpec(name, {}))
    merged = {**spec.args, **group.overrides}
    factor = spec.schedule[min(step, len(spec.schedule) - 1)]
    return {**merged, "lr": merged["lr"] * factor}


def unflatten(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Convert a flat dictionary with keys ``parameter/key`` into a dictionary of one dictionary per parameter."""
    nested: dict[str, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        name, _, key = path.rpartition("/")
        nested.setdefault(name, {})[key] = tensor
    return nested


def compare_ranks_after_step(ctx: JudgeContext, recorded_step: RecordedStep) -> Iterator[Comparison]:
    """Check that all ranks recorded the same names and values of weights and optimizer state."""
    for label in (recorded_step.params_label, recorded_step.state_label):
        yield from compare_record_of_ranks(ctx, label, recorded_step.step, recorded_step.step - 1)
