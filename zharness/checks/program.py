"""A program on an engine and on plain PyTorch: one that may do whatever is legal, judged after every verb.

It is judged as the laws of training are. Each verb starts from the engine's own weights, gradients and state: local
gradients are plain PyTorch's at the weights that the engine reports, summed over the backwards since the last step;
the update is a replay of the optimizer's formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zharness.checks.bench import Bench
from zharness.checks.double_backward import second_loss
from zharness.checks.optimizer_step import Moment, everyone_agrees, hinted, hyper, published, unflatten
from zharness.checks.state import same_records, shared_folder
from zharness.checks.trajectory import OPTIMIZERS, initial_weights
from zharness.checks.trial import Trial
from zharness.engines.protocol import Capabilities, Engine, Feature, OptimizerSpec
from zharness.parity import Comparison, Part, Tier, identical, within
from zharness.parity.baseline import Local, differentiated
from zharness.parity.compare import check_names
from zharness.parity.replay import replay
from zharness.workload.programs import NEW_GRAPH, Act, Book, Kind, Mark, Program, Verb, played

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
}
MARKS = {
    Mark.TENSOR: Feature.TENSOR_BACKWARD,
    Mark.SCALE: Feature.SCALE_BACKWARD,
    Mark.RETAIN: Feature.RETAIN_GRAPH,
}


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
    return list(dict.fromkeys(feature for feature in used if feature is not None))


@dataclass
class Player:
    """One rank's caller: its engine, the outputs in hand, and how many weights there have been (``era``)."""

    bench: Bench
    program: Program
    engine: Engine
    folder: Path
    outputs: dict[int, Tensor] = field(default_factory=dict)
    era: int = 0

    def call(self, micro: int, inputs: Tensor | None = None) -> Tensor:
        """Forward of a micro-batch."""
        output: Tensor = self.engine(self.bench.batch(micro).inputs if inputs is None else inputs, **odd(self, micro))
        return output

    def play(self, place: int, verb: Verb, book: Book) -> None:
        """One verb, and records of what can be compared after it."""
        if verb.act in (Act.FORWARD, Act.NO_GRAD, Act.INFERENCE):
            with mode(verb.act):
                output = self.call(book.drawn)
            self.bench.record("output", {"output": output}, place)
            if verb.act is Act.FORWARD:
                self.outputs[book.drawn] = output
        elif verb.act is Act.BACKWARD:
            self.backward(verb, book.chosen(verb), self.outputs[book.chosen(verb)])
            self.bench.record("grads", self.engine.full_grads(), place)
        elif verb.act is Act.NO_SYNC:
            with self.engine.no_sync():
                self.backward(verb, book.drawn, self.call(book.drawn))
        elif verb.act is Act.INPUT_GRAD:
            leaf = self.bench.batch(book.drawn).inputs.clone().requires_grad_()
            (grad,) = torch.autograd.grad(self.call(book.drawn, leaf).sum(), leaf)
            self.bench.record("input", {"input": grad}, place)
        else:
            self.between_steps(verb, book)

    def backward(self, verb: Verb, micro: int, output: Tensor) -> None:
        """Backward of the verb's loss in the verb's spelling; the output goes unless its graph is retained."""
        loss = loss_of(self.bench, verb, micro, output)
        retain = Mark.RETAIN in verb.marks
        if Mark.TENSOR in verb.marks:
            torch.autograd.backward(loss, retain_graph=retain)
        elif Mark.SCALE in verb.marks:
            torch.autograd.backward(self.engine.scale(loss), retain_graph=retain)
        else:
            self.engine.backward(loss, retain_graph=retain)
        if not retain:
            self.outputs.pop(micro, None)

    def between_steps(self, verb: Verb, book: Book) -> None:
        """The verbs that need no micro-batch."""
        if verb.act is Act.STEP:
            self.outputs.clear()
            self.engine.step()
        if verb.act in (Act.STEP, Act.ZERO_GRAD):
            self.engine.zero_grad()
        if verb.act is Act.SAVE:
            self.engine.save(self.folder / str(book.saved))
        if verb.act is Act.LOAD:
            self.engine.load(self.folder / str(book.saved - 1))
        if verb.act in NEW_WEIGHTS:
            self.era += 1
            self.look()

    def look(self) -> None:
        """Record weights and optimizer state as they are now."""
        self.bench.record_trained(self.engine, self.era)


