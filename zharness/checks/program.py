"""A program on an engine: a caller who may do whatever is legal, and records what can be compared after every verb.

``zharness.checks.program_judge`` holds it against plain PyTorch.
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

from zharness.checks.bench import Bench, flattened
from zharness.checks.double_backward import second_loss
from zharness.checks.single_step import evaluating
from zharness.checks.state import shared_folder
from zharness.checks.trajectory import ADAM, NESTEROV, SCHEDULE, TRAINED_BY, facts_of
from zharness.engines.protocol import Absent, AccumulationOwner, Capabilities, Engine, Feature, OptimizerSpec, Reduction
from zharness.errors import EngineContractError, HarnessFault
from zharness.workload import Batch, ModelSpec
from zharness.workload.models import tensors_in
from zharness.workload.programs import NEW_GRAPH, Act, Book, Kind, Mark, Program, Verb, accumulates, done, played

OPTIMIZERS = {**TRAINED_BY, "adam": replace(ADAM, schedule=SCHEDULE), "nesterov": replace(NESTEROV, schedule=SCHEDULE)}

# What an engine has to claim for a program to use these; everything else is part of any training.
LAYERS = {
    Kind.READ: Feature.OUTSIDE_FORWARD,
    Kind.UNUSED: Feature.PARAMETERS,
    Kind.SOMETIMES: Feature.PARAMETERS,
    Kind.CHECKPOINT: Feature.RECOMPUTATION,
    Kind.REENTRANT: Feature.RECOMPUTATION,
}
ACTS = {
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
MARKS = {
    Mark.TENSOR: Feature.TENSOR_BACKWARD,
    Mark.SCALE: Feature.SCALE_BACKWARD,
    Mark.RETAIN: Feature.RETAIN_GRAPH,
}
BESIDE = OptimizerSpec(name="sgd", args={"lr": 0.5})  # of engines of which nothing is recorded
EDITED = 0.125  # what an edit fills a weight with, exact in every dtype
SCRIBBLE = 3  # what a caller writes over tensors that it was given
OUTPUTS = (Act.FORWARD, Act.NO_GRAD, Act.INFERENCE, Act.EVALUATION, Act.EVALUATION_GRAD)
UNGRADED = (Act.NO_GRAD, Act.EVALUATION)
EVALUATED = (Act.EVALUATION, Act.EVALUATION_GRAD)
NEW_WEIGHTS = (Act.LOAD, Act.IDLE, Act.EDIT)


def missing(program: Program, claims: Capabilities) -> str:
    """Why an engine that ``claims`` so cannot be asked to run ``program``; nothing where it can."""
    if program.dtype not in claims.dtypes or program.stage not in claims.stages:
        return f"the engine does not claim stage {program.stage} in {program.dtype}"
    if program.stage in claims.own_kernels:
        return f"its local gradients are not torch's: {claims.own_kernels[program.stage]}"
    for verb in program.verbs:
        if program.dtype == "fp16" and Mark.TENSOR in verb.marks:
            return "under fp16 a loss has to be scaled, which loss.backward() does not"
    for feature in features(program):
        reason = claims.refusal(feature)
        if reason is not None:
            return f"{feature.value}: {reason}"
    return ""


def features(program: Program) -> list[Feature]:
    """What ``program`` asks of an engine beyond plain training."""
    used = [LAYERS.get(layer.kind) for layer in program.walk()]
    used += [ACTS.get(verb.act) for verb in program.verbs]
    used += [MARKS.get(mark) for verb in program.verbs for mark in verb.marks]
    # Where reduction is armed by the newest forward, a backward of an older one is not reduced, as a second one is not.
    used += [Feature.RETAIN_GRAPH for _, verb, book in played(program) if verb.act in NEW_GRAPH and book.kept]
    used += [Feature.CALLER_ACCUMULATION for _, verb, book in played(program) if accumulates(book, verb)]
    used += [Feature.CLIP] * (program.clip is not None) + [Feature.ENGINE_ACCUMULATION] * (program.window > 1)
    used += [Feature.SUM] * (program.reduction == Reduction.SUM.value)
    return list(dict.fromkeys(feature for feature in used if feature is not None))


@dataclass(frozen=True)
class Kept:
    """An output in a caller's hand, the micro-batch that it was made of, and a copy of that from before."""

    output: Tensor
    batch: Batch
    before: Batch

    def changed(self) -> bool:
        """Whether the micro-batch is another than it was, or wants gradients."""
        now, then = (tensors_in([batch.inputs, batch.target]) for batch in (self.batch, self.before))
        return any(tensor.requires_grad or not tensor.equal(old) for tensor, old in zip(now, then, strict=True))


