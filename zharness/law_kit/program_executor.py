"""Run a program (a random sequence of calls of an engine, its verbs), and record tensors after every call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Engine,
    Feature,
    OptimizerSpec,
    Reduction,
    require_gathered,
)
from zharness.law_kit.backward_calls import call_backward
from zharness.law_kit.engine_facts import build_facts
from zharness.law_kit.program_interruption import inject_interruption
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
from zharness.law_kit.rank_actions import eval_mode, second_loss, shared_folder
from zharness.law_kit.rank_context import RankContext, flatten_optimizer_state
from zharness.law_kit.setting import BackwardCall
from zharness.workload import Batch
from zharness.workload.nested_tensors import collect_tensors
from zharness.workload.programs import Act, CallerState, Mark, Program, Verb, apply_verb, iter_verbs

OTHER_ENGINE_OPTIMIZER = OptimizerSpec(name="sgd", args={"lr": 0.5})  # for the engines that train without records

OVERWRITE_VALUE = 3  # the caller overwrites returned tensors with it

CALLS = {Mark.TENSOR: BackwardCall.TENSOR, Mark.SCALE: BackwardCall.SCALE}

WEIGHT_CHANGING_ACTS = (Act.LOAD, Act.IDLE, Act.EDIT)


@dataclass(frozen=True)
class ForwardResult:
    """The output of a forward, its micro-batch, and a copy of the micro-batch from before the forward."""

    output: Tensor
    batch: Batch
    original_batch: Batch

    def is_batch_changed(self) -> bool:
        """Return whether a tensor of the micro-batch changed its values since the forward, or requires a gradient."""
        now, then = (collect_tensors([batch.inputs, batch.target]) for batch in (self.batch, self.original_batch))
        return any(
            tensor.requires_grad or not is_equal_with_nan(tensor, old) for tensor, old in zip(now, then, strict=True)
        )


def is_equal_with_nan(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have the same values; NaN is the same as NaN."""
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


