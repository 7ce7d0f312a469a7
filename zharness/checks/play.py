"""Plays: what a caller does with a model, told once, played on the engine and on the plain model, and compared.

Every play is exact: weights, inputs and losses are integers over powers of two, gradients are summed over ranks, and
the judge plays it in float64 too. (Where an engine averages, a number of ranks that is a power of two keeps them exact,
and another is judged by the bound of the reduction.) Where both precisions agree bitwise no bit was rounded away, so
the engine has to agree bitwise as well, in whatever order it sums. After the play the engine takes a step that moves
nothing and trains one ordinary micro-batch: that has to come out right too, and nothing may stay gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.checks.accumulation import FROZEN
from zharness.checks.bench import Bench
from zharness.checks.given import Given, dense, gradients_given, in_entries, sum_of, taken_from
from zharness.checks.law import Check
from zharness.checks.trial import Trial
from zharness.engines.protocol import AccumulationOwner, Capabilities, Engine, Feature, Reduction
from zharness.errors import HarnessFault
from zharness.parity import Comparison, Part, Tier, identical
from zharness.parity.baseline import Baseline, Local
from zharness.parity.certificate import division_by, is_power_of_two
from zharness.workload import Batch, ModelSpec

AFTER = 1  # the micro-batch of the ordinary training after a play; plays use others


Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Side:
    """The engine, or the plain model, so that one play drives either. ``rank`` is this micro-batch's.

    ``uneven()`` is a block in which ranks may use other parameters than their peers, where an engine wants to be told.
    ``gathered(names)`` is one in which full weights may be edited by name; ``edits`` says whether this side's edits are
    to last: the plain model's do, and rank 0's. ``recompute`` is torch.utils.checkpoint.checkpoint on the engine, and
    just calls on the plain model: gradients have to be the same without it. ``other`` is a second engine (model) in the
    same initial weights, where the law asks for one.
    """

    call: Callable[..., Any]
    module: Any  # an nn.Module; its attributes are the model's own
    rank: int
    variant: str
    spec: ModelSpec
    draw: Callable[[int], Batch]
    backward: Callable[..., None]
    zero_grad: Callable[[], None]
    step: Callable[[], None]
    uneven: Callable[[], AbstractContextManager[Any]]
    gathered: Callable[[Sequence[str]], AbstractContextManager[Values]]
    edits: bool
    recompute: Callable[..., Any]
    other: Side | None = None

    def x(self, step: int = 0) -> Tensor:
        """The inputs of micro-step ``step``."""
        inputs: Tensor = self.draw(step).inputs
        return inputs

    def leaf(self, step: int = 0) -> Tensor:
        """The same, as a leaf that requires a gradient."""
        return self.x(step).clone().requires_grad_()

    def loss(self, output: Tensor, step: int = 0) -> Tensor:
        """The workload's loss of an output."""
        return self.spec.loss(output, self.draw(step).target)

    def trained(self, step: int = 0) -> Tensor:
        """Forward and loss of micro-step ``step``."""
        return self.loss(self.call(self.x(step)), step)


Play = Callable[[Side], Values | None]


def ordinary(side: Side) -> None:
    """One micro-batch, as anybody trains it."""
    side.backward(side.trained(AFTER))


class Unused(Enum):
    """What an engine may report as the gradient of a parameter that no rank used, of which vanilla has none."""

    CLAIMED = "none, as vanilla, where Feature.NO_GRADIENT is claimed; else zeros will do"
    NONE = "none, as vanilla, whatever is claimed"


@dataclass(frozen=True)
class Scene:
    """A play and its setting: how many engines it needs, and over how many micro-batches those divide gradients.

    An engine that leaves accumulation to its caller divides nothing.
    """

    play: Play
    engines: int = 1
    accumulation: int = 1
    unused: Unused = Unused.CLAIMED
    reduction: Reduction = Reduction.SUM


def reduced_by(wanted: Reduction, world_size: int, claims: Capabilities) -> Reduction:
    """Sum or mean, of what an engine claims the exact one: a mean of three is not, nor is a sum made of such means."""
    if claims.refusal(Feature.SUM) is not None:
        return Reduction.MEAN
    if is_power_of_two(world_size):
        return wanted
    return Reduction.MEAN if claims.scaled_sum else Reduction.SUM


