"""Run a program on an engine and record after every verb what the judge compares."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Absent, AccumulationOwner, Engine, OptimizerSpec, Reduction
from zharness.law_kit.engine_facts import build_facts
from zharness.law_kit.program_interruption import inject_interruption
from zharness.law_kit.program_steps import (
    EDITED_VALUE,
    EVAL_MODE_ACTS,
    FORWARD_ACTS,
    OPTIMIZERS,
    apply_input_marks,
    call_with_extra_kwargs,
    choose_edited_parameter,
    compute_input_grad,
    get_grad_mode,
    make_model_kwargs,
)
from zharness.law_kit.rank_actions import eval_mode, second_loss, shared_folder
from zharness.law_kit.rank_context import RankContext, flatten_optimizer_state
from zharness.workload import Batch
from zharness.workload.models import collect_tensors
from zharness.workload.programs import Act, CallerState, Mark, Program, Verb, apply_verb, iter_verbs

OTHER_ENGINE_OPTIMIZER = OptimizerSpec(name="sgd", args={"lr": 0.5})  # of engines of which nothing is recorded

OVERWRITE_VALUE = 3  # what a caller writes over tensors that it was given

WEIGHT_CHANGING_ACTS = (Act.LOAD, Act.IDLE, Act.EDIT)


@dataclass(frozen=True)
class ForwardResult:
    """An output in a caller's hand, the micro-batch that it was made of, and a copy of that from before."""

    output: Tensor
    batch: Batch
    original_batch: Batch

    def is_batch_changed(self) -> bool:
        """Whether the micro-batch is another than it was, or wants gradients."""
        now, then = (collect_tensors([batch.inputs, batch.target]) for batch in (self.batch, self.original_batch))
        return any(tensor.requires_grad or not tensor.equal(old) for tensor, old in zip(now, then, strict=True))


