"""A program on an engine: a caller who may do whatever is legal, and records what can be compared after every verb.

``zharness.law_kit.program_judge`` holds it against plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Capabilities,
    Engine,
    Feature,
    OptimizerSpec,
    Reduction,
    require_gathered,
)
from zharness.errors import EngineContractError, HarnessFault
from zharness.law_kit.rank_context import RankContext, flatten_optimizer_state
from zharness.laws.double_backward import second_loss
from zharness.laws.state import shared_folder
from zharness.laws.training_sgd_step import eval_mode
from zharness.laws.training_trajectory import ADAM, NESTEROV, SCHEDULE, TRAJECTORY_OPTIMIZERS, build_facts
from zharness.workload import Batch, ModelSpec
from zharness.workload.models import collect_tensors
from zharness.workload.programs import (
    GRAPH_ACTS,
    Act,
    CallerState,
    LayerKind,
    Mark,
    Program,
    Verb,
    apply_verb,
    is_accumulating,
    iter_verbs,
)

OPTIMIZERS = {
    **TRAJECTORY_OPTIMIZERS,
    "adam": replace(ADAM, schedule=SCHEDULE),
    "nesterov": replace(NESTEROV, schedule=SCHEDULE),
}

# What an engine has to claim for a program to use these; everything else is part of any training.
LAYER_FEATURES = {
    LayerKind.READ: Feature.OUTSIDE_FORWARD,
    LayerKind.UNUSED: Feature.PARAMETERS,
    LayerKind.SOMETIMES: Feature.PARAMETERS,
    LayerKind.CHECKPOINT: Feature.RECOMPUTATION,
    LayerKind.REENTRANT: Feature.RECOMPUTATION,
}
ACT_FEATURES = {
    Act.NO_SYNC: Feature.NO_SYNC,
    Act.SAVE: Feature.CHECKPOINT,
    Act.LOAD: Feature.CHECKPOINT,
    Act.INPUT_GRAD: Feature.AUTOGRAD,
    Act.FAILED_FORWARD: Feature.AUTOGRAD,
    Act.FAILED_BACKWARD: Feature.AUTOGRAD,
    Act.TRANSFORM: Feature.TRANSFORMS,
    Act.IDLE: Feature.NO_GRADIENT,
    Act.EDIT: Feature.EDITS,
}
MARK_FEATURES = {
    Mark.TENSOR: Feature.TENSOR_BACKWARD,
    Mark.SCALE: Feature.SCALE_BACKWARD,
    Mark.RETAIN: Feature.RETAIN_GRAPH,
}
OTHER_ENGINE_OPTIMIZER = OptimizerSpec(name="sgd", args={"lr": 0.5})  # of engines of which nothing is recorded
EDITED_VALUE = 0.125  # what an edit fills a weight with, exact in every dtype
OVERWRITE_VALUE = 3  # what a caller writes over tensors that it was given
FORWARD_ACTS = (Act.FORWARD, Act.NO_GRAD, Act.INFERENCE, Act.EVALUATION, Act.EVALUATION_GRAD)
NO_GRAD_ACTS = (Act.NO_GRAD, Act.EVALUATION)
EVAL_MODE_ACTS = (Act.EVALUATION, Act.EVALUATION_GRAD)
WEIGHT_CHANGING_ACTS = (Act.LOAD, Act.IDLE, Act.EDIT)


def explain_unsupported(program: Program, capabilities: Capabilities) -> str:
    """Why an engine that ``claims`` so cannot be asked to run ``program``; nothing where it can."""
    if program.dtype not in capabilities.dtypes or program.stage not in capabilities.stages:
        return f"the engine does not claim stage {program.stage} in {program.dtype}"
    if program.stage in capabilities.own_kernels:
        return f"its local gradients are not torch's: {capabilities.own_kernels[program.stage]}"
    for verb in program.verbs:
        if program.dtype == "fp16" and Mark.TENSOR in verb.marks:
            return "under fp16 a loss has to be scaled, which loss.backward() does not"
    for feature in find_required_features(program):
        reason = capabilities.refusal(feature)
        if reason is not None:
            return f"{feature.value}: {reason}"
    return ""


def find_required_features(program: Program) -> list[Feature]:
    """What ``program`` asks of an engine beyond plain training."""
    used = [LAYER_FEATURES.get(layer.kind) for layer in program.walk()]
    used += [ACT_FEATURES.get(verb.act) for verb in program.verbs]
    used += [MARK_FEATURES.get(mark) for verb in program.verbs for mark in verb.marks]
    # Where reduction is armed by the newest forward, a backward of an older one is not reduced, as a second one is not.
    used += [Feature.RETAIN_GRAPH for _, verb, book in iter_verbs(program) if verb.act in GRAPH_ACTS and book.outputs]
    used += [Feature.CALLER_ACCUMULATION for _, verb, book in iter_verbs(program) if is_accumulating(book, verb)]
    used += [Feature.CLIP] * (program.clip is not None) + [Feature.ENGINE_ACCUMULATION] * (program.window > 1)
    used += [Feature.SUM] * (program.reduction == Reduction.SUM.value)
    return list(dict.fromkeys(feature for feature in used if feature is not None))


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
        with require_gathered(self.engine).gathered([name]) as weights, torch.no_grad():
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


def make_model_kwargs(program: Program, spec: ModelSpec, micro: int) -> dict[str, bool]:
    """The keyword that a model is called with of which a part is used in every second micro-batch."""
    if any(layer.kind is LayerKind.SOMETIMES for layer in program.walk()):
        return {"odd": micro % 2 == 1}
    return {} if program.layers or spec.name != "changing" else {"branch": micro % 2 == 1}


def apply_input_marks(batch: Batch, verb: Verb, rank: int, micro: int) -> Batch:
    """A micro-batch of ``rank`` as the marks of ``verb`` have it."""
    if Mark.FEW in verb.marks:
        # Not one alone: a product with a vector rounds otherwise where its weights begin at another address.
        rows = 2 + (rank + micro) % max(1, batch.num_samples - 2)
        batch = batch.map_tensors(lambda tensor: tensor[:rows])
    return replace(batch, inputs={"x": batch.inputs}) if Mark.KEYWORD in verb.marks else batch


def call_with_extra_kwargs(batch: Batch, call: Callable[..., Any], extra_kwargs: dict[str, bool]) -> Any:
    """What ``call`` makes of the inputs, with ``words`` beside them."""
    return batch.feed(lambda *args, **kwargs: call(*args, **kwargs, **extra_kwargs))


def get_grad_mode(act: Act) -> Any:
    """What a forward runs in."""
    if act is Act.INFERENCE:
        return torch.inference_mode()
    return torch.no_grad() if act in NO_GRAD_ACTS else nullcontext()


def compute_input_grad(act: Act, call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """The gradient of the summed output with respect to the inputs, by autograd.grad or by torch.func.grad."""
    if act is Act.TRANSFORM:
        grad: Tensor = torch.func.grad(lambda x: call(x).sum())(leaf.detach())
        return grad
    (found,) = torch.autograd.grad(call(leaf).sum(), leaf)
    return found


@contextmanager
def inject_interruption(module: nn.Module, act: Act) -> Iterator[None]:
    """A block that an InterruptedError ends: behind the forward of the second of the module's children that runs, or of
    the only one; or, where a backward is to fail, in front of the backward of that one, or of the next that has one.

    Raises EngineContractError where the engine kept the exception from its caller, or ran no backward through that
    child; HarnessFault where no such child ran, so that nothing was there to be interrupted.
    """
    children = [*module.children()]
    calls, chosen, raised = count(1), list[nn.Module](), list[Act]()

    def interrupt(*_: object) -> None:
        raised.append(act)
        raise InterruptedError

    def forward_hook(child: nn.Module, _inputs: object, output: Any) -> None:
        if next(calls) < min(2, len(children)) or chosen:
            return
        if act is Act.FAILED_FORWARD:
            interrupt()
        if isinstance(output, Tensor) and output.requires_grad:
            chosen.append(child)
            output.register_hook(interrupt)  # type: ignore[no-untyped-call]

    hooks = [child.register_forward_hook(forward_hook) for child in children]
    try:
        yield
    except InterruptedError:
        if not raised:
            raise
        return
    finally:
        for hook in hooks:
            hook.remove()
    if raised:
        raise EngineContractError("an exception within a forward or a backward did not reach the engine's caller")
    if chosen:
        raise EngineContractError("a backward returned without having run through the module's children")
    raise HarnessFault(
        f"of {len(children)} children of the engine's module none ran that could fail, so nothing was interrupted"
    )


def choose_edited_parameter(spec: ModelSpec, seed: int, weights_version: int) -> str:
    """The parameter that an edit of the weights of ``era`` writes: each time another one."""
    names = [name for name, parameter in spec.model(seed).named_parameters() if parameter.requires_grad]
    return names[weights_version % len(names)]


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