NEW_WEIGHTS = (Act.STEP, Act.LOAD)


def odd(side: Player | Judge, micro: int) -> dict[str, bool]:
    """The keyword that a model with ``sometimes`` in it is called with."""
    some = any(layer.kind is Kind.SOMETIMES for layer in side.program.walk())
    return {"odd": micro % 2 == 1} if some else {}


def mode(act: Act) -> Any:
    """What surrounds a forward."""
    return {Act.NO_GRAD: torch.no_grad, Act.INFERENCE: torch.inference_mode}.get(act, nullcontext)()


def loss_of(side: Bench, verb: Verb, micro: int, output: Tensor) -> Tensor:
    """The loss of a backward."""
    return second_loss(output) if Mark.OTHER in verb.marks else side.spec.loss(output, side.batch(micro).target)


def observe_program(bench: Bench, program: Program) -> None:
    """Run ``program`` on the engine, on every rank."""
    with ExitStack() as stack:
        saves = any(verb.act is Act.SAVE for verb in program.verbs)
        folder = stack.enter_context(shared_folder()) if saves else Path()
        engine = bench.engine(optimizer=OPTIMIZERS[program.optimizer])
        player = Player(bench, program, engine, folder)
        player.look()
        for place, verb, book in played(program):
            player.play(place, verb, book)
        player.outputs.clear()
        engine.close()


@dataclass(frozen=True)
class Taken:
    """How many steps the optimizer has made, and how many of them moved each parameter."""

    steps: int = 0
    of: Mapping[str, int] = field(default_factory=dict)

    def with_one(self, names: Mapping[str, object]) -> Taken:
        """One step more, with gradients for ``names``."""
        return Taken(self.steps + 1, {**self.of, **{name: self.of.get(name, 0) + 1 for name in names}})


@dataclass
class Judge:
    """Plain PyTorch, run for every rank along the program."""

    trial: Trial
    program: Program
    era: int = 0
    micros: list[list[Local]] = field(default_factory=list)  # local gradients since the last step, by rank
    taken: Taken = Taken()
    saved: tuple[Taken, int] = (Taken(), 0)  # and the era that was saved
    reduced: int = 0  # the place of the last backward whose gradients were recorded

    def judge(self, place: int, verb: Verb, book: Book) -> Iterator[Comparison]:
        """What can be compared after one verb."""
        act = verb.act
        if act in (Act.FORWARD, Act.NO_GRAD, Act.INFERENCE):
            yield from self.same_output(place, act, book.drawn)
        elif act in (Act.BACKWARD, Act.NO_SYNC):
            micro = book.drawn if act is Act.NO_SYNC else book.chosen(verb)
            self.micros.append([self.local(rank, verb, micro) for rank in range(self.trial.world_size)])
            if act is Act.BACKWARD:
                self.reduced = place
                yield from self.trial.reduced("grads", self.micros, place, scale=len(self.micros))
        elif act is Act.INPUT_GRAD:
            expected = [{"input": self.input_gradient(rank, book.drawn)} for rank in range(self.trial.world_size)]
            yield from self.trial.same_value("input", expected, place)
        elif act is Act.STEP:
            yield from self.stepped(place)
        elif act is Act.SAVE:
            self.saved = (self.taken, self.era)
        elif act is Act.LOAD:
            yield from self.loaded()
        if act in (Act.STEP, Act.ZERO_GRAD):
            self.micros = []

    def module(self) -> torch.nn.Module:
        """The plain model in the engine's own weights of now."""
        return self.trial.baseline.module(self.trial.copies("params", self.era)[0])

    def same_output(self, place: int, act: Act, micro: int) -> Iterator[Comparison]:
        """Every rank's output equals plain PyTorch's, bitwise."""
        for rank, copy in enumerate(self.trial.copies("output", place)):
            with mode(act):
                output = self.module()(self.trial.baseline.batch(rank, micro).inputs, **odd(self, micro))
            yield identical(self.trial.place("output", Part.FORWARD, place, rank), output.detach(), copy["output"])

    def local(self, rank: int, verb: Verb, micro: int) -> Local:
        """One rank's loss and gradients of one backward, as plain PyTorch has them."""
        baseline, module = self.trial.baseline, self.module()
        batch = baseline.batch(rank, micro)
        output = module(batch.inputs, **odd(self, micro))
        loss = second_loss(output) if Mark.OTHER in verb.marks else baseline.objective(output, batch)
        return differentiated(module, loss, baseline.loss_scale)

    def input_gradient(self, rank: int, micro: int) -> Tensor:
        """autograd.grad of one rank's summed output with respect to its inputs."""
        leaf: Tensor = self.trial.baseline.batch(rank, micro).inputs.clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.module()(leaf, **odd(self, micro)).sum(), leaf)
        return grad

    def stepped(self, place: int) -> Iterator[Comparison]:
        """The new weights and state are the replay of the formula on the engine's own numbers before."""
        grads = self.trial.copies("grads", self.reduced)[0]
        spec = OPTIMIZERS[self.program.optimizer]
        yield from updated(self.trial, spec, grads, self.era, self.taken, place)
        self.taken, self.era = self.taken.with_one(grads), self.era + 1
        yield from self.agreed()

    def loaded(self) -> Iterator[Comparison]:
        """Weights and state are bitwise those that were saved."""
        self.taken, at = self.saved
        self.era += 1
        for what in ("params", "masters", "state"):
            yield from same_records(self.trial, what, what, at, self.era, Part.GATHER)
        yield from self.agreed()

    def agreed(self) -> Iterator[Comparison]:
        """All ranks report the same, and the model computes with the optimizer's weights."""
        yield from everyone_agrees(self.trial, Moment(self.era))
        yield from published(self.trial, Moment(self.era, "masters"), "params")


