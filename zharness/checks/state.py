"""The laws of saved state: resumed, resharded, consolidated."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.checks.bench import Bench
from zharness.checks.law import Check
from zharness.checks.optimizer_step import Moment, everyone_agrees, judge_step, published
from zharness.checks.single_step import evaluating
from zharness.checks.switches import left_alone, switches
from zharness.checks.trajectory import TRAINED_BY, told_by
from zharness.checks.trial import Trial
from zharness.engines.protocol import Engine, Feature, Keeping, OptimizerSpec
from zharness.parity import Comparison, Part, Tier, identical
from zharness.parity.compare import check_names

SAVED_AT = 2  # steps
CONTINUED = range(SAVED_AT, SAVED_AT + 2)
RESHARDED = TRAINED_BY["adamw"]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that every rank sees, gone afterwards. Collective."""
    told = [tempfile.mkdtemp(prefix="zharness-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told)
    try:
        yield Path(told[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(told[0], ignore_errors=True)


def train(bench: Bench, engine: Engine, steps: range, label: str) -> None:
    """One optimizer step for each of ``steps``; ``label`` sets the records apart."""
    for step in steps:
        engine.backward(bench.loss(engine, step, f"loss-{label}"))
        engine.step()
        engine.zero_grad()


def evaluate(bench: Bench, engine: Engine, label: str) -> None:
    """A forward in eval mode, without gradient."""
    with evaluating(engine), torch.no_grad():
        bench.loss(engine, SAVED_AT, f"evaluated-{label}")


def snapshot(bench: Bench, engine: Engine, step: int, label: str) -> None:
    """Weights, as the model and as the optimizer has them, optimizer state and facts, under labels of their own."""
    bench.record_trained(engine, step, f"-{label}")
    bench.record(f"told-{label}", told_by(engine), step)


IDLE = 3  # elements
FALLING = (1.0, 0.5, 0.25, 0.125, 0.0625)  # a factor of its own for every step, and for one more


def counting(bench: Bench, optimizer: OptimizerSpec) -> Engine:
    """An engine around a model with a buffer, and in variant "idle" with a parameter that nothing uses."""
    model = bench.spec.model(bench.seed)
    model.register_buffer("seen", torch.zeros(()))
    if bench.variant == "idle":
        model.register_parameter("idle", nn.Parameter(torch.ones(IDLE)))
    return bench.around(model, optimizer=optimizer)


def observe_resume(bench: Bench) -> None:
    own = bench.variant == "buffers"  # as running statistics are, each rank's own
    optimizer = replace(TRAINED_BY.get(bench.variant, RESHARDED), schedule=FALLING)
    never, resumed = counting(bench, optimizer), counting(bench, optimizer)
    train(bench, never, range(SAVED_AT), "before")
    train(bench, resumed, range(CONTINUED.stop, CONTINUED.stop + 1), "forgotten")
    evaluate(bench, resumed, "forgotten")
    # Another tensor under the same name, as a forward leaves that computes a statistic anew.
    never.module.seen = torch.full_like(cast(Tensor, never.module.seen), 1 + bench.rank * own)
    snapshot(bench, never, SAVED_AT, "unsaved")
    with shared_folder() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(bench.rank)
        bench.record("switches", switches(), 0)
        never.save(folder)
        bench.record("switches", switches(), 1)
        resumed.load(folder)
        bench.record("switches", switches(), 2)
    for engine, label in ((never, "never"), (resumed, "resumed")):
        bench.record(f"buffers-{label}", dict(engine.module.named_buffers()))
        evaluate(bench, engine, label)
        for step in CONTINUED:
            snapshot(bench, engine, step, label)
            train(bench, engine, range(step, step + 1), label)
        snapshot(bench, engine, CONTINUED.stop, label)
        engine.close()


def judge_resume(trial: Trial) -> Iterator[Comparison]:
    """The resumed engine's loss, weights and state are bitwise those of the one that never stopped, on every rank.

    So are the buffers; and neither saving nor loading takes a number from the generator that the training goes on to
    use. Saving leaves the engine that saves as it was. The first forward after the load evaluates, as the last before
    it did: with the weights that were loaded.
    """
    yield from left_alone(trial, "switches", range(3))
    yield from same_records(trial, "buffers-never", "buffers-resumed", 0, 0, Part.GATHER)
    yield from same_records(trial, "evaluated-never", "evaluated-resumed", SAVED_AT, SAVED_AT, Part.FORWARD)
    for what in ("params", "masters", "state", "told"):
        yield from same_records(trial, f"{what}-unsaved", f"{what}-never", SAVED_AT, SAVED_AT, Part.OPTIMIZER)
    parts = {"params": Part.OPTIMIZER, "masters": Part.OPTIMIZER, "state": Part.OPTIMIZER, "loss": Part.FORWARD}
    parts["told"] = Part.OPTIMIZER
    for step in (*CONTINUED, CONTINUED.stop):
        for what, part in parts.items():
            if what == "loss" and step == CONTINUED.stop:
                continue
            place = Part.GATHER if step == SAVED_AT and what == "params" else part
            yield from same_records(trial, f"{what}-never", f"{what}-resumed", step, step, place)
    yield from everyone_agrees(trial, Moment(CONTINUED.stop, "params-resumed", "state-resumed"))


def same_records(trial: Trial, wanted: str, got: str, at: int, step: int, part: Part) -> Iterator[Comparison]:
    """What every rank recorded under ``got`` at ``step`` is bitwise what it recorded under ``wanted`` at ``at``."""
    pairs = zip(trial.copies(wanted, at), trial.copies(got, step), strict=True)
    for rank, (expected, found) in enumerate(pairs):
        check_names(f"what a rank reports as {got}", expected, found)
        for name, tensor in expected.items():
            yield identical(trial.place(name, part, step, rank), tensor, found[name])


def observe_reshard(bench: Bench) -> None:
    source = bench.engine(optimizer=RESHARDED)
    train(bench, source, range(SAVED_AT), "before")
    snapshot(bench, source, SAVED_AT, "saved")
    with shared_folder() as folder:
        source.save(folder)
        source.close()
        for stage in sorted(bench.capabilities.stages):
            target = bench.engine(stage=stage, optimizer=RESHARDED)
            target.load(folder)
            continue_once(bench, target, f"stage{stage}")
            target.close()


def continue_once(bench: Bench, engine: Engine, label: str) -> None:
    """Weights and state as they were loaded, one step, and what became of them."""
    snapshot(bench, engine, SAVED_AT, label)
    engine.backward(bench.loss(engine, SAVED_AT, f"loss-{label}"))
    bench.record(f"grads-{label}", engine.full_grads(), SAVED_AT)
    engine.step()
    snapshot(bench, engine, SAVED_AT + 1, label)


def judge_reshard(trial: Trial) -> Iterator[Comparison]:
    """Each stage reads what was saved, bitwise, and its next step is vanilla's from there."""
    for label in (f"stage{stage}" for stage in range(4)):
        if trial.recorded(f"params-{label}"):
            for weights in ("params", "masters"):
                yield from same_records(
                    trial, f"{weights}-saved", f"{weights}-{label}", SAVED_AT, SAVED_AT, Part.GATHER
                )
            yield from same_records(trial, "state-saved", f"state-{label}", SAVED_AT, SAVED_AT, Part.OPTIMIZER)
            yield from judge_continued(trial, label)


def judge_continued(trial: Trial, label: str) -> Iterator[Comparison]:
    """The step recorded by ``continue_once`` is vanilla's, from the engine's own numbers."""
    local = trial.locals(SAVED_AT, trial.copies(f"params-{label}", SAVED_AT)[0])
    yield from trial.same_loss(SAVED_AT, local, f"loss-{label}")
    yield from trial.reduced(f"grads-{label}", [local], SAVED_AT)
    moment = Moment(SAVED_AT, f"masters-{label}", f"state-{label}")
    yield from judge_step(trial, RESHARDED, trial.copies(f"grads-{label}", SAVED_AT)[0], moment)
    after = Moment(SAVED_AT + 1, moment.params, moment.state)
    yield from everyone_agrees(trial, after)
    yield from published(trial, after, f"params-{label}")


def observe_consolidate(bench: Bench) -> None:
    engine = bench.engine(optimizer=RESHARDED)
    train(bench, engine, range(1), "before")
    bench.record_weights(engine, step=0)
    full = cast(Keeping, engine).full_state_dict()
    bench.record("full", full)
    bench.record("tied", first_names(full))
    for tensor in full.values():
        tensor.zero_()  # it is the caller's: the engine trains on in its own weights
    bench.loss(engine, 1)
    engine.close()


def first_names(state: dict[str, Any]) -> dict[str, Tensor]:
    """For each name the place of the first one that holds the same memory."""
    places: dict[int, int] = {}
    return {
        name: torch.tensor(float(places.setdefault(tensor.data_ptr() if tensor.numel() else -place - 1, place)))
        for place, (name, tensor) in enumerate(state.items())
    }


def judge_consolidate(trial: Trial) -> Iterator[Comparison]:
    """Vanilla's names, shapes and tied weights, the engine's own values; a plain model with them computes its loss."""
    plain = trial.baseline.module().state_dict()
    for rank, full in enumerate(trial.copies("full")):
        check_names("full_state_dict", plain, full)
        # Weights of a narrow dtype may be kept as the optimizer has them, which a model in that dtype rounds again.
        params, masters = trial.copies("params")[rank], trial.copies("masters")[rank]
        for name, tensor in plain.items():
            place = trial.place(name, Part.GATHER, seen_on=rank)
            yield identical(place, torch.zeros(tensor.shape), torch.zeros(full[name].shape))
            if name in params:
                held = params if full[name].dtype == params[name].dtype else masters
                yield identical(place, held[name], full[name])
        for name, first in first_names(plain).items():
            yield identical(trial.place(name, Part.GATHER, seen_on=rank), first, trial.copies("tied")[rank][name])
        module = trial.baseline.module()
        module.load_state_dict(dict(full))
        batch = trial.baseline.batch(rank, 1)
        loss = trial.baseline.objective(trial.baseline.output(module, batch), batch).detach()
        yield identical(trial.place("loss", Part.FORWARD, 1, rank), loss, trial.copies("loss", 1)[rank]["loss"])


CHECKS = (
    Check(
        name="state.resume",
        law="save, load into another engine, continue: bitwise the engine that never stopped",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_resume,
        judge=judge_resume,
        needs=(Feature.CHECKPOINT, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
        variants=(("adamw", ()), ("sgd", ()), ("buffers", (Feature.RANK_BUFFERS,)), ("idle", (Feature.NO_GRADIENT,))),
        own_numbers=("adamw", "sgd", "buffers", "idle"),
        any_model=("adamw",),
    ),
    Check(
        name="state.reshard",
        law="what one stage saved every other stage loads, bitwise, and its next step is vanilla's",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_reshard,
        judge=judge_reshard,
        needs=(Feature.CHECKPOINT, Feature.RESHARD, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        integral=False,
    ),
    Check(
        name="state.consolidate",
        law="the full state dict has vanilla's names and shapes and tied weights once, and a plain model loads it",
        tier=Tier.EXACT,
        models=("transformer", "mixed"),
        observe=observe_consolidate,
        judge=judge_consolidate,
        needs=(Feature.CHECKPOINT,),
        integral=False,
        any_model=("",),
    ),
)
