"""Plain PyTorch along a program: each verb that an engine was asked for, judged as the laws of training are.

Each verb starts from the engine's own weights, gradients and state: local gradients are plain PyTorch's at the weights
that the engine reports, summed over the backwards since the last step; the update is a replay of the optimizer's
formula.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zharness.checks.accumulation import reported_norm
from zharness.checks.course import norm_and_bound, norm_of
from zharness.checks.double_backward import second_loss
from zharness.checks.free_running import ENDLESS
from zharness.checks.optimizer_step import (
    Factor,
    Moment,
    everyone_agrees,
    hinted,
    hyper,
    published,
    same_count,
    told,
    unflatten,
)
from zharness.checks.program import (
    EDITED,
    EVALUATED,
    OPTIMIZERS,
    OUTPUTS,
    edited,
    fed,
    input_gradient,
    mode,
    through,
    words_for,
)
from zharness.checks.state import same_records
from zharness.checks.trajectory import STALE, facts_told, initial_weights
from zharness.checks.trial import Means, Trial
from zharness.engines.protocol import OptimizerSpec, Reduction
from zharness.parity import Comparison, Part, Tier, identical, within
from zharness.parity.baseline import Local, differentiated
from zharness.parity.bounds import Bounded
from zharness.parity.compare import check_names
from zharness.parity.replay import replay
from zharness.workload.programs import Act, Book, Mark, Pending, Program, Verb, done, played

AGAIN = "the sum of all, those before the last summed over the ranks once more"
KEPT = "the backwards that zero_grad forgot are still in it"
NOT_CHANGED = f"{STALE} the last change"
CHANGED = "a tensor of the caller's is another than before the backward"
EARLY = "a step was made before the window was full"


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
    forwards: dict[int, Verb] = field(default_factory=dict)  # by micro-batch
    micros: list[list[Local]] = field(default_factory=list)  # local gradients since the last step, by rank
    forgotten: list[list[Local]] = field(default_factory=list)  # those that a zero_grad forgot since the last step
    taken: Taken = Taken()
    saves: list[tuple[Taken, int]] = field(default_factory=list)  # each with the era that was saved
    reduced: int = 0  # the place of the last verb that recorded reduced gradients
    plain: tuple[int, torch.nn.Module] | None = None  # the plain model in the weights of an era

    def judge(self, place: int, verb: Verb, book: Book) -> Iterator[Comparison]:
        """What can be compared after one verb."""
        act = verb.act
        if act in OUTPUTS:
            self.forwards[book.drawn] = verb
            yield from self.same_output(place, verb, book.drawn)
        elif act in (Act.BACKWARD, Act.NO_SYNC):
            yield from self.backward(place, verb, book)
        elif act in (Act.INPUT_GRAD, Act.TRANSFORM):
            expected = [{"input": self.input_gradient(act, rank, book.drawn)} for rank in range(self.trial.world_size)]
            yield from self.trial.same_value("input", expected, place)
        elif act is Act.LOOK:
            yield from self.looked(place, book)
        elif act is Act.STEP:
            yield from self.stepped(place, book)
        elif act is Act.IDLE:
            yield from self.moved(place, {}, Pending.NOTHING)
        elif act is Act.EDIT:
            yield from self.written()
        elif act is Act.SAVE:
            at = 0 if Mark.OLD in verb.marks else len(self.saves)
            self.saves[at:] = [(self.taken, self.era), *self.saves[at + 1 :]]
        elif act is Act.LOAD:
            yield from self.loaded(*self.saves[0 if Mark.OLD in verb.marks else -1])
        if act in (Act.ZERO_GRAD, Act.FAILED_BACKWARD):
            self.forgotten, self.micros = [*self.forgotten, *self.micros], []
        if act is Act.STEP and book.boundary:
            self.forgotten, self.micros = [], []

    def module(self, era: int) -> torch.nn.Module:
        """The plain model in the engine's own weights of ``era``, training, without any gradient."""
        if self.plain is None or self.plain[0] != era:
            self.plain = era, self.trial.baseline.module(self.trial.copies("params", era)[0])
        _, module = self.plain
        module.zero_grad(set_to_none=True)
        return module.train()

    def same_output(self, place: int, verb: Verb, micro: int) -> Iterator[Comparison]:
        """Every rank's output equals plain PyTorch's, bitwise."""
        for rank, copy in enumerate(self.trial.copies("output", place)):
            found = identical(
                self.trial.place("output", Part.FORWARD, place, rank),
                self.output(self.era, verb, micro, rank),
                copy["output"],
            )
            if (
                found.mismatch is not None
                and self.era
                and self.output(self.era - 1, verb, micro, rank).equal(copy["output"])
            ):
                found = told(found, NOT_CHANGED)
            yield found

    def output(self, era: int, verb: Verb, micro: int, rank: int) -> Tensor:
        """What the plain model makes of a micro-batch in the weights of ``era``."""
        baseline = self.trial.baseline
        module = self.module(era).train(verb.act not in EVALUATED)
        with mode(verb.act):
            output: Tensor = through(
                fed(baseline.batch(rank, micro), verb, rank, micro),
                module,
                words_for(self.program, baseline.spec, micro),
            )
        return output.detach()

    def backward(self, place: int, verb: Verb, book: Book) -> Iterator[Comparison]:
        """One more gradient for every rank, and their mean where the engine was asked for it."""
        micro = book.drawn if verb.act is Act.NO_SYNC else book.chosen(verb)
        if verb.act is Act.NO_SYNC:
            self.forwards[micro] = verb
        for rank, copy in enumerate(self.trial.copies("own", place)):
            for name, changed in copy.items():
                found = identical(self.trial.place(name, Part.FORWARD, place, rank), torch.zeros(()), changed)
                yield told(found, CHANGED)
        self.micros.append([self.local(rank, verb, micro) for rank in range(self.trial.world_size)])
        if done(book, verb).ready and Mark.UNSEEN not in verb.marks:
            yield from self.gradients(place)

    def gradients(self, place: int) -> Iterator[Comparison]:
        """The gradients recorded at ``place`` are those of all backwards since the last step."""
        self.reduced = place
        ranks = self.summed
        suspects = {AGAIN: summed_again(self.micros, ranks)} if ranks > 1 and len(self.micros) > 1 else {}
        if self.forgotten:
            suspects[KEPT] = times([*self.forgotten, *self.micros], ranks / self.program.window)
        yield from self.trial.reduced("grads", self.micros, place, scale=self.scale, suspects=suspects)

    @property
    def summed(self) -> int:
        """Over how many ranks gradients are summed, beyond their mean."""
        return self.trial.world_size if self.program.reduction == Reduction.SUM.value else 1

    @property
    def scale(self) -> float:
        """The factor of the gradients since the last step over their mean."""
        return len(self.micros) * self.summed / self.program.window

    def local(self, rank: int, verb: Verb, micro: int) -> Local:
        """One rank's loss and gradients of one backward, as plain PyTorch has them."""
        baseline, module = self.trial.baseline, self.module(self.era)
        batch = fed(baseline.batch(rank, micro), self.forwards[micro], rank, micro)
        output = through(batch, module, words_for(self.program, baseline.spec, micro))
        loss = second_loss(output) if Mark.OTHER in verb.marks else baseline.objective(output, batch)
        return differentiated(module, loss, baseline.loss_scale)

    def input_gradient(self, act: Act, rank: int, micro: int) -> Tensor:
        """That of one rank's summed output."""
        baseline, module = self.trial.baseline, self.module(self.era)
        words = words_for(self.program, baseline.spec, micro)
        leaf = baseline.batch(rank, micro).inputs.clone().requires_grad_()
        return input_gradient(act, lambda x: module(x, **words), leaf)

    def looked(self, place: int, book: Book) -> Iterator[Comparison]:
        """What is shown at any time is what there is."""
        if book.ready:
            yield from self.gradients(place)
        yield from same_records(self.trial, "params", "looked", self.era, place, Part.GATHER)
        yield from same_records(self.trial, "state", "looked-state", self.era, place, Part.OPTIMIZER)

    def stepped(self, place: int, book: Book) -> Iterator[Comparison]:
        """At a boundary a step with the gradients of the whole window, clipped by their norm; before it, nothing."""
        if not book.boundary:
            for kept, early in (("params", "early"), ("state", "early-state")):
                for found in same_records(self.trial, kept, early, self.era, place, Part.OPTIMIZER):
                    yield told(found, EARLY)
            return
        grads = yield from self.clip(place, self.taken_in(book))
        yield from self.moved(place, grads, book.pending)

    def taken_in(self, book: Book) -> Means:
        """The gradients that a step is made with: the engine's own, or where nobody asked for them what they may be."""
        shown = self.trial.copies("grads", self.reduced)[0] if self.reduced else {}
        if book.pending is not Pending.UNSEEN:
            return {name: Bounded.exact(grad) for name, grad in shown.items()}
        return self.trial.means(self.micros, self.scale, {name: grad.dtype for name, grad in shown.items()})

    def clip(self, place: int, grads: Means) -> Generator[Comparison, None, Means]:
        """The norm reported is that of the gradients; and what clipping makes of them.

        That an engine which clips reports none is told by training.clip_and_norm.
        """
        if self.program.clip is None:
            return grads
        dtypes = [grad.dtype for grad in grads.values()]
        norm, rounding = norm_and_bound({name: grad.value for name, grad in grads.items()}, dtypes)
        error = rounding + norm_of({name: grad.error for name, grad in grads.items()})
        reported = yield from reported_norm(self.trial, "norm", place, norm, error)
        factor = Factor.within(self.program.clip, norm, error, reported)
        return {name: factor.of(grad) for name, grad in grads.items()}

    def moved(self, place: int, grads: Means, pending: Pending) -> Iterator[Comparison]:
        """The new weights and state are the replay of the formula on the engine's own numbers before."""
        spec = OPTIMIZERS[self.program.optimizer]
        yield from updated(self.trial, spec, grads, self.era, self.taken, place, pending)
        self.taken, self.era = self.taken.with_one(grads), self.era + 1
        yield from self.agreed()

    def loaded(self, taken: Taken, at: int) -> Iterator[Comparison]:
        """Weights and state are bitwise those that were saved."""
        self.taken = taken
        self.era += 1
        for what in ("params", "masters", "state"):
            yield from same_records(self.trial, what, what, at, self.era, Part.GATHER)
        yield from self.agreed()

    def written(self) -> Iterator[Comparison]:
        """One weight is what rank 0 has written, in the optimizer's copy too; all else is as it was."""
        name = edited(self.trial.baseline.spec, self.trial.baseline.seed, self.era)
        for rank, before in enumerate(self.trial.copies("masters", self.era)):
            after = self.trial.copies("masters", self.era + 1)[rank]
            for other, weight in before.items():
                expected = weight
                if other == name:
                    # An element that the model held as this already was not edited: its master may stay unrounded.
                    held = self.trial.copies("params", self.era)[rank][other]
                    stayed = (held == EDITED) & (after[other] == weight)
                    expected = weight.where(stayed, EDITED)
                yield identical(self.trial.place(other, Part.GATHER, 0, rank), expected, after[other])
        yield from same_records(self.trial, "state", "state", self.era, self.era + 1, Part.OPTIMIZER)
        self.era += 1
        yield from self.agreed()

    def agreed(self) -> Iterator[Comparison]:
        """All ranks report the same, the model computes with the optimizer's weights, and nothing stays gathered."""
        yield from everyone_agrees(self.trial, Moment(self.era))
        yield from published(self.trial, Moment(self.era, "masters"), "params")
        yield from self.facts()

    def facts(self) -> Iterator[Comparison]:
        """Learning rates, loss scale and skipped steps; bytes that are gathered."""
        yield from facts_told(self.trial, OPTIMIZERS[self.program.optimizer], self.era, self.taken.steps)
        for rank, copy in enumerate(self.trial.copies("held", self.era)):
            for name, held in copy.items():
                yield identical(self.trial.place(name, Part.GATHER, 0, rank), torch.zeros_like(held), held)