@dataclass
class Player:
    """One rank's caller: its engine, its outputs in hand by micro-batch, and how many weights there were (``era``).

    Behind every step it trains the engines ``beside``, of which nothing is recorded.
    """

    bench: Bench
    program: Program
    engine: Engine
    folder: Path
    beside: Sequence[Engine] = ()
    outputs: dict[int, Kept] = field(default_factory=dict)
    era: int = 0

    def play(self, place: int, verb: Verb, book: Book) -> None:
        """One verb, and records of what can be compared after it."""
        act = verb.act
        if act in OUTPUTS:
            self.forward(place, verb, book.drawn)
        elif act is Act.BACKWARD:
            micro = book.chosen(verb)
            self.backward(place, verb, self.outputs[micro])
            if Mark.RETAIN not in verb.marks:
                del self.outputs[micro]
            if done(book, verb).ready and Mark.UNSEEN not in verb.marks:
                self.bench.record("grads", self.engine.full_grads(), place)
        elif act is Act.NO_SYNC:
            batch = self.batch(verb, book.drawn)
            with self.engine.no_sync():
                self.backward(place, verb, self.kept(batch, book.drawn))
        elif act in (Act.INPUT_GRAD, Act.TRANSFORM):
            grad = input_gradient(act, lambda x: self.engine(x, **self.words(book.drawn)), self.leaf(book.drawn))
            self.bench.record("input", {"input": grad}, place)
        elif act in (Act.FAILED_FORWARD, Act.FAILED_BACKWARD):
            self.fail(verb, book.drawn)
        elif act is Act.LOOK:
            self.look(place, book)
        elif act is Act.STEP:
            self.step(place, book)
        elif act is Act.ZERO_GRAD:
            self.engine.zero_grad()
        else:
            self.between_steps(verb, book)

    def batch(self, verb: Verb, micro: int) -> Batch:
        """This rank's micro-batch as the verb's marks have it."""
        return fed(self.bench.batch(micro), verb, self.bench.rank, micro)

    def leaf(self, micro: int) -> Tensor:
        """This rank's inputs, as a leaf that requires a gradient."""
        inputs: Tensor = self.bench.batch(micro).inputs
        return inputs.clone().requires_grad_()

    def words(self, micro: int) -> dict[str, bool]:
        return words_for(self.program, self.bench.spec, micro)

    def call(self, batch: Batch, micro: int) -> Tensor:
        """Forward of a micro-batch."""
        output: Tensor = through(batch, self.engine, self.words(micro))
        return output

    def kept(self, batch: Batch, micro: int) -> Kept:
        """The same, with what a backward needs."""
        before = batch.mapped(torch.clone)
        return Kept(self.call(batch, micro), batch, before)

    def forward(self, place: int, verb: Verb, micro: int) -> None:
        """A forward in the verb's mode; the output of a plain one is kept."""
        batch = self.batch(verb, micro)
        with evaluating(self.engine) if verb.act in EVALUATED else nullcontext(), mode(verb.act):
            kept = self.kept(batch, micro)
        self.bench.record("output", {"output": kept.output}, place)
        if verb.act is Act.FORWARD:
            self.outputs[micro] = kept

    def backward(self, place: int, verb: Verb, kept: Kept) -> None:
        """Backward of the verb's loss in the verb's spelling; and what has become of the caller's own tensors."""
        output = kept.output
        loss = second_loss(output) if Mark.OTHER in verb.marks else self.bench.spec.loss(output, kept.batch.target)
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
        changed["inputs"] = kept.changed()
        self.bench.record("own", {name: torch.tensor(float(value)) for name, value in changed.items()}, place)

    def fail(self, verb: Verb, micro: int) -> None:
        """A micro-batch that raises halfway; after a backward that did, what it has left is forgotten."""
        batch = self.batch(verb, micro)
        with interrupting(self.engine.module, verb.act):
            output = self.call(batch, micro)
            self.engine.backward(self.bench.spec.loss(output, batch.target))
        if verb.act is Act.FAILED_BACKWARD:
            self.engine.zero_grad()

    def look(self, place: int, book: Book) -> None:
        """Ask for everything, twice; what is shown the second time is recorded, and all of it written over."""
        shown: list[Any] = []
        for _ in range(2):
            masters = self.engine.observe().masters
            grads = self.engine.full_grads() if book.ready else {}
            shown += [{} if isinstance(masters, Absent) else masters, grads]
            shown += [self.engine.full_params(), self.engine.full_optimizer_state()]
            self.engine.layout()
            self.engine.grad_norm()
        for label, second in zip(("grads", "looked", "looked-state"), shown[-3:], strict=True):
            self.bench.record(label, flattened(second) if label == "looked-state" else second, place)
        for tensor in tensors_in(shown):
            tensor.fill_(SCRIBBLE)

    def step(self, place: int, book: Book) -> None:
        """A step; before a boundary nothing may move."""
        self.outputs.clear()
        self.engine.step()
        if not book.boundary:
            self.bench.record("early", self.engine.full_params(), place)
            self.bench.record_state("early-state", self.engine, place)
            return
        if self.program.clip is not None:
            norm = self.engine.grad_norm()
            self.bench.record("norm", {} if norm is None else {"norm": torch.tensor(norm, dtype=torch.float64)}, place)
        self.engine.zero_grad()
        for other in self.beside:
            train_once(self.bench, other, self.era)
        self.new_era()

    def between_steps(self, verb: Verb, book: Book) -> None:
        """The verbs that need neither a micro-batch nor a gradient."""
        act = verb.act
        if act is Act.SAVE:
            self.engine.save(self.folder / str(0 if Mark.OLD in verb.marks else book.saved))
        elif act is Act.LOAD:
            self.engine.load(self.folder / str(0 if Mark.OLD in verb.marks else book.saved - 1))
        elif act is Act.IDLE:
            self.engine.step()
            self.engine.zero_grad()
        elif act is Act.EDIT:
            self.edit()
        if act in NEW_WEIGHTS:
            self.new_era()

    def edit(self) -> None:
        """Rank 0 writes a weight; what the others write is not to last."""
        name = edited(self.bench.spec, self.bench.seed, self.era)
        gathered: Any = self.engine
        with gathered.gathered([name]) as weights, torch.no_grad():
            weights[name].fill_(EDITED if self.bench.rank == 0 else -EDITED)

    def new_era(self) -> None:
        """Go on to the weights that there are now."""
        self.era += 1
        self.keep()

    def keep(self) -> None:
        """Record weights, optimizer state and what the engine tells of itself, as they are now."""
        # What was gathered is counted behind other collectives: gloo lets go of what it has sent a moment later.
        seen = self.bench.record_trained(self.engine, self.era)
        self.bench.record("told", facts_of(seen), self.era)
        held = seen.gathered_bytes
        counted = {} if isinstance(held, Absent) else {"gathered": torch.tensor(held)}
        self.bench.record("held", counted, self.era)