def observing(scene: Scene) -> Callable[[Bench], None]:
    """Play on the engine, on every rank."""

    def observe(bench: Bench) -> None:
        owns = scene.accumulation > 1 and AccumulationOwner.ENGINE in bench.owners()
        owner = AccumulationOwner.ENGINE if owns else AccumulationOwner.CALLER
        divisor = scene.accumulation if owns else 1
        reduction = reduced_by(scene.reduction, bench.world_size, bench.capabilities)
        bench.record(reduction.value, {})
        engines = [
            bench.engine(
                optimizer=FROZEN,
                reduction=reduction,
                accumulation_steps=divisor,
                accumulation_owner=owner,
            )
            for _ in range(scene.engines)
        ]
        # The engine's own word, which an option may have changed.
        refused = engines[0].capabilities.refusal(Feature.NO_GRADIENT) is not None
        zeros = scene.unused is Unused.CLAIMED and refused
        bench.record("setting", {"divisor": torch.tensor(divisor), "zeros": torch.tensor(zeros)})
        side: Side | None = None
        for engine in reversed(engines):
            side = of_engine(bench, engine, side)
        assert side is not None
        bench.record("values", scene.play(side) or {})
        for number, engine in enumerate(engines):
            bench.record("grads", engine.full_grads(), number)
            engine.step()
            engine.zero_grad()
            ordinary(of_engine(bench, engine, None))
            bench.record("after", engine.full_grads(), number)
            held = engine.observe().gathered_bytes
            bench.record("held", {"gathered_bytes": torch.tensor(held)} if isinstance(held, int) else {}, number)
        for engine in engines:
            engine.close()

    return observe


def of_engine(bench: Bench, engine: Engine, other: Side | None) -> Side:
    return Side(
        call=engine,
        module=engine.module,
        rank=bench.rank,
        variant=bench.variant,
        spec=bench.spec,
        draw=bench.batch,
        backward=engine.backward,
        zero_grad=engine.zero_grad,
        step=engine.step,
        uneven=getattr(engine, "uneven", nullcontext),
        gathered=getattr(engine, "gathered", lambda names: nullcontext(plain_weights(engine.module, names))),
        edits=bench.rank == 0,
        recompute=checkpoint,
        other=other,
    )