@dataclass
class ProgramExecutor:
    """An executor that runs a program on one rank's engine and records the tensors that the judge compares.

    ``outputs`` maps the number of each micro-batch that waits for a backward to the result of its forward.
    ``weights_version`` counts the changes of the weights. ``other_engines`` are also trained after every step, but
    their tensors are not recorded.
    """

    ctx: RankContext
    program: Program
    engine: Engine
    checkpoint_dir: Path
    other_engines: Sequence[Engine] = ()
    outputs: dict[int, ForwardResult] = field(default_factory=dict)
    weights_version: int = 0

    def execute_verb(self, position: int, verb: Verb, caller: CallerState) -> None:
        """Execute one verb and record the tensors that can be compared after it.

        ``caller`` is the state of the calling code before the verb.
        """
        act = verb.act
        if act in FORWARD_ACTS:
            self.forward(position, verb, caller.micro_batches_drawn)
        elif act is Act.BACKWARD:
            micro = caller.select_output(verb)
            self.backward(position, verb, self.outputs[micro])
            if Mark.RETAIN not in verb.marks:
                del self.outputs[micro]
            if apply_verb(caller, verb).has_reduced_gradients and Mark.UNSEEN not in verb.marks:
                self.ctx.record("grads", self.engine.full_grads(), position)
        elif act is Act.NO_SYNC:
            batch = self.get_batch(verb, caller.micro_batches_drawn)
            with self.engine.no_sync():
                self.backward(position, verb, self.make_forward_result(batch, caller.micro_batches_drawn))
        elif act in (Act.INPUT_GRAD, Act.TRANSFORM):
            grad = compute_input_grad(
                act,
                lambda x: self.engine(x, **self.model_kwargs(caller.micro_batches_drawn)),
                self.make_leaf_inputs(caller.micro_batches_drawn),
            )
            self.ctx.record("input", {"input": grad}, position)
        elif act in (Act.FAILED_FORWARD, Act.FAILED_BACKWARD):
            self.run_failing_micro_batch(verb, caller.micro_batches_drawn)
        elif act is Act.LOOK:
            self.inspect_engine(position, caller)
        elif act is Act.STEP:
            self.step(position, caller)
        elif act is Act.ZERO_GRAD:
            self.engine.zero_grad()
        else:
            self.execute_between_steps(verb, caller)

    def get_batch(self, verb: Verb, micro: int) -> Batch:
        """Return this rank's micro-batch with the changes that the verb's marks (its options) specify."""
        return apply_input_marks(self.ctx.batch(micro), verb, self.ctx.data_coordinate, micro, self.program)

    def make_leaf_inputs(self, micro: int) -> Tensor:
        """Return a copy of this rank's inputs that is a leaf tensor with ``requires_grad=True``."""
        inputs: Tensor = self.ctx.batch(micro).inputs
        return inputs.clone().requires_grad_()

    def model_kwargs(self, micro: int) -> dict[str, bool]:
        """Return the additional keyword arguments that the model gets with this micro-batch."""
        return make_model_kwargs(self.program, self.ctx.spec, micro)

    def run_forward(self, batch: Batch, micro: int) -> Tensor:
        """Run the forward of a micro-batch and return its output."""
        output: Tensor = call_with_extra_kwargs(batch, self.engine, self.model_kwargs(micro))
        return output

    def make_forward_result(self, batch: Batch, micro: int) -> ForwardResult:
        """Run the forward of a micro-batch, and return the output together with the micro-batch for the backward."""
        before = batch.map_tensors(torch.clone)
        return ForwardResult(self.run_forward(batch, micro), batch, before)

    def forward(self, position: int, verb: Verb, micro: int) -> None:
        """Run a forward in the mode that ``verb`` specifies. Keep the output of an ordinary forward for a backward."""
        batch = self.get_batch(verb, micro)
        with eval_mode(self.engine) if verb.act in EVAL_MODE_ACTS else nullcontext(), get_grad_mode(verb.act):
            result = self.make_forward_result(batch, micro)
        self.ctx.record("output", {"output": result.output}, position)
        if verb.act is Act.FORWARD:
            self.outputs[micro] = result

    def backward(self, position: int, verb: Verb, result: ForwardResult) -> None:
        """Run the verb's backward, and record whether it changed the caller's output, loss or inputs."""
        output = result.output
        loss = second_loss(output) if Mark.OTHER in verb.marks else self.ctx.spec.loss(output, result.batch.target)
        loss = loss / self.program.caller_divisor
        caller_tensors = {"output": output, "loss": loss}
        before = {name: tensor.detach().clone() for name, tensor in caller_tensors.items()}
        call = next((CALLS[mark] for mark in verb.marks if mark in CALLS), BackwardCall.ENGINE)
        call_backward(self.engine, loss, call, retain_graph=Mark.RETAIN in verb.marks)
        changed = {name: not is_equal_with_nan(tensor, before[name]) for name, tensor in caller_tensors.items()}
        changed["inputs"] = result.is_batch_changed()
        self.ctx.record("own", {name: torch.tensor(float(value)) for name, value in changed.items()}, position)

    def run_failing_micro_batch(self, verb: Verb, micro: int) -> None:
        """Run a micro-batch whose forward or backward raises an error; zero the gradients after a failed backward."""
        batch = self.get_batch(verb, micro)
        with inject_interruption(self.engine.module, verb.act):
            output = self.run_forward(batch, micro)
            self.engine.backward(self.ctx.spec.loss(output, batch.target) / self.program.caller_divisor)
        if verb.act is Act.FAILED_BACKWARD:
            self.engine.zero_grad()

    def inspect_engine(self, position: int, caller: CallerState) -> None:
        """Read all tensors of the engine twice, record the second reading, and overwrite every returned tensor."""
        readings: list[Any] = []
        for _ in range(2):
            masters = self.engine.observe().masters
            grads = self.engine.full_grads() if caller.has_reduced_gradients else {}
            readings += [{} if isinstance(masters, Absent) else masters, grads]
            readings += [self.engine.full_params(), self.engine.full_optimizer_state()]
            self.engine.layout()
            self.engine.grad_norm()
        for label, reading in zip(("grads", "looked", "looked-state"), readings[-3:], strict=True):
            self.ctx.record(label, flatten_optimizer_state(reading) if label == "looked-state" else reading, position)
        for tensor in collect_tensors(readings):
            tensor.fill_(OVERWRITE_VALUE)

    def step(self, position: int, caller: CallerState) -> None:
        """Call the engine's step. Before an accumulation boundary, also record the weights, which must not change."""
        self.outputs.clear()
        self.engine.step()
        if not caller.is_boundary:
            self.ctx.record("early", self.engine.full_params(), position)
            self.ctx.record_optimizer_state("early-state", self.engine, position)
            return
        if self.program.clip is not None:
            norm = self.engine.grad_norm()
            self.ctx.record("norm", {} if norm is None else {"norm": torch.tensor(norm, dtype=torch.float64)}, position)
        self.engine.zero_grad()
        for other in self.other_engines:
            train_once(self.ctx, other, self.weights_version)
        self.advance_weights_version()

    def execute_between_steps(self, verb: Verb, caller: CallerState) -> None:
        """Execute a verb that needs neither a micro-batch nor a gradient, such as saving or loading a checkpoint."""
        act = verb.act
        if act is Act.SAVE:
            self.engine.save(self.checkpoint_dir / str(0 if Mark.OLD in verb.marks else caller.save_count))
        elif act is Act.LOAD:
            self.engine.load(self.checkpoint_dir / str(0 if Mark.OLD in verb.marks else caller.save_count - 1))
        elif act is Act.IDLE:
            self.engine.step()
            self.engine.zero_grad()
        elif act is Act.EDIT:
            self.edit_weight()
        if act in WEIGHT_CHANGING_ACTS:
            self.advance_weights_version()

    def edit_weight(self) -> None:
        """Fill a weight on rank 0. The other ranks write another value, which the engine has to discard."""
        name = choose_edited_parameter(self.ctx.spec, self.ctx.seed, self.weights_version)
        value = get_edited_value(self.program)
        with require_gathered(self.engine).gathered([name]) as weights, torch.no_grad():
            weights[name].fill_(value if self.ctx.rank == 0 else -value)

    def advance_weights_version(self) -> None:
        """Increase ``weights_version`` after a change of the weights, and record the new weights."""
        self.weights_version += 1
        self.record_weights_version()

    def record_weights_version(self) -> None:
        """Record the engine's current weights, optimizer state, learning rates, loss scale and gathered bytes."""
        # Count gathered bytes after other collectives: gloo frees a sent buffer only a moment after the collective.
        observations = self.ctx.record_training_state(self.engine, self.weights_version)
        self.ctx.record("facts", build_facts(observations), self.weights_version)
        gathered = observations.gathered_bytes
        counts = {} if isinstance(gathered, Absent) else {"gathered": torch.tensor(gathered)}
        self.ctx.record("gathered", counts, self.weights_version)


