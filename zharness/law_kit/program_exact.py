"""Compare programs on meshes, where ranks add up parts of sums, bitwise wherever no sum is rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from zharness.device.float32_products import Float32Products
from zharness.errors import RoundedScenarioError
from zharness.law_kit.clipped_step import bound_clipped_parts, compute_absolute_grads, hint_norm_of_update
from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext
from zharness.law_kit.program_judge import ProgramJudge
from zharness.law_kit.rank_actions import second_loss
from zharness.parity import Comparison
from zharness.parity.baseline import LocalResult, Objective
from zharness.parity.bounds import BoundedTensor
from zharness.parity.certificate import SIGNIFICAND_BITS, bound_partial_sums
from zharness.workload import Batch
from zharness.workload.programs import CallerState, Mark, PendingGradients, Verb


def second_objective(output: Tensor, _batch: Batch) -> Tensor:
    """Return the second loss of an output."""
    return second_loss(output)


def holds_sums(ctx: JudgeContext, bound: float, steps: int) -> bool:
    """Return whether the cell's dtype holds every integer up to ``bound``, which bounds sums after ``steps`` steps.

    Raises RoundedScenarioError if the dtype does not hold the sums of the initial weights, because the law would then
    compare nothing.
    """
    holds = bound < 2.0 ** SIGNIFICAND_BITS[ctx.dtype]
    if not (holds or steps) and ctx.baseline.products is Float32Products.FULL:
        raise RoundedScenarioError("a sum of the initial weights is rounded, so no engine can be judged by it")
    return holds


@dataclass(frozen=True)
class Sums:
    """The sums of one backward of all ranks: a bound of all partial sums, and the divisor of the mean.

    ``absolute`` has the gradients of each data coordinate if every term is replaced by its absolute value.
    """

    bound: float
    divisor: int
    absolute: list[LocalResult]


@dataclass
class ExactProgramJudge(ProgramJudge):
    """A judge of an exact model whose weights stay integers, for engines that add up parts of a sum over ranks.

    An output, or the gradient of a window, is compared bitwise if a certificate says that no sum in it is rounded, and
    otherwise not at all. ``sums`` has the sums of each backward so far. ``bounds`` has the bound of each micro-batch;
    the key is its verb, its number, whether the loss is the second loss, and the version of the weights.
    """

    sums: list[Sums] = field(default_factory=list)
    bounds: dict[tuple[Verb, int, bool, int], float] = field(default_factory=dict)

    def compare_output(self, position: int, verb: Verb, micro: int) -> Iterator[Comparison]:
        """Check that every rank's output is bitwise equal to plain PyTorch's, if no sum in it is rounded."""
        if self.holds(self.bound_sums(verb, micro, self.ctx.baseline.objective)):
            yield from super().compare_output(position, verb, micro)

    def compute_gradients(self, verb: Verb, micro: int) -> list[LocalResult]:
        """Return the local gradients of a whole backward of a micro-batch on each rank, and bound their sums."""
        grads = super().compute_gradients(verb, micro)
        is_other = Mark.OTHER in verb.marks
        objective = second_objective if is_other else self.ctx.baseline.objective
        inputs = self.ctx.baseline.batch(0, micro).inputs
        divisor = inputs.shape[:-1].numel() if is_other else len(inputs)
        forward = self.forward_verbs[micro]
        absolute = self.sum_absolute_terms(forward, micro, objective) if self.program.clip is not None else []
        self.sums.append(Sums(self.bound_sums(forward, micro, objective), divisor, absolute))
        return grads

    def bound_sums(self, verb: Verb, micro: int, objective: Objective) -> float:
        """Return the largest bound over the micro-batches of all data coordinates, with the current weights."""
        key = verb, micro, objective is second_objective, self.weights_version
        if key not in self.bounds:
            self.bounds[key] = max(
                bound_partial_sums(self.ctx.baseline, batch, objective, self.get_weights())
                for batch in self.get_batches(verb, micro)
            )
        return self.bounds[key]

    def sum_absolute_terms(self, verb: Verb, micro: int, objective: Objective) -> list[LocalResult]:
        """Return each data coordinate's float64 gradients of a model and a micro-batch of absolute values."""
        return compute_absolute_grads(self.ctx, self.get_batches(verb, micro), objective, self.get_weights())

    def get_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights that the engine has now, or None for the initial ones."""
        return self.ctx.rank_records("params", self.weights_version)[0] if self.weights_version else None

    def get_batches(self, verb: Verb, micro: int) -> list[Batch]:
        """Return the micro-batch of each data coordinate; its inputs are a single tensor."""
        positional = replace(verb, marks=tuple(mark for mark in verb.marks if mark is not Mark.KEYWORD))
        return [self.get_batch(positional, micro, at) for at in range(self.ctx.data_size)]

    def holds(self, bound: float) -> bool:
        """Return whether the dtype holds every integer up to ``bound``; raise if it does not before the first step."""
        return holds_sums(self.ctx, bound, self.weights_version)

    def certify_window(self) -> bool:
        """Return whether no gradient since the last step is rounded, so that the gradients are compared bitwise.

        Each number is a multiple of 1 divided by all divisors: the divisors of the losses' means, and the number of
        micro-batches in a window.
        """
        sums, micro_batches = self.window_sums, self.ctx.data_size * self.program.window
        largest = self.ctx.data_size * sum(each.bound for each in sums)
        return self.holds(largest * micro_batches * max((each.divisor for each in sums), default=1))

    @property
    def window_sums(self) -> list[Sums]:
        """The sums of each backward since the last step."""
        return self.sums[len(self.sums) - len(self.backwards.rows) :]

    def compare_window_grads(self, position: int, *, is_repeated: bool = False) -> Iterator[Comparison]:
        """Compare the gradients recorded at ``position`` with plain PyTorch's, if no sum in them is rounded."""
        self.last_grads_position = position
        if self.certify_window():
            yield from super().compare_window_grads(position, is_repeated=is_repeated)

    def judge_optimizer_step(self, position: int, caller: CallerState) -> Iterator[Comparison]:
        """Compare a step with its formula if the gradients of the step were recorded or are exact."""
        is_unseen = caller.pending is PendingGradients.UNSEEN
        if not (caller.is_boundary and is_unseen) or self.certify_window():
            yield from super().judge_optimizer_step(position, caller)
            return
        trained = {name: None for row in self.backwards.rows for local in row for name in local.grads}
        self.step_counts, self.weights_version = self.step_counts.with_step(trained), self.weights_version + 1
        yield from self.judge_rank_agreement()

    def compare_update(
        self, position: int, grads: BoundedGrads, pending: PendingGradients, factor: ClipFactor
    ) -> Iterator[Comparison]:
        """Compare each parameter's update; if an update is wrong, name the norm by which its gradients were clipped."""
        judge = partial(self.compare_clipped_update, position, grads, pending)
        return hint_norm_of_update(self.ctx, grads, self.program.clip, factor, judge)

    def compare_clipped_update(
        self, position: int, grads: BoundedGrads, pending: PendingGradients, factor: ClipFactor
    ) -> Iterator[Comparison]:
        """Compare each parameter's update with clipped gradients; on tp, each part may be clipped before the sum."""
        if factor != NO_CLIPPING:
            absolute = [each.absolute for each in self.window_sums]
            errors = bound_clipped_parts(self.ctx, lambda: absolute, self.grad_scale)
            grads = {
                name: replace(grad, error=grad.error + errors[name]) if name in errors else grad
                for name, grad in grads.items()
            }
        return super().compare_update(position, grads, pending, factor)

    def get_step_grads(self, caller: CallerState) -> BoundedGrads:
        """Return the gradients that a step used: the recorded gradients, or else the expected gradients."""
        grads = super().get_step_grads(caller)
        return {name: BoundedTensor.exact(grad.value.to(grad.dtype)) for name, grad in grads.items()}
