"""The laws of parameters of every kind, and of what becomes of them after construction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import backward

from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step
from zharness.checks.play import Play, Scene, Side, Unused, check, gradients
from zharness.checks.trajectory import ADAMW, initial_weights
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, Feature, Reduction
from zharness.parity import Comparison, Part, Tier, identical

NEEDS = (Feature.PARAMETERS, Feature.TENSOR_BACKWARD)


def every_kind(side: Side) -> None:
    """Tied, frozen, unused, empty, tiny, uneven, transposed, used twice, read by attribute, of three dtypes."""
    backward(side.trained())


def branch(side: Side) -> None:
    """A branch that the first forward uses and the second does not, and one that only the second's loss reaches."""
    backward(side.loss(side.call(side.x(), branch=True)))
    side.zero_grad()
    backward(side.loss(side.call(side.x(2), branch=False), 2))


def frozen_and_unfrozen(side: Side) -> None:
    """What trains changes after construction, and changes again."""
    side.module.frozen.requires_grad_(True)
    side.module.twice.requires_grad_(False)
    backward(side.trained())
    side.module.twice.requires_grad_(True)
    side.module.tied.requires_grad_(False)
    backward(side.trained(2))
    side.module.tied.requires_grad_(True)


def outside_its_module(side: Side) -> None:
    """A weight read by attribute outside any forward, beside the ordinary loss and alone."""
    weight = side.module.first.weight
    backward(nn.functional.linear(side.x(), weight).sum() + weight.sum() + side.trained())
    backward(side.module.by_attribute.weight.sum())


def edited(side: Side) -> None:
    """Full weights edited between two micro-batches: by name and by attribute, as rank 0 does it."""
    backward(side.trained())
    with side.gathered(["first.weight", "by_attribute.weight", "twice.bias"]) as weights, torch.no_grad():
        weights["by_attribute.weight"].mul_(-1 if side.edits else 0)
        weights["twice.bias"].fill_(2 if side.edits else 7)
        side.module.first.weight[0].zero_()
    backward(side.trained(2))


def late_submodule(side: Side) -> None:
    """A submodule attached late that uses a parameter of the model; its own trains nobody."""
    late = nn.Linear(side.module.first.in_features, side.module.first.out_features, bias=False)
    late.weight = dict(side.module.named_parameters())["first.weight"]
    side.module.late = nn.Sequential(late, nn.ReLU())
    backward(side.module.late(side.x()).sum() + side.trained())
    del side.module.late


OTHERS = "others"


def used_on_some_ranks(side: Side) -> None:
    """One forward takes the branch on rank 0 alone, or on all others; the next on no rank; then training goes on."""
    with side.uneven():
        backward(side.loss(side.call(side.x(), branch=(side.rank == 0) != (side.variant == OTHERS))))
        backward(side.loss(side.call(side.x(2), branch=False), 2))


def sparse(side: Side) -> None:
    """Rows of a table that a rank looks up several times, and in more than one micro-batch; some rows never."""
    backward(side.trained())
    backward(side.trained(2))


# Whether each step uses the branch; None: a step without any backward before it.
IDLE = "idle"
BRANCHES: dict[str, tuple[bool | None, ...]] = {"": (True, False, True), IDLE: (True, None, True)}


def observe_stay_put(bench: Bench) -> None:
    engine = bench.engine(optimizer=ADAMW)
    steps_with_branches(bench, engine)


def observe_unfrozen(bench: Bench) -> None:
    engine = bench.engine(optimizer=ADAMW)
    for parameter in engine.module.frozen.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(True)
    steps_with_branches(bench, engine)


def steps_with_branches(bench: Bench, engine: Engine) -> None:
    """Steps of an engine, with everything recorded that ``judge_stay_put`` asks for."""
    for step, branch in enumerate(BRANCHES[bench.variant]):
        bench.record_trained(engine, step)
        batch = bench.batch(step)
        if branch is not None:
            engine.backward(bench.spec.loss(engine(batch.inputs, branch=branch), batch.target))
        bench.record("grads", engine.full_grads(), step)
        engine.step()
        engine.zero_grad()
    bench.record_trained(engine, len(BRANCHES[bench.variant]))
    engine.close()


def judge_stay_put(trial: Trial) -> Iterator[Comparison]:
    """The engine's own gradients decide how a used parameter moves; that they are right is other laws' matter.

    Which are used is asked of the plain model: an engine that reports zeros for the others still may not move them.
    """
    yield from steps_judged(trial, trial.baseline.module())


def judge_unfrozen(trial: Trial) -> Iterator[Comparison]:
    """The replay, and that there was a gradient to replay."""
    module: Any = trial.baseline.module()
    module.frozen.requires_grad_(True)
    yield from steps_judged(trial, module)
    moved = any(name.startswith("frozen.") for name in trial.copies("grads")[0])
    yield identical(trial.place("frozen", Part.LOCAL_GRADIENT), torch.tensor(1.0), torch.tensor(float(moved)))


