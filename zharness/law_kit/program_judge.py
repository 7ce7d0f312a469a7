"""Compare the tensors that an engine recorded after each verb (call) of a program with those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from zharness.engines.protocol import Reduction
from zharness.law_kit.clipping import NO_CLIPPING, ClipFactor, judge_reported_norm
from zharness.law_kit.engine_facts import compare_engine_facts
from zharness.law_kit.hints import add_hint, describe_added_gradient, set_verb_position
from zharness.law_kit.judge_context import BoundedGrads, JudgeContext
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    compare_step_counts,
    unflatten,
)
from zharness.law_kit.program_old_weights import has_old_backward, hint_old_weights, iter_old_weights
from zharness.law_kit.program_steps import (
    EVAL_MODE_ACTS,
    FORWARD_ACTS,
    OPTIMIZERS,
    apply_input_marks,
    call_with_extra_kwargs,
    choose_edited_parameter,
    compute_input_grad,
    get_edited_value,
    get_grad_mode,
    make_model_kwargs,
)
from zharness.law_kit.program_suspects import (
    WindowBackwards,
    make_unreduced_suspects,
    scale_local_grads,
)
from zharness.law_kit.program_updates import StepCounts, compare_edit, find_changed_parameters, judge_parameter_updates
from zharness.law_kit.rank_actions import second_loss
from zharness.law_kit.record_comparisons import compare_initial_weights, compare_records
from zharness.law_kit.training_run import bounded_norm_and_error
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.attribution import is_unexplained
from zharness.parity.baseline import LocalResult
from zharness.parity.bounds import BoundedTensor
from zharness.parity.compare import is_bitwise_equal
from zharness.parity.grad_parts import run_backward_by_parts
from zharness.workload import Batch
from zharness.workload.programs import Act, CallerState, Mark, PendingGradients, Program, Verb, apply_verb, iter_verbs

OLD_GRADIENT_HINT = "it is the gradient that an earlier step used"

CALLER_TENSOR_CHANGED_HINT = "the backward changed the caller's output, loss or inputs"

EARLY_STEP_HINT = "a step was made before the window was full"


@dataclass
class ProgramJudge:
    """A judge that runs the program on plain PyTorch for every rank and compares the engine's records with it."""

    ctx: JudgeContext
    program: Program
    weights_version: int = 0
    forward_verbs: dict[int, Verb] = field(default_factory=dict)  # by micro-batch
    backwards: WindowBackwards = field(default_factory=WindowBackwards)  # since the last step
    step_counts: StepCounts = field(default_factory=StepCounts)
    checkpoints: list[tuple[StepCounts, int]] = field(default_factory=list)  # saved counts and weights version
    last_grads_position: int = 0  # position of the last verb that recorded reduced gradients
    stepped_grads: list[int] = field(default_factory=list)  # positions of the gradients that steps used
    cached_module: tuple[int, torch.nn.Module] | None = None  # the version of its weights, and the module

    def judge_verb(self, position: int, verb: Verb, caller: CallerState) -> Iterator[Comparison]:
        """Compare the records of one verb with plain PyTorch; ``caller`` is the caller's state before the verb."""
        act = verb.act
        if act in FORWARD_ACTS:
            self.forward_verbs[caller.micro_batches_drawn] = verb
            yield from self.compare_output(position, verb, caller.micro_batches_drawn)
        elif act in (Act.BACKWARD, Act.NO_SYNC):
            yield from self.judge_backward(position, verb, caller)
        elif act in (Act.INPUT_GRAD, Act.TRANSFORM):
            yield from self.compare_input_grads(position, act, caller.micro_batches_drawn)
        elif act is Act.LOOK:
            yield from self.judge_look(position, caller)
        elif act is Act.STEP:
            yield from self.judge_optimizer_step(position, caller)
        elif act is Act.IDLE:
            yield from self.judge_update(position, {}, PendingGradients.NOTHING)
        elif act is Act.EDIT:
            yield from self.judge_edit()
        elif act is Act.SAVE:
            at = 0 if Mark.OLD in verb.marks else len(self.checkpoints)
            self.checkpoints[at:] = [(self.step_counts, self.weights_version), *self.checkpoints[at + 1 :]]
        elif act is Act.LOAD:
            yield from self.judge_load(*self.checkpoints[0 if Mark.OLD in verb.marks else -1])
        if act is Act.FAILED_BACKWARD:
            micro = caller.micro_batches_drawn
            self.backwards.add_failed(self.compute_gradients(verb, micro), micro)
        if act in (Act.ZERO_GRAD, Act.FAILED_BACKWARD):
            self.backwards.discard()
        if act is Act.STEP and caller.is_boundary:
            self.backwards = WindowBackwards()

    def get_plain_module(self, weights_version: int) -> torch.nn.Module:
        """Return the plain model in training mode with the weights that the engine had at ``weights_version``."""
        if self.cached_module is None or self.cached_module[0] != weights_version:
            weights = self.ctx.rank_records("params", weights_version)[0]
            self.cached_module = weights_version, self.ctx.baseline.build_module(weights)
        _, module = self.cached_module
        module.zero_grad(set_to_none=True)
        return module.train()

    def compare_output(self, position: int, verb: Verb, micro: int) -> Iterator[Comparison]:
        """Check that every rank's output is bitwise equal to plain PyTorch's."""
        for rank, record in enumerate(self.ctx.rank_records("output", position)):
            run = partial(self.run_plain_forward, verb=verb, micro=micro, rank=self.ctx.data_coordinate(rank))
            here = self.ctx.location("output", Part.FORWARD, position, rank)
            found = compare_bitwise(here, run(self.get_plain_module(self.weights_version)), record["output"])
            yield hint_old_weights(self.ctx, found, self.weights_version, run, record["output"])

    def compare_input_grads(self, position: int, act: Act, micro: int) -> Iterator[Comparison]:
        """Check that every rank's gradient of its inputs is bitwise equal to plain PyTorch's."""
        module, ranks = self.get_plain_module(self.weights_version), range(self.ctx.data_size)
        expected = [{"input": self.compute_plain_input_grad(module, act, rank, micro)} for rank in ranks]
        records = self.ctx.rank_records("input", position)
        for rank, found in enumerate(self.ctx.compare_values("input", expected, position)):
            run = partial(self.compute_plain_input_grad, act=act, rank=self.ctx.data_coordinate(rank), micro=micro)
            yield hint_old_weights(self.ctx, found, self.weights_version, run, records[rank]["input"])

    def get_batch(self, verb: Verb, micro: int, rank: int) -> Batch:
        """Return a micro-batch of data coordinate ``rank`` with the changes that the marks of ``verb`` specify."""
        return apply_input_marks(self.ctx.baseline.batch(rank, micro), verb, rank, micro, self.program)

    def run_plain_forward(self, module: torch.nn.Module, verb: Verb, micro: int, rank: int) -> Tensor:
        """Return the output of ``module`` for a micro-batch, in the mode of the caller's ``verb``."""
        baseline = self.ctx.baseline
        with get_grad_mode(verb.act):
            output: Tensor = call_with_extra_kwargs(
                self.get_batch(verb, micro, rank),
                module.train(verb.act not in EVAL_MODE_ACTS),
                make_model_kwargs(self.program, baseline.spec, micro),
            )
        return output.detach()

    def judge_backward(self, position: int, verb: Verb, caller: CallerState) -> Iterator[Comparison]:
        """Compute the local gradients of one backward, and compare the reduced gradients if they were recorded."""
        micro = caller.micro_batches_drawn if verb.act is Act.NO_SYNC else caller.select_output(verb)
        for rank, record in enumerate(self.ctx.rank_records("own", position)):
            for name, changed in record.items():
                found = compare_bitwise(self.ctx.location(name, Part.FORWARD, position, rank), torch.zeros(()), changed)
                yield add_hint(found, CALLER_TENSOR_CHANGED_HINT)
        is_repeated = micro in self.backwards.micros and bool({Mark.TENSOR, Mark.SCALE} & {*verb.marks})
        self.backwards.add(self.compute_gradients(verb, micro), micro)
        if verb.act is Act.NO_SYNC:
            self.backwards.unreduced.append(self.backwards.rows[-1])
        if apply_verb(caller, verb).has_reduced_gradients and Mark.UNSEEN not in verb.marks:
            yield from self.compare_window_grads(position, is_repeated=is_repeated)

    def compute_gradients(self, verb: Verb, micro: int) -> list[LocalResult]:
        """Return the local gradients that a whole backward of a micro-batch gives on each rank.

        A verb without a forward of its own uses the forward of an earlier verb.
        """
        if verb.act in (Act.NO_SYNC, Act.FAILED_BACKWARD):
            self.forward_verbs[micro] = verb
        return [self.compute_local_grads(rank, verb, micro) for rank in range(self.ctx.data_size)]

    def compare_window_grads(self, position: int, *, is_repeated: bool = False) -> Iterator[Comparison]:
        """Compare the gradients recorded at ``position`` with the sum over all backwards since the last step.

        ``is_repeated`` says that the last backward uses an output that an earlier backward used, without a call of the
        engine.
        """
        self.last_grads_position = position
        ranks, recorded = self.sum_factor, self.ctx.rank_records("grads", position)[0]
        suspects = self.backwards.make_suspects(self.ctx.mesh, self.program, ranks)
        if is_repeated:
            suspects |= make_unreduced_suspects(
                self.ctx.evidence[0].layout, self.backwards.rows, ranks, self.program.window
            )
        micros, exact = self.add_zero_grads(recorded), self.certify_window()
        comparisons = self.ctx.compare_reduced_grads(
            "grads", micros, position, exact=exact, scale=self.grad_scale, suspects=suspects
        )
        for found in comparisons:
            yield self.hint_old_gradient(found, position)
            if found.mismatch is not None:
                break
        # The report of a mismatch uses only the error ratios of the parameters that follow; hints take many backwards.
        yield from comparisons

    def certify_window(self) -> bool:
        """Return whether no gradient since the last step is rounded, so that they are compared bitwise."""
        return False

    def hint_old_gradient(self, comparison: Comparison, position: int) -> Comparison:
        """Add a hint to the mismatch of a gradient that equals, or contains, a gradient that an earlier step used."""
        mismatch = comparison.mismatch
        if mismatch is None:
            return comparison
        records = [self.ctx.rank_records("grads", at)[mismatch.seen_on] for at in (position, *self.stepped_grads)]
        if any(mismatch.parameter not in record for record in records):
            return comparison
        grad, *old_grads = (record[mismatch.parameter] for record in records)
        if any(is_bitwise_equal(old, grad) for old in old_grads):
            return add_hint(comparison, OLD_GRADIENT_HINT)
        rows = self.collect_terms(self.backwards.rows, mismatch.parameter, grad)
        dtype = self.ctx.get_reduce_dtype(mismatch.parameter, grad.dtype)
        hints = (describe_added_gradient(grad, rows, old, dtype) for old in old_grads)
        hint = next(filter(None, hints), "")
        if not hint and is_unexplained(mismatch) and self.weights_version:
            hint = self.find_old_weights(mismatch.parameter, grad, rows, dtype)
        return add_hint(comparison, hint) if hint else comparison

    def collect_terms(self, rows: Sequence[Sequence[LocalResult]], name: str, grad: Tensor) -> list[list[Tensor]]:
        """Return the gradients of one parameter in each of ``rows``, scaled, with zeros of the shape of ``grad``."""
        scaled = scale_local_grads(rows, self.sum_factor / self.program.window)
        return [[local.grads.get(name, torch.zeros_like(grad)) for local in row] for row in scaled]

    def find_old_weights(self, name: str, grad: Tensor, rows: list[list[Tensor]], dtype: torch.dtype) -> str:
        """Return the hint of a gradient of which a backward used weights from before their last change, or ''.

        The output may not show them: a forward in ``no_sync`` records no output, and a norm layer may hide the change.
        """
        new, old = (self.ctx.rank_records("params", self.weights_version - age)[0] for age in (0, 1))
        for hint, weights in iter_old_weights(new, old):
            module, ranks = self.ctx.baseline.build_module(weights), range(self.ctx.data_size)
            old_rows = [
                [self.compute_local_grads(rank, self.forward_verbs[micro], micro, module) for rank in ranks]
                for micro in self.backwards.micros
            ]
            if has_old_backward(grad, rows, self.collect_terms(old_rows, name, grad), dtype):
                return hint
        return ""

    def add_zero_grads(self, names: Iterable[str]) -> list[list[LocalResult]]:
        """Return the local gradients since the last step, with zeros for each of ``names`` that no backward reached.

        Zeros are added only for an engine that refuses the feature NO_GRADIENT, because it reports zeros for such
        parameters.
        """
        if not self.ctx.rank_records("zeros")[0]["allowed"]:
            return self.backwards.rows
        weights = dict(self.get_plain_module(self.weights_version).named_parameters())
        reached = {name for row in self.backwards.rows for local in row for name in local.grads}
        zeros = {
            name: torch.zeros_like(weights[name], requires_grad=False)
            for name in names
            if name in weights and weights[name].requires_grad and name not in reached
        }
        return [[replace(local, grads={**local.grads, **zeros}) for local in row] for row in self.backwards.rows]

    @property
    def sum_factor(self) -> int:
        """The world size if the engine sums gradients over ranks, or 1 if it averages them."""
        return self.ctx.data_size if self.program.reduction == Reduction.SUM.value else 1

    @property
    def grad_scale(self) -> float:
        """The factor by which the mean of the local gradients is multiplied to get the engine's gradients."""
        return len(self.backwards.rows) * self.sum_factor / self.program.window

    def compute_local_grads(
        self, rank: int, verb: Verb, micro: int, module: torch.nn.Module | None = None
    ) -> LocalResult:
        """Return the loss and gradients of one backward on one rank; ``module`` has the newest weights by default."""
        baseline, module = self.ctx.baseline, module or self.get_plain_module(self.weights_version)
        module.zero_grad(set_to_none=True)
        batch = self.get_batch(self.forward_verbs[micro], micro, rank)
        output = call_with_extra_kwargs(batch, module, make_model_kwargs(self.program, baseline.spec, micro))
        loss = second_loss(output) if Mark.OTHER in verb.marks else baseline.objective(output, batch)
        return run_backward_by_parts(module, loss, baseline.loss_scale)

    def compute_plain_input_grad(self, module: torch.nn.Module, act: Act, rank: int, micro: int) -> Tensor:
        """Return plain PyTorch's gradient of the sum of one rank's output with respect to the inputs."""
        baseline = self.ctx.baseline
        model_kwargs = make_model_kwargs(self.program, baseline.spec, micro)
        leaf = baseline.batch(rank, micro).inputs.clone().requires_grad_()
        return compute_input_grad(act, lambda x: module(x, **model_kwargs), leaf)

    def judge_look(self, position: int, caller: CallerState) -> Iterator[Comparison]:
        """Compare the weights, state and gradients that the engine reported between other verbs with the expected ones.

        The expected weights and state are those that were recorded after their last change.
        """
        if caller.has_reduced_gradients:
            yield from self.compare_window_grads(position)
        yield from compare_records(self.ctx, "params", "looked", self.weights_version, position, Part.GATHER)
        yield from compare_records(self.ctx, "state", "looked-state", self.weights_version, position, Part.OPTIMIZER)

    def judge_optimizer_step(self, position: int, caller: CallerState) -> Iterator[Comparison]:
        """At an accumulation boundary, compare the step with its formula; elsewhere, check that no weight changed."""
        if not caller.is_boundary:
            for label, early in (("params", "early"), ("state", "early-state")):
                for found in compare_records(self.ctx, label, early, self.weights_version, position, Part.OPTIMIZER):
                    yield add_hint(found, EARLY_STEP_HINT)
            return
        grads = self.get_step_grads(caller)
        factor = yield from self.judge_clipping(position, grads)
        if self.last_grads_position and caller.pending is not PendingGradients.UNSEEN:
            self.stepped_grads.append(self.last_grads_position)
        yield from self.judge_update(position, grads, caller.pending, factor)

    def get_step_grads(self, caller: CallerState) -> BoundedGrads:
        """Return the gradients that a step used, with error bounds.

        These are the recorded gradients or, if none were recorded, the expected gradients. An engine that may have
        zeros for a parameter that no backward reached may also have no gradient for it. The judge takes zeros if the
        step changed the parameter or its optimizer state.
        """
        recorded = self.ctx.rank_records("grads", self.last_grads_position)[0] if self.last_grads_position else {}
        if caller.pending is not PendingGradients.UNSEEN:
            return {name: BoundedTensor.exact(grad) for name, grad in recorded.items()}
        return self.ctx.compute_expected_grads(
            self.add_zero_grads(find_changed_parameters(self.ctx, self.weights_version)),
            self.grad_scale,
            {name: grad.dtype for name, grad in recorded.items()},
        )

    def judge_clipping(self, position: int, grads: BoundedGrads) -> Generator[Comparison, None, ClipFactor]:
        """Compare the reported norm with that of ``grads`` and return the factor that clips them.

        If an engine clips but reports no norm, nothing is compared, because the law training.clip_and_norm then fails.
        """
        if self.program.clip is None:
            return NO_CLIPPING
        norm, error = bounded_norm_and_error(grads, [grad.dtype for grad in grads.values()])
        reported = yield from judge_reported_norm(self.ctx, "norm", position, norm, error)
        return ClipFactor.from_norm(self.program.clip, norm, error, reported)

    def judge_update(
        self, position: int, grads: BoundedGrads, pending: PendingGradients, factor: ClipFactor = NO_CLIPPING
    ) -> Iterator[Comparison]:
        """Compare the new weights and state with the optimizer's formula, applied to the engine's own numbers."""
        yield from self.compare_update(position, grads, pending, factor)
        self.step_counts, self.weights_version = self.step_counts.with_step(grads), self.weights_version + 1
        yield from self.judge_rank_agreement()

    def compare_update(
        self, position: int, grads: BoundedGrads, pending: PendingGradients, factor: ClipFactor
    ) -> Iterator[Comparison]:
        """Compare each parameter's update with the update that ``grads`` times ``factor`` give."""
        spec, clipped = OPTIMIZERS[self.program.optimizer], {name: factor.apply_to(grads[name]) for name in grads}
        return judge_parameter_updates(
            self.ctx, spec, clipped, self.weights_version, self.step_counts, position, pending
        )

    def judge_load(self, step_counts: StepCounts, saved_version: int) -> Iterator[Comparison]:
        """Check that weights and optimizer state after a load are bitwise equal to those that were saved."""
        self.step_counts = step_counts
        self.weights_version += 1
        for what in ("params", "masters", "state"):
            yield from compare_records(self.ctx, what, what, saved_version, self.weights_version, Part.GATHER)
        yield from self.judge_rank_agreement()

    def judge_edit(self) -> Iterator[Comparison]:
        """Check that the edited weight and its master have rank 0's value, and that all other weights are unchanged."""
        name = choose_edited_parameter(self.ctx.baseline.spec, self.ctx.baseline.seed, self.weights_version)
        yield from compare_edit(self.ctx, name, get_edited_value(self.program), self.weights_version)
        self.weights_version += 1
        yield from self.judge_rank_agreement()

    def judge_rank_agreement(self) -> Iterator[Comparison]:
        """Check that ranks agree, that weights equal rounded master weights, and that no weight is still gathered."""
        yield from compare_ranks_after_step(self.ctx, RecordedStep(self.weights_version))
        yield from compare_published_weights(self.ctx, RecordedStep(self.weights_version, "masters"), "params")
        yield from self.judge_engine_facts()

    def judge_engine_facts(self) -> Iterator[Comparison]:
        """Check the learning rates, loss scale, number of skipped steps and number of gathered bytes of every rank."""
        yield from compare_engine_facts(
            self.ctx, OPTIMIZERS[self.program.optimizer], self.weights_version, self.step_counts.steps
        )
        for rank, record in enumerate(self.ctx.rank_records("gathered", self.weights_version)):
            for name, count in record.items():
                yield compare_bitwise(self.ctx.location(name, Part.GATHER, 0, rank), torch.zeros_like(count), count)


def judge_program(ctx: JudgeContext, program: Program) -> Iterator[Comparison]:
    """Yield the comparisons of everything that was recorded while ``program`` ran, in the order of its verbs."""
    yield from run_judge(ProgramJudge(ctx, program))


def run_judge(judge: ProgramJudge) -> Iterator[Comparison]:
    """Yield the comparisons of the program of ``judge``, in the order of its verbs."""
    ctx = judge.ctx
    yield from compare_initial_weights(ctx)
    yield from compare_step_counts(ctx, unflatten(ctx.rank_records("state")[0]), 0, 0)
    yield from judge.judge_engine_facts()
    for position, verb, caller in iter_verbs(judge.program):
        for comparison in judge.judge_verb(position, verb, caller):
            yield set_verb_position(comparison, position)