def of_plain(baseline: Baseline, variant: str, rank: int, dtype: torch.dtype, other: Side | None) -> Side:
    module = baseline.module().to(dtype)

    def draw(step: int) -> Batch:
        batch = baseline.batch(rank, step)
        return Batch(batch.inputs.to(dtype), batch.target.to(dtype))

    def backward(loss: Tensor, *, retain_graph: bool = False) -> None:
        torch.autograd.backward(loss, retain_graph=retain_graph)

    @torch.no_grad()
    def step() -> None:
        """A step that moves nothing: what it leaves behind is that the weights were written."""
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(torch.zeros_like(parameter))

    def recompute(function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
        return function(*args)

    return Side(
        call=module,
        module=module,
        rank=rank,
        variant=variant,
        spec=baseline.spec,
        draw=draw,
        backward=backward,
        zero_grad=module.zero_grad,
        step=step,
        uneven=nullcontext,
        gathered=lambda names: nullcontext(plain_weights(module, names)),
        edits=True,
        recompute=recompute,
        other=other,
    )


def plain_weights(module: nn.Module, names: Sequence[str]) -> Values:
    weights = dict(module.named_parameters())
    return {name: weights[name].detach() for name in names}


@dataclass(frozen=True)
class Played:
    """What a play on the plain model leaves: values, each model's gradients, and those of the training after it.

    ``given`` is what each backward that reached a parameter gave it, in their order, each by its entries: a sparse one
    has several of a row, a dense one is its only one. The last backward's are all that is left of its gradient in an
    engine that drops the others, which is worth a hint. ``given_after`` is the same of the training after it.
    """

    values: Values
    grads: tuple[Values, ...]
    after: tuple[Values, ...]
    given: tuple[Given, ...]
    given_after: tuple[Given, ...]

    def flat(self) -> dict[str, Tensor]:
        """Everything, by a name of its own."""
        parts = [self.values, *self.grads, *self.after]
        return {f"{number}/{name}": tensor for number, part in enumerate(parts) for name, tensor in part.items()}


def play_plain(baseline: Baseline, variant: str, scene: Scene, rank: int, dtype: torch.dtype) -> Played:
    sides: list[Side] = []
    for _ in range(scene.engines):
        sides.insert(0, of_plain(baseline, variant, rank, dtype, sides[0] if sides else None))
    watched = [gradients_given(side.module) for side in sides]
    values = {name: tensor.detach() for name, tensor in (scene.play(sides[0]) or {}).items()}
    given = tuple(taken_from(each) for each in watched)
    grads, after = [], []
    for side in sides:
        grads.append(gradients(side.module))
        side.zero_grad()
        ordinary(side)
        after.append(gradients(side.module))
    return Played(values, tuple(grads), tuple(after), given, tuple(taken_from(each) for each in watched))


def gradients(module: nn.Module) -> Values:
    return {name: dense(p.grad) for name, p in module.named_parameters() if p.grad is not None}


@lru_cache(maxsize=1024)
def played_exactly(baseline: Baseline, variant: str, scene: Scene, rank: int, dtype: torch.dtype) -> Played:
    """The play in the cell's dtype. Raises HarnessFault when float64 says that a bit was rounded away.

    The same for every engine and stage, so a process plays it once; what it holds is some 20 KB.
    """
    played, wide = (play_plain(baseline, variant, scene, rank, each) for each in (dtype, torch.float64))
    double = wide.flat()
    for name, tensor in played.flat().items():
        if not torch.equal(tensor.double(), double[name].double()):
            raise HarnessFault(f"the play is not exact: {name} is rounded on rank {rank}, so it can judge no engine")
    return played


def judging(scene: Scene) -> Callable[[Trial], Iterator[Comparison]]:
    """Values bitwise on each rank; gradients the exact sum over ranks; the training after it likewise."""

    def judge(trial: Trial) -> Iterator[Comparison]:
        everyone = played_by_all(trial, scene)
        yield from trial.same_value("values", [played.values for played in everyone])
        for number in range(scene.engines):
            yield from same_gradients(trial, everyone, "grads", number)
            yield from left_behind(trial, everyone, number)

    return judge


def played_by_all(trial: Trial, scene: Scene) -> list[Played]:
    """What the play leaves on every rank's plain model, in rank order."""
    return [played_exactly(trial.baseline, trial.variant, scene, rank, trial.dtype) for rank in range(trial.world_size)]


def same_gradients(trial: Trial, everyone: Sequence[Played], label: str, number: int) -> Iterator[Comparison]:
    """The gradients that an engine recorded under ``label`` are the exact sum, or the mean, over ranks."""
    summed, setting = trial.recorded(Reduction.SUM.value), trial.copies("setting")[0]
    scale = (trial.world_size if summed else 1) / int(setting["divisor"])
    exact = summed or division_by(trial.world_size)
    found = [getattr(played, label)[number] for played in everyone]
    if setting["zeros"]:
        found = [{**unused(trial, label, number), **grads} for grads in found]
    suspects = of_one_backward(everyone, number, scale) if label == "grads" else {}
    given = [(played.given if label == "grads" else played.given_after)[number] for played in everyone]
    whole = exact or (label == "after" and not any(in_entries(each) for each in given))
    rows = [found] if whole else terms(found, given)
    micros = [[Local(torch.zeros(()), grads) for grads in row] for row in rows]
    yield from trial.reduced(label, micros, number, exact, scale * len(rows), suspects)


def left_behind(trial: Trial, everyone: Sequence[Played], number: int) -> Iterator[Comparison]:
    """The training after a play is as ever, and nothing stays gathered."""
    yield from same_gradients(trial, everyone, "after", number)
    for rank, held in enumerate(trial.copies("held", number)):
        for name, count in held.items():
            yield identical(trial.place(name, Part.GATHER, number, rank), torch.zeros_like(count), count)


def terms(found: Sequence[Values], given: Sequence[Given]) -> list[list[Values]]:
    """Rows, each with one gradient for every rank, whose sum is ``found``: one row for each entry of each backward.

    An engine may reduce, and round, each by itself, so it is their sizes that bound the error: the sum of large ones
    may be small. What a play has zeroed meanwhile is taken off again in a row of its own.
    """
    parts = [{name: [part for grad in grads for part in grad] for name, grads in each.items()} for each in given]
    most = max((len(grads) for each in parts for grads in each.values()), default=0)
    rows: list[list[Values]] = [[] for _ in range(most + 1)]
    for whole, each in zip(found, parts, strict=True):
        for at, row in enumerate(rows[:most]):
            row.append({name: grads[at] for name, grads in each.items() if at < len(grads) and name in whole})
        kept = {name: sum(each.get(name, ()), torch.zeros_like(grad)) for name, grad in whole.items()}
        rows[most].append({name: grad - kept[name] for name, grad in whole.items()})
    return rows


def of_one_backward(everyone: Sequence[Played], number: int, scale: float) -> Mapping[str, Sequence[Sequence[Local]]]:
    """What is left where an engine keeps one of several backwards, or drops one: the gradients to recognise it by."""
    alone, without = [], []
    for played in everyone:
        last = {name: scale * sum_of(grads[-1]) for name, grads in played.given[number].items()}
        grads = played.grads[number]
        alone.append(Local(torch.zeros(()), last))
        rest = {name: scale * grad - last[name] for name, grad in grads.items() if name in last}
        # Nothing but zeros is left where only one backward reached a parameter: then none was dropped of several.
        without.append(Local(torch.zeros(()), {name: grad for name, grad in rest.items() if bool(grad.any())}))
    return {"the gradient of the last backward alone": [alone], "the gradient without the last backward": [without]}


def unused(trial: Trial, label: str, number: int) -> Values:
    """Zeros for every trained parameter that rank 0 reports a gradient of: what it has to be where no rank used it."""
    reported = trial.copies(label, number)[0]
    parameters = trial.baseline.module().named_parameters()
    return {name: torch.zeros_like(p) for name, p in parameters if p.requires_grad and name in reported}


def check(
    name: str,
    law: str,
    scene: Scene,
    needs: tuple[Feature, ...],
    model: str = "blocks",
    variants: tuple[tuple[str, tuple[Feature, ...]], ...] = (("", ()),),
) -> Check:
    """The check of one play."""
    return Check(
        name=name,
        law=law,
        tier=Tier.EXACT,
        models=(model,),
        observe=observing(scene),
        judge=judging(scene),
        needs=needs,
        variants=variants,
        dtypes=("fp32",),  # its models mix dtypes of their own, and hold more than a narrow significand does
    )
