"""Judge every call of a program of whole batches against plain PyTorch, which starts from the engine's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zharness.law_kit.clipped_step import hint_norm_of_update
from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor, judge_reported_norm
from zharness.law_kit.engine_facts import compare_engine_facts
from zharness.law_kit.frozen_weights import leave_out_grads
from zharness.law_kit.hints import set_verb_position
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step
from zharness.law_kit.program_updates import StepCounts, judge_parameter_updates
from zharness.law_kit.record_comparisons import compare_initial_weights, compare_records
from zharness.law_kit.split_sums import SplitBatches, compare_split_batches, splits_sums
from zharness.law_kit.training_run import bounded_norm_and_error
from zharness.laws.pipeline import (
    MICRO_BATCHES,
    BatchShape,
    compare_micro_losses,
    compute_batch,
    hint_divided_by_two_stages,
)
from zharness.laws.pipeline_programs import (
    BATCHES,
    Call,
    CallKind,
    Template,
    find_frozen,
    find_shared_weights,
    select_parameter,
)
from zharness.parity import Comparison, Part, compare_bitwise, compare_within_bound
from zharness.parity.baseline import LocalResult, convert_to_float64, run_local
from zharness.parity.bounds import BoundedTensor, float64_mean, gamma
from zharness.parity.certificate import Exactness, is_power_of_two
from zharness.workload.programs import PendingGradients

USES = 2  # the number of uses of a weight that several blocks share
STRIDE = 2  # batch numbers count 4 micro-batches each, and batches of programs have up to 8
EDIT_FACTOR = 0.5
FACTORS = {CallKind.SCALED: 2, CallKind.FAINT: 2.0**-10}  # the factors on a batch's loss


def make_batch_shape(call: Call) -> BatchShape:
    """Return the number of micro-batches of a call's batch, and the factor on its loss."""
    return BatchShape(call.number, FACTORS.get(call.kind, 1))


@dataclass(frozen=True)
class PendingBatch:
    """A batch at ``position`` of a program, and the local gradients of trained weights for each micro-batch.

    ``absolute`` maps each weight with several uses to a mean gradient in which every term is an absolute value.
    """

    position: int
    call: Call
    micros: list[list[LocalResult]]
    absolute: Mapping[str, Tensor]


@dataclass
class Pending:
    """The batches since the last step or zero_grad.

    ``read_at`` is the position of the call that recorded the gradients of all these batches, or None.
    """

    batches: list[PendingBatch] = field(default_factory=list)
    read_at: int | None = None

    @property
    def micros(self) -> list[list[LocalResult]]:
        """The local gradients of all micro-batches."""
        return [row for batch in self.batches for row in batch.micros]

    @property
    def scale(self) -> float:
        """The number of batches, by which the mean over all micro-batches is multiplied to get the sum of batch means.

        The product is right because all batches before one step have the same number of micro-batches.
        """
        return float(len(self.batches))


@dataclass(frozen=True)
class Checkpoint:
    """The version of weights and state that a checkpoint holds, and the counts of steps made before the save."""

    version: int
    counts: StepCounts