def updated(
    trial: Trial, spec: OptimizerSpec, grads: Mapping[str, Tensor], era: int, taken: Taken, place: int
) -> Iterator[Comparison]:
    """Each parameter made the step that its own count of steps asks for; one without a gradient made none."""
    before, after = trial.copies("masters", era)[0], trial.copies("masters", era + 1)[0]
    kept, state = (unflatten(trial.copies("state", at)[0]) for at in (era, era + 1))
    check_names("full_params", before, after)
    for name, weight in before.items():
        here = trial.place(name, Part.OPTIMIZER, place)
        if name not in grads:
            yield identical(here, weight, after[name])
            continue
        steps = taken.of.get(name, 0)
        own = dict(kept.get(name, {})) | {"step": torch.tensor(float(steps))}
        # Before the first step torch.optim has no state; an engine that has made it already has zeros.
        moments = own if steps else {"step": own["step"]}
        expected, wanted = replay(spec.name, weight, grads[name], moments, hyper(spec, name, taken.steps))
        found = state.get(name, {})
        if "step" in found:
            counted = trial.place(f"{name}/step", Part.OPTIMIZER, place)
            yield identical(counted, torch.tensor(steps + 1.0), found["step"].double().reshape(()))
        for key, value in wanted.items():
            moment = found.get(key, torch.full_like(weight, torch.nan))
            yield within(
                trial.place(f"{name}/{key}", Part.OPTIMIZER, place), value.value, moment, value.error, Tier.STAGED
            )
        moved = expected.value - weight.double()
        yield hinted(within(here, expected.value, after[name], expected.error, signal=moved), weight, after[name])


def judge_program(trial: Trial, program: Program) -> Iterator[Comparison]:
    """Everything that ``program`` left to compare, in the order in which it happened."""
    judge = Judge(trial, program)
    yield from initial_weights(trial)
    for place, verb, book in played(program):
        for comparison in judge.judge(place, verb, book):
            yield at_verb(comparison, place)


def at_verb(comparison: Comparison, place: int) -> Comparison:
    """``comparison`` with the verb's place for its step, whatever number it was recorded under."""
    if comparison.mismatch is None:
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, step=place))