def train_once(ctx: RankContext, engine: Engine, micro: int) -> None:
    """Train the engine on one micro-batch and make one optimizer step."""
    batch = ctx.batch(micro)
    engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
    engine.step()
    engine.zero_grad()


def observe_program(ctx: RankContext, program: Program, other_engine_count: int = 0) -> None:
    """Run ``program`` on an engine, and train ``other_engine_count`` further engines in the same process.

    Every rank has to call this function, because it is a collective.
    """
    with ExitStack() as stack:
        saves = any(verb.act is Act.SAVE for verb in program.verbs)
        folder = stack.enter_context(shared_folder()) if saves else Path()
        owner = AccumulationOwner(program.window_owner) if program.window > 1 else AccumulationOwner.CALLER
        engine = ctx.build_engine(
            optimizer=OPTIMIZERS[program.optimizer],
            clip=program.clip,
            accumulation_steps=program.window,
            accumulation_owner=owner,
            reduction=Reduction(program.reduction),
        )
        other_engines = [ctx.build_engine(optimizer=OTHER_ENGINE_OPTIMIZER) for _ in range(other_engine_count)]
        are_zeros_allowed = ctx.capabilities.refusal(Feature.NO_GRADIENT) is not None
        ctx.record("zeros", {"allowed": torch.tensor(are_zeros_allowed)})
        executor = ProgramExecutor(ctx, program, engine, folder, other_engines)
        executor.record_weights_version()
        for position, verb, caller in iter_verbs(program):
            executor.execute_verb(position, verb, caller)
        executor.outputs.clear()
        for opened in (*other_engines, engine):
            opened.close()