@dataclass
class ProgramExecutor:
    """One rank's caller: its engine, its outputs in hand by micro-batch, and how many weights there were (``era``).

    Behind every step it trains the engines ``beside``, of which nothing is recorded.
    """

    ctx: RankContext
    program: Program
    engine: Engine
    checkpoint_dir: Path
    other_engines: Sequence[Engine] = ()
    outputs: dict[int, ForwardResult] = field(default_factory=dict)
    weights_version: int = 0

    def execute_verb(self, position: int, verb: Verb, book: CallerState) -> None:
        """One verb, and records of what can be compared after it."""
        act = verb.act
        if act in FORWARD_ACTS:
            self.forward(position, verb, book.micro_batches_drawn)
        elif act is Act.BACKWARD:
            micro = book.select_output(verb)
            self.backward(position, verb, self.outputs[micro])
            if Mark.RETAIN not in verb.marks:
                del self.outputs[micro]
            if apply_verb(book, verb).has_reduced_gradients and Mark.UNSEEN not in verb.marks:
                self.ctx.record("grads", self.engine.full_grads(), position)
        elif act is Act.NO_SYNC:
            batch = self.get_batch(verb, book.micro_batches_drawn)
            with self.engine.no_sync():
                self.backward(position, verb, self.make_forward_result(batch, book.micro_batches_drawn))
        elif act in (Act.INPUT_GRAD, Act.TRANSFORM):
            grad = compute_input_grad(
                act,
                lambda x: self.engine(x, **self.model_kwargs(book.micro_batches_drawn)),
                self.make_leaf_inputs(book.micro_batches_drawn),
            )
            self.ctx.record("input", {"input": grad}, position)
        elif act in (Act.FAILED_FORWARD, Act.FAILED_BACKWARD):
            self.run_failing_micro_batch(verb, book.micro_batches_drawn)
        elif act is Act.LOOK:
            self.inspect_engine(position, book)
        elif act is Act.STEP:
            self.step(position, book)
        elif act is Act.ZERO_GRAD:
            self.engine.zero_grad()
        else:
            self.execute_between_steps(verb, book)

    def get_batch(self, verb: Verb, micro: int) -> Batch:
        """This rank's micro-batch as the verb's marks have it."""
        return apply_input_marks(self.ctx.batch(micro), verb, self.ctx.rank, micro)

    def make_leaf_inputs(self, micro: int) -> Tensor:
        """This rank's inputs, as a leaf that requires a gradient."""
        inputs: Tensor = self.ctx.batch(micro).inputs
        return inputs.clone().requires_grad_()

    def model_kwargs(self, micro: int) -> dict[str, bool]:
        return make_model_kwargs(self.program, self.ctx.spec, micro)

    def run_forward(self, batch: Batch, micro: int) -> Tensor:
        """Forward of a micro-batch."""
        output: Tensor = call_with_extra_kwargs(batch, self.engine, self.model_kwargs(micro))
        return output

    def make_forward_result(self, batch: Batch, micro: int) -> ForwardResult:
        """The same, with what a backward needs."""
        before = batch.map_tensors(torch.clone)
        return ForwardResult(self.run_forward(batch, micro), batch, before)

    def forward(self, position: int, verb: Verb, micro: int) -> None:
        """A forward in the verb's mode; the output of a plain one is kept."""
        batch = self.get_batch(verb, micro)
        with eval_mode(self.engine) if verb.act in EVAL_MODE_ACTS else nullcontext(), get_grad_mode(verb.act):
            kept = self.make_forward_result(batch, micro)
        self.ctx.record("output", {"output": kept.output}, position)
        if verb.act is Act.FORWARD:
            self.outputs[micro] = kept

    def backward(self, position: int, verb: Verb, result: ForwardResult) -> None:
        """Backward of the verb's loss in the verb's spelling; and what has become of the caller's own tensors."""
        output = result.output
        loss = second_loss(output) if Mark.OTHER in verb.marks else self.ctx.spec.loss(output, result.batch.target)
        own = {"output": output, "loss": loss}
        before = {name: tensor.detach().clone() for name, tensor in own.items()}
        retain = Mark.RETAIN in verb.marks
        if Mark.TENSOR in verb.marks:
            torch.autograd.backward(loss, retain_graph=retain)
        elif Mark.SCALE in verb.marks:
            torch.autograd.backward(self.engine.scale(loss), retain_graph=retain)
        else:
            self.engine.backward(loss, retain_graph=retain)
        changed = {name: not tensor.equal(before[name]) for name, tensor in own.items()}
        changed["inputs"] = result.is_batch_changed()
        self.ctx.record("own", {name: torch.tensor(float(value)) for name, value in changed.items()}, position)

    def run_failing_micro_batch(self, verb: Verb, micro: int) -> None:
        """A micro-batch that raises halfway; after a backward that did, what it has left is forgotten."""
        batch = self.get_batch(verb, micro)
        with inject_interruption(self.engine.module, verb.act):
            output = self.run_forward(batch, micro)
            self.engine.backward(self.ctx.spec.loss(output, batch.target))
        if verb.act is Act.FAILED_BACKWARD:
            self.engine.zero_grad()

    def inspect_engine(self, position: int, book: CallerState) -> None:
        """Ask for everything, twice; what is shown the second time is recorded, and all of it written over."""
        shown: list[Any] = []
        for _ in range(2):
            masters = self.engine.observe().masters
            grads = self.engine.full_grads() if book.has_reduced_gradients else {}
            shown += [{} if isinstance(masters, Absent) else masters, grads]
            shown += [self.engine.full_params(), self.engine.full_optimizer_state()]
            self.engine.layout()
            self.engine.grad_norm()
        for label, second in zip(("grads", "looked", "looked-state"), shown[-3:], strict=True):
            self.ctx.record(label, flatten_optimizer_state(second) if label == "looked-state" else second, position)
        for tensor in collect_tensors(shown):
            tensor.fill_(OVERWRITE_VALUE)

    def step(self, position: int, book: CallerState) -> None:
        """A step; before a boundary nothing may move."""
        self.outputs.clear()
        self.engine.step()
        if not book.is_boundary:
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

    def execute_between_steps(self, verb: Verb, book: CallerState) -> None:
        """The verbs that need neither a micro-batch nor a gradient."""
        act = verb.act
        if act is Act.SAVE:
            self.engine.save(self.checkpoint_dir / str(0 if Mark.OLD in verb.marks else book.save_count))
        elif act is Act.LOAD:
            self.engine.load(self.checkpoint_dir / str(0 if Mark.OLD in verb.marks else book.save_count - 1))
        elif act is Act.IDLE:
            self.engine.step()
            self.engine.zero_grad()
        elif act is Act.EDIT:
            self.edit_weight()
        if act in WEIGHT_CHANGING_ACTS:
            self.advance_weights_version()

    def edit_weight(self) -> None:
        """Rank 0 writes a weight; what the others write is not to last."""
        name = choose_edited_parameter(self.ctx.spec, self.ctx.seed, self.weights_version)
        gathered: Any = self.engine
        with gathered.gathered([name]) as weights, torch.no_grad():
            weights[name].fill_(EDITED_VALUE if self.ctx.rank == 0 else -EDITED_VALUE)

    def advance_weights_version(self) -> None:
        """Go on to the weights that there are now."""
        self.weights_version += 1
        self.record_weights_version()

    def record_weights_version(self) -> None:
        """Record weights, optimizer state and what the engine tells of itself, as they are now."""
        # What was gathered is counted behind other collectives: gloo lets go of what it has sent a moment later.
        seen = self.ctx.record_training_state(self.engine, self.weights_version)
        self.ctx.record("told", build_facts(seen), self.weights_version)
        held = seen.gathered_bytes
        counted = {} if isinstance(held, Absent) else {"gathered": torch.tensor(held)}
        self.ctx.record("held", counted, self.weights_version)


def train_once(ctx: RankContext, engine: Engine, micro: int) -> None:
    """One micro-batch and its step."""
    batch = ctx.batch(micro)
    engine.backward(ctx.spec.loss(engine(batch.inputs), batch.target))
    engine.step()
    engine.zero_grad()


def observe_program(ctx: RankContext, program: Program, other_engine_count: int = 0) -> None:
    """Run ``program`` on the engine, on every rank; ``others`` are how many more are in the process, and train too."""
    with ExitStack() as stack:
        saves = any(verb.act is Act.SAVE for verb in program.verbs)
        folder = stack.enter_context(shared_folder()) if saves else Path()
        owner = AccumulationOwner.ENGINE if program.window > 1 else AccumulationOwner.CALLER
        engine = ctx.build_engine(
            optimizer=OPTIMIZERS[program.optimizer],
            clip=program.clip,
            accumulation_steps=program.window,
            accumulation_owner=owner,
            reduction=Reduction(program.reduction),
        )
        beside = [ctx.build_engine(optimizer=OTHER_ENGINE_OPTIMIZER) for _ in range(other_engine_count)]
        player = ProgramExecutor(ctx, program, engine, folder, beside)
        player.record_weights_version()
        for place, verb, book in iter_verbs(program):
            player.execute_verb(place, verb, book)
        player.outputs.clear()
        for each in (*beside, engine):
            each.close()