def steps_judged(trial: Trial, module: nn.Module) -> Iterator[Comparison]:
    """Each step replayed for the parameters that some rank used; the others are what they were, bitwise.

    Each parameter has made as many steps as used it, and no more.
    """
    yield from initial_weights(trial)
    idle = dict.fromkeys(trial.baseline.names, 0)
    for step, branch in enumerate(BRANCHES[trial.variant]):
        used = set() if branch is None else used_by_any(trial, module, step, branch)
        grads = {name: grad for name, grad in trial.copies("grads", step)[0].items() if name in used}
        yield from judge_step(trial, ADAMW, grads, Moment(step, "masters", idle=idle))
        yield from everyone_agrees(trial, Moment(step + 1))
        idle = {name: steps + (name not in used) for name, steps in idle.items()}


def used_by_any(trial: Trial, module: nn.Module, step: int, branch: bool) -> set[str]:
    """Names of the plain model's parameters that get a gradient, be it of zeros, from some rank's micro-batch."""
    module.zero_grad()
    for rank in range(trial.world_size):
        batch = trial.baseline.batch(rank, step)
        backward(trial.baseline.spec.loss(module(batch.inputs, branch=branch), batch.target))
    return set(gradients(module))


def observe_deferred(bench: Bench) -> None:
    with torch.device("meta"):
        model = bench.spec.build()
    engine = bench.around(model)  # torch's generator is seeded as it is for the eager model
    bench.record("params", engine.full_params())
    engine.backward(bench.loss(engine, step=0))
    bench.record("grads", engine.full_grads())
    engine.close()


def judge_deferred(trial: Trial) -> Iterator[Comparison]:
    yield from initial_weights(trial)
    local = trial.locals(step=0)
    yield from trial.same_loss(0, local)
    yield from trial.reduced("grads", [local])


def parameter_law(
    play: Play,
    words: str,
    *needs: Feature,
    unused: Unused = Unused.CLAIMED,
    model: str = "changing",
    variants: tuple[str, ...] = ("",),
) -> Check:
    """The check of one play, by the mean where that is exact; other plays ask for the sum."""
    name, scene = play.__name__, Scene(play, unused=unused, reduction=Reduction.MEAN)
    spelled = tuple((variant, ()) for variant in variants)
    return check(f"parameters.{name}", words, scene, (*NEEDS, *needs), model, spelled)


CHECKS = (
    parameter_law(
        every_kind,
        "tied, frozen, empty, tiny, uneven, transposed, shared and mixed ones train as vanilla's",
        model="odd",
    ),
    parameter_law(
        branch,
        "a parameter that a step does not use has no gradient in it, whatever step before did",
        unused=Unused.NONE,
    ),
    parameter_law(frozen_and_unfrozen, "parameters may be frozen and unfrozen after construction", Feature.UNFREEZING),
    parameter_law(
        outside_its_module,
        "a weight that is read outside its module's forward gets that gradient too",
        Feature.OUTSIDE_FORWARD,
    ),
    parameter_law(
        used_on_some_ranks,
        "a parameter that only some ranks use, whichever they are, counts as zero on the others",
        variants=("", OTHERS),
    ),
    parameter_law(
        sparse,
        "the sparse gradient of a table, rows of which were looked up several times, is the sum over them",
        Feature.SPARSE_GRADIENTS,
        model="lookup",
    ),
    parameter_law(
        late_submodule, "a submodule that is attached late may use the model's parameters", Feature.OUTSIDE_FORWARD
    ),
    parameter_law(
        edited, "full weights may be edited between steps, as one rank does it, and every rank sees it", Feature.EDITS
    ),
    Check(
        name="parameters.stay_put",
        law="a parameter that a step does not use stays put in it, though AdamW would decay it, and so do its counts",
        tier=Tier.STAGED,
        models=("changing",),
        observe=observe_stay_put,
        judge=judge_stay_put,
        needs=(Feature.PARAMETERS, Feature.PARAM_GROUPS),
        integral=False,
        variants=(("", ()), (IDLE, ())),
        own_numbers=("", IDLE),
        dtypes=("fp32",),  # the model mixes dtypes of its own: its frozen layer stays in fp32, whatever the others are
    ),
    Check(
        name="parameters.unfrozen",
        law="a parameter that is unfrozen after construction is updated by the steps that follow",
        tier=Tier.STAGED,
        models=("odd",),
        observe=observe_unfrozen,
        judge=judge_unfrozen,
        needs=(Feature.PARAMETERS, Feature.PARAM_GROUPS, Feature.UNFREEZING),
        integral=False,
        own_numbers=("",),
        dtypes=("fp32",),  # as above
    ),
    Check(
        name="parameters.deferred",
        law="a model built on the meta device starts where rank 0's eager one does, and trains as it",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_deferred,
        judge=judge_deferred,
        needs=(Feature.DEFERRED,),
    ),
)