def words_for(program: Program, spec: ModelSpec, micro: int) -> dict[str, bool]:
    """The keyword that a model is called with of which a part is used in every second micro-batch."""
    if any(layer.kind is Kind.SOMETIMES for layer in program.walk()):
        return {"odd": micro % 2 == 1}
    return {} if program.layers or spec.name != "changing" else {"branch": micro % 2 == 1}


def fed(batch: Batch, verb: Verb, rank: int, micro: int) -> Batch:
    """A micro-batch of ``rank`` as the marks of ``verb`` have it."""
    if Mark.FEW in verb.marks:
        # Not one alone: a product with a vector rounds otherwise where its weights begin at another address.
        rows = 2 + (rank + micro) % max(1, batch.samples - 2)
        batch = batch.mapped(lambda tensor: tensor[:rows])
    return replace(batch, inputs={"x": batch.inputs}) if Mark.KEYWORD in verb.marks else batch


def through(batch: Batch, call: Callable[..., Any], words: dict[str, bool]) -> Any:
    """What ``call`` makes of the inputs, with ``words`` beside them."""
    return batch.through(lambda *args, **kwargs: call(*args, **kwargs, **words))


def mode(act: Act) -> Any:
    """What a forward runs in."""
    if act is Act.INFERENCE:
        return torch.inference_mode()
    return torch.no_grad() if act in UNGRADED else nullcontext()


def input_gradient(act: Act, call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """The gradient of the summed output with respect to the inputs, by autograd.grad or by torch.func.grad."""
    if act is Act.TRANSFORM:
        grad: Tensor = torch.func.grad(lambda x: call(x).sum())(leaf.detach())
        return grad
    (found,) = torch.autograd.grad(call(leaf).sum(), leaf)
    return found


@contextmanager
def interrupting(module: nn.Module, act: Act) -> Iterator[None]:
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

    def behind_forward(child: nn.Module, _inputs: object, output: Any) -> None:
        if next(calls) < min(2, len(children)) or chosen:
            return
        if act is Act.FAILED_FORWARD:
            interrupt()
        if isinstance(output, Tensor) and output.requires_grad:
            chosen.append(child)
            output.register_hook(interrupt)  # type: ignore[no-untyped-call]

    hooks = [child.register_forward_hook(behind_forward) for child in children]
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


def edited(spec: ModelSpec, seed: int, era: int) -> str:
    """The parameter that an edit of the weights of ``era`` writes: each time another one."""
    names = [name for name, parameter in spec.model(seed).named_parameters() if parameter.requires_grad]
    return names[era % len(names)]


def train_once(bench: Bench, engine: Engine, micro: int) -> None:
    """One micro-batch and its step."""
    batch = bench.batch(micro)
    engine.backward(bench.spec.loss(engine(batch.inputs), batch.target))
    engine.step()
    engine.zero_grad()


def observe_program(bench: Bench, program: Program, others: int = 0) -> None:
    """Run ``program`` on the engine, on every rank; ``others`` are how many more are in the process, and train too."""
    with ExitStack() as stack:
        saves = any(verb.act is Act.SAVE for verb in program.verbs)
        folder = stack.enter_context(shared_folder()) if saves else Path()
        owner = AccumulationOwner.ENGINE if program.window > 1 else AccumulationOwner.CALLER
        engine = bench.engine(
            optimizer=OPTIMIZERS[program.optimizer],
            clip=program.clip,
            accumulation_steps=program.window,
            accumulation_owner=owner,
            reduction=Reduction(program.reduction),
        )
        beside = [bench.engine(optimizer=BESIDE) for _ in range(others)]
        player = Player(bench, program, engine, folder, beside)
        player.keep()
        for place, verb, book in played(program):
            player.play(place, verb, book)
        player.outputs.clear()
        for each in (*beside, engine):
            each.close()