class BatchProgramJudge:
    """Judges the calls of one program in order.

    ``version`` is the number under which weights and state were last recorded; each change increases it.
    """

    def __init__(self, ctx: JudgeContext, template: Template, calls: Sequence[Call]) -> None:
        self.ctx, self.template, self.calls = ctx, template, calls
        self.optimizer = template.select_optimizer(ctx.claims)
        self.shared = find_shared_weights(ctx.baseline.spec, ctx.baseline.seed)
        self.version, self.counts = 0, StepCounts()
        self.pending, self.saved = Pending(), list[Checkpoint]()

    def judge(self) -> Iterator[Comparison]:
        """Yield the comparisons of all calls; the step of a mismatch is the position of the call in the program."""
        yield from compare_initial_weights(self.ctx)
        for position, call in enumerate(self.calls, start=1):
            for comparison in self.judge_call(position, call):
                yield set_verb_position(comparison, position)

    def judge_call(self, position: int, call: Call) -> Iterator[Comparison]:
        """Judge one call by its kind."""
        if call.kind in BATCHES:
            yield from self.judge_batch(position, call)
        elif call.kind is CallKind.STEP:
            yield from self.judge_step(position)
        elif call.kind is CallKind.ZERO_GRAD:
            self.pending = Pending()
        elif call.kind is CallKind.LOOK:
            yield from self.judge_look(position)
        elif call.kind is CallKind.EDIT:
            yield from self.judge_edit(call)
        elif call.kind is CallKind.SAVE:
            yield from self.judge_save()
        elif call.kind in (CallKind.LOAD, CallKind.LOAD_OLD):
            yield from self.judge_load(self.saved[0 if call.kind is CallKind.LOAD_OLD else -1])

    def judge_batch(self, position: int, call: Call) -> Iterator[Comparison]:
        """Compare the losses of a batch, and the gradients since the last step if the batch's call read them."""
        ctx, weights = self.ctx, self.ctx.rank_records("params", self.version)[0]
        micros = compute_batch(ctx, STRIDE * position, weights, make_batch_shape(call))
        yield from compare_micro_losses(ctx, micros, position)
        frozen = find_frozen(self.calls[: position - 1])
        names = set() if frozen is None else {self.select_parameter(frozen)}
        trained = [[leave_out_grads(local, names) for local in row] for row in micros]
        absolute = self.compute_absolute(position, call) if self.shared else {}
        self.pending.batches.append(PendingBatch(position, call, trained, absolute))
        self.pending.read_at = None
        if call.kind is not CallKind.UNSEEN:
            yield from self.judge_grads(position)

    def judge_grads(self, position: int) -> Iterator[Comparison]:
        """Compare the gradients that were read at ``position`` with the sum of the batches' means.

        If dividing by the batch size rounds, an engine may also divide the loss of each micro-batch and add up
        gradients.
        """
        self.pending.read_at = position
        if splits_sums(self.ctx):
            yield from compare_split_batches(self.ctx, "grads", position, self.describe_split(position))
            return
        found = list(self.compare_grads(position, self.pending.micros))
        sizes = [batch.call.number for batch in self.pending.batches]
        if not all(map(is_power_of_two, sizes)) and any(comparison.mismatch for comparison in found):
            rows = [row for batch in self.pending.batches for row in self.compute_divided(batch)]
            divided = list(self.compare_grads(position, rows))
            found = found if any(comparison.mismatch for comparison in divided) else divided
        yield from found

    def describe_split(self, position: int) -> SplitBatches:
        """Return, for tp, the batches whose gradients are pending at ``position``; all used the same weights."""
        factors = {
            STRIDE * batch.position * MICRO_BATCHES + index: float(make_batch_shape(batch.call).factor)
            for batch in self.pending.batches
            for index in range(batch.call.number)
        }
        frozen = find_frozen(self.calls[: position - 1])
        names = set() if frozen is None else {self.select_parameter(frozen)}
        return SplitBatches(factors, self.ctx.rank_records("params", self.version)[0], self.pending.scale, names)

    def compare_grads(self, position: int, micros: list[list[LocalResult]]) -> Iterator[Comparison]:
        """Compare gradients with those of micro-batches; for weights with several uses, allow any order of sums."""
        exact = self.certify_first_batch(position)
        for comparison in self.ctx.compare_reduced_grads("grads", micros, position, exact, self.pending.scale):
            place = comparison.location
            if place is None or place.name not in self.shared:
                yield comparison
        for name in sorted(self.shared & set(micros[0][0].grads)):
            yield from self.compare_shared_grad(name, position, [local.grads[name] for row in micros for local in row])

    def compare_shared_grad(self, name: str, position: int, terms: list[Tensor]) -> Iterator[Comparison]:
        """Compare the gradient of a weight with several uses, within the bound of sums in any order.

        ``terms`` are the gradients of each micro-batch and data coordinate; each is a sum over the weight's uses.
        """
        expected = self.pending.scale * float64_mean(terms)
        absolute = torch.stack([batch.absolute[name] for batch in self.pending.batches]).sum(dim=0)
        bound = gamma(2 * USES * len(terms), self.ctx.dtype) * absolute
        for rank, record in enumerate(self.ctx.rank_records("grads", position)):
            place = self.ctx.location(name, Part.REDUCTION, position, rank)
            comparison = compare_within_bound(place, expected, record[name], bound)
            yield self.hint_first_batch(comparison, position)

    def hint_first_batch(self, comparison: Comparison, position: int) -> Comparison:
        """Add the hint that two stages divided a gradient; the hint is computed for the initial weights only."""
        is_first = not self.version and len(self.pending.micros) == MICRO_BATCHES
        first = STRIDE * position * MICRO_BATCHES
        return hint_divided_by_two_stages(self.ctx, comparison, position, first) if is_first else comparison

    def compute_absolute(self, position: int, call: Call) -> Mapping[str, Tensor]:
        """Return the mean gradients of weights with several uses, for absolute values of weights and inputs."""
        baseline, shape, first = self.ctx.baseline, make_batch_shape(call), STRIDE * position * MICRO_BATCHES
        module = baseline.build_module(self.ctx.rank_records("params", self.version)[0])
        locals_ = [
            run_local(*convert_to_float64(module, baseline.batch(at, first + index), take_abs=True), baseline.objective)
            for index in range(shape.micro_batches)
            for at in range(self.ctx.data_size)
        ]
        return {name: shape.factor * float64_mean([local.grads[name] for local in locals_]) for name in self.shared}

    def compute_divided(self, batch: PendingBatch) -> list[list[LocalResult]]:
        """Divide each loss by the number of micro-batches, and return the local gradients multiplied by this number."""
        shape, first = make_batch_shape(batch.call), STRIDE * batch.position * MICRO_BATCHES
        count, weights = shape.micro_batches, self.ctx.rank_records("params", self.version)[0]

        def divide(loss: Tensor, rank: int) -> Tensor:
            return shape.factor * loss / count

        names = batch.micros[0][0].grads
        rows = [self.ctx.baseline.run_all_ranks(first + index, weights, None, divide) for index in range(count)]
        return [
            [replace(local, grads={name: count * local.grads[name].double() for name in names}) for local in row]
            for row in rows
        ]

    def certify_first_batch(self, position: int) -> Exactness:
        """Return whether the gradients of a batch are certified exact; only a first batch before all changes can be."""
        if self.version or len(self.pending.batches) > 1 or self.calls[position - 1].kind is not CallKind.TRAIN:
            return Exactness(False)
        first = STRIDE * position * MICRO_BATCHES
        return self.ctx.certify_exactness(range(first, first + len(self.pending.micros)))

    def select_parameter(self, call: Call) -> str:
        """Return the name of the parameter of the cell's model that a call edits, freezes or unfreezes."""
        return select_parameter(self.ctx.baseline.spec, self.ctx.baseline.seed, call)

    def judge_look(self, position: int) -> Iterator[Comparison]:
        """Judge gradients that were read again, and compare weights and state read again with the old records."""
        if self.pending.batches:
            yield from self.judge_grads(position)
        yield from compare_records(self.ctx, "params", "looked", self.version, position, Part.GATHER)
        yield from compare_records(self.ctx, "state", "looked-state", self.version, position, Part.OPTIMIZER)

    def judge_step(self, position: int) -> Iterator[Comparison]:
        """Compare a step, clipped or not, with the optimizer's formula, and compare all ranks after the step."""
        grads = self.get_step_grads()
        pending = PendingGradients.UNSEEN if self.pending.read_at is None else PendingGradients.REDUCED
        factor = NO_CLIPPING
        if self.template.clip is not None:
            norm, error = bounded_norm_and_error(grads, [self.ctx.dtype])
            reported = yield from judge_reported_norm(self.ctx, "norm", position, norm, error)
            factor = ClipFactor.from_norm(self.template.clip, norm, error, reported)

        def compare_update(factor: ClipFactor) -> Iterator[Comparison]:
            clipped = {name: factor.apply_to(grad) for name, grad in grads.items()}
            yield from judge_parameter_updates(
                self.ctx, self.optimizer, clipped, self.version, self.counts, position, pending
            )

        yield from hint_norm_of_update(self.ctx, grads, self.template.clip, factor, compare_update)
        self.counts, self.pending = self.counts.with_step(grads), Pending()
        yield from self.judge_new_version()

    def get_step_grads(self) -> BoundedGrads:
        """Return the gradients of a step: the recorded ones, or if none were read, the expected ones with bounds."""
        if self.pending.read_at is not None:
            recorded = self.ctx.rank_records("grads", self.pending.read_at)[0]
            return {name: BoundedTensor.exact(grad) for name, grad in recorded.items()}
        return self.ctx.compute_expected_grads(self.pending.micros, self.pending.scale, {})

    def judge_new_version(self) -> Iterator[Comparison]:
        """Compare weights, state and learning rates of all ranks after a change."""
        self.version += 1
        yield from compare_ranks_after_step(self.ctx, RecordedStep(self.version))
        yield from compare_engine_facts(self.ctx, self.optimizer, self.version, self.counts.steps)

    def judge_edit(self, call: Call) -> Iterator[Comparison]:
        """Compare the edited parameter with half of its old value, and all other parameters with their old values."""
        edited = self.select_parameter(call)
        for rank, before in enumerate(self.ctx.rank_records("params", self.version)):
            after = self.ctx.rank_records("params", self.version + 1)[rank]
            for name, weight in before.items():
                expected = EDIT_FACTOR * weight if name == edited else weight
                yield compare_bitwise(self.ctx.location(name, Part.GATHER, 0, rank), expected, after[name])
        yield from compare_records(self.ctx, "state", "state", self.version, self.version + 1, Part.OPTIMIZER)
        yield from self.judge_new_version()

    def judge_save(self) -> Iterator[Comparison]:
        """Check that a save changes nothing, and remember the version and step counts that it has to save."""
        yield from self.judge_restored(self.version)
        self.saved.append(Checkpoint(self.version, self.counts))

    def judge_load(self, saved: Checkpoint) -> Iterator[Comparison]:
        """Check that weights, state and learning rates after a load equal those at the save."""
        self.counts = saved.counts
        yield from self.judge_restored(saved.version)

    def judge_restored(self, version: int) -> Iterator[Comparison]:
        """Compare the next version of weights and state bitwise with an earlier version."""
        for what, part in (("params", Part.GATHER), ("state", Part.OPTIMIZER)):
            yield from compare_records(self.ctx, what, what, version, self.version + 1, part)
        yield from self.judge_new_version()