def summed_again(micros: Sequence[Sequence[Local]], ranks: int) -> list[list[Local]]:
    """What adds up to the gradient where every backward sums over the ranks what has been summed already."""
    factors = [float(ranks) ** (len(micros) - at) for at in range(len(micros))]
    return [row for factor, each in zip(factors, micros, strict=True) for row in times([each], factor)]


def times(micros: Sequence[Sequence[Local]], factor: float) -> list[list[Local]]:
    """The same with every gradient times ``factor``."""
    return [
        [replace(local, grads={name: factor * grad for name, grad in local.grads.items()}) for local in row]
        for row in micros
    ]


def updated(
    trial: Trial,
    spec: OptimizerSpec,
    grads: Means,
    era: int,
    taken: Taken,
    place: int,
    pending: Pending,
) -> Iterator[Comparison]:
    """Each parameter made the step that its own count of steps asks for; one without a gradient made none."""
    before, after = trial.copies("masters", era)[0], trial.copies("masters", era + 1)[0]
    kept, state = (unflatten(trial.copies("state", at)[0]) for at in (era, era + 1))
    check_names("full_params", before, after)
    for name, weight in before.items():
        here = trial.place(name, Part.OPTIMIZER, place)
        if name not in grads:
            yield identical(here, weight, after[name])
            yield from unmoved(trial, name, kept, state, place)
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
        # Of a gradient that nobody saw, and that is hardly larger than it may be wrong, Adam's step may be anything:
        # its square, by whose root that divides, may be zero for all that is known.
        error = expected.error
        if pending is Pending.UNSEEN:
            error = error.where(grads[name].error == 0, error.nan_to_num(nan=ENDLESS, posinf=ENDLESS))
        moved = expected.value - weight.double()
        yield hinted(within(here, expected.value, after[name], error, signal=moved), weight, after[name])


def unmoved(
    trial: Trial,
    name: str,
    kept: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Mapping[str, Tensor]],
    place: int,
) -> Iterator[Comparison]:
    """The state of a parameter that has no gradient is what it was."""
    for key, tensor in kept.get(name, {}).items():
        found = state.get(name, {}).get(key, torch.full_like(tensor, torch.nan))
        yield identical(trial.place(f"{name}/{key}", Part.OPTIMIZER, place), tensor, found)


def judge_program(trial: Trial, program: Program) -> Iterator[Comparison]:
    """Everything that ``program`` left to compare, in the order in which it happened."""
    judge = Judge(trial, program)
    yield from initial_weights(trial)
    yield from same_count(trial, unflatten(trial.copies("state")[0]), 0, 0)
    yield from judge.facts()
    for place, verb, book in played(program):
        for comparison in judge.judge(place, verb, book):
            yield at_verb(comparison, place)


def at_verb(comparison: Comparison, place: int) -> Comparison:
    """``comparison`` with the verb's place for its step, whatever number it was recorded under."""
    if comparison.mismatch is None:
        return comparison
    return replace(comparison, mismatch=replace(comparison.mismatch, step=place))
