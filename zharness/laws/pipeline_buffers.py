"""Define the law pipeline.buffers: each forward of a micro-batch changes the buffers of the stage once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature
from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.laws.mesh_buffers import COUNT, SUM, add_buffers
from zharness.laws.pipeline import (
    DEFAULT_SHAPE,
    MICRO_BATCHES,
    SCHEDULES,
    SINGLE,
    BatchShape,
    pipeline_law,
    select_schedule,
    train_batch,
)
from zharness.mesh import PIPELINE, TENSOR
from zharness.parity import Comparison, Part, compare_bitwise

FIRST, EVALUATED, LOADED = "first", "evaluated", "loaded"
EARLIER, SAVED, LOST, LATER = 3, 0, 1, 2  # the numbers of batches
EVALUATED_BLOCK = "blocks.2"  # in the last stage


@dataclass(frozen=True)
class Training:
    """The schedule, whether a batch ran before, the blocks in evaluation mode, and the size of a batch.

    Some schedules run extra forwards before their first batch to infer shapes.
    """

    schedule: str = ""
    begun: bool = True
    evaluated: tuple[str, ...] = ()
    shape: BatchShape = DEFAULT_SHAPE
    features: tuple[Feature, ...] = field(default=())


TRAININGS: Mapping[str, Training] = {
    **{name: Training(name) for name in SCHEDULES},
    FIRST: Training(begun=False),
    EVALUATED: Training(evaluated=(EVALUATED_BLOCK,), shape=SINGLE),
    LOADED: Training(shape=SINGLE, features=(Feature.CHECKPOINT,)),
}


def prepare_model(model: nn.Module, plan: tuple[str, ...]) -> nn.Module:
    """Give each block of ``model`` buffers that its forwards change, and return the model."""
    for name in plan:
        add_buffers(model.get_submodule(name))
    return model


def evaluate_blocks(model: nn.Module, training: Training) -> None:
    """Put the training's evaluated blocks into evaluation mode, as users do to freeze batch norms."""
    for name in training.evaluated:
        model.get_submodule(name).eval()


def observe_buffers(ctx: RankContext) -> None:
    """Run a batch and record the buffers of this rank's stages; then save, run a batch, load, and run another batch."""
    training = TRAININGS[ctx.variant]
    model = prepare_model(ctx.spec.model(ctx.seed), ctx.spec.pp_plan)
    engine = ctx.build_engine_around(model, optimizer=ZERO_LR_SGD, options=select_schedule(training.schedule))
    own = find_own_blocks(ctx, engine)
    if training.begun:
        run_batch(ctx, engine, EARLIER, training)
        zero_buffers(model)
    run_batch(ctx, engine, SAVED, training)
    ctx.record("buffers", read_buffers(model, own), SAVED)
    if ctx.variant == LOADED:
        with shared_folder() as folder:
            engine.save(folder)
            run_batch(ctx, engine, LOST, training)
            engine.load(folder)
        ctx.record("loaded", read_buffers(model, own))
        run_batch(ctx, engine, LATER, training)
        ctx.record("buffers", read_buffers(model, own), LATER)
    engine.close()


def run_batch(ctx: RankContext, engine: Engine, number: int, training: Training) -> None:
    """Run batch ``number`` and a step, which moves no weight."""
    evaluate_blocks(engine.module, training)
    train_batch(ctx, engine, number, training.shape)
    engine.step()
    engine.zero_grad()


def find_own_blocks(ctx: RankContext, engine: Engine) -> list[str]:
    """Return the blocks whose weights are owned by ranks with this rank's coordinate on pp."""
    stage = ctx.config.mesh.coordinates(ctx.rank, ctx.world_size)[PIPELINE]
    owners = {
        name: {ctx.config.mesh.coordinates(piece.rank, ctx.world_size)[PIPELINE] for piece in pieces}
        for name, pieces in engine.layout().items()
    }
    return [block for block in ctx.spec.pp_plan if stage in owners[f"{block}.linear.weight"]]


def zero_buffers(model: nn.Module) -> None:
    """Set the buffers to 0, their value before the first batch."""
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()


def read_buffers(model: nn.Module, blocks: list[str]) -> dict[str, Tensor]:
    """Return copies of the buffers of ``blocks``."""
    names = [f"{block}.{name}" for block in blocks for name in (SUM, COUNT)]
    return {name: model.get_buffer(name).clone() for name in names}


def judge_buffers(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the buffers with plain PyTorch's after the same micro-batches, and check each block's owner.

    If the engine does not claim that ranks save their own buffers, a load may give a rank the buffers of another rank
    that holds the same stages.
    """
    yield from judge_owners(ctx)
    plain = [count_plain(ctx, at, SAVED, {}) for at in range(ctx.data_size)]
    yield from compare_buffers(ctx, SAVED, [plain[ctx.data_coordinate(rank)] for rank in range(ctx.world_size)])
    if ctx.variant != LOADED:
        return
    loaded = ctx.rank_records("loaded")
    for rank, record in enumerate(loaded):
        for name, buffer in record.items():
            wanted = choose_saved(ctx, rank, [values[name] for values in plain], buffer)
            hint = "a load gave the buffer another value than it had in the save"
            yield add_hint(compare_bitwise(ctx.location(name, Part.GATHER, LATER, rank), wanted, buffer), hint)
    later = [count_plain(ctx, ctx.data_coordinate(rank), LATER, record) for rank, record in enumerate(loaded)]
    yield from compare_buffers(ctx, LATER, later)


def judge_owners(ctx: JudgeContext) -> Iterator[Comparison]:
    """Check with ``layout()`` that in each pipeline one rank of pp, with all its tp ranks, owns each block."""
    for at in range(ctx.data_size):
        ranks = ctx.mesh.list_ranks(at, ctx.world_size)
        for block in ctx.baseline.spec.pp_plan:
            owners = [rank for rank in ranks if f"{block}.{SUM}" in ctx.rank_records("buffers", SAVED)[rank]]
            place = ctx.location(f"owners of {block}", Part.FORWARD, 0, (owners or ranks)[0])
            hint = f"by layout(), the ranks {owners} of one pipeline own this block"
            yield add_hint(compare_bitwise(place, scalar(ctx.mesh.size(TENSOR)), scalar(len(owners))), hint)


def compare_buffers(ctx: JudgeContext, number: int, wanted: Sequence[Mapping[str, Tensor]]) -> Iterator[Comparison]:
    """Compare the buffers after batch ``number`` bitwise with ``wanted[rank]``."""
    for rank, record in enumerate(ctx.rank_records("buffers", number)):
        for name, buffer in record.items():
            block = name.rpartition(".")[0]
            found, plain = (int(values[f"{block}.{COUNT}"]) for values in (record, wanted[rank]))
            place = ctx.location(name, Part.FORWARD, number, rank)
            hint = f"this block counted {found} forwards, and {plain} in plain PyTorch"
            yield add_hint(compare_bitwise(place, wanted[rank][name], buffer), hint)


def choose_saved(ctx: JudgeContext, rank: int, saved: list[Tensor], loaded: Tensor) -> Tensor:
    """Return the value that a rank must have after a load: its own, or another data coordinate's if that was loaded."""
    if ctx.claims.refusal(Feature.RANK_BUFFERS) is not None:
        for value in saved:
            if torch.equal(value, loaded):
                return value
    return saved[ctx.data_coordinate(rank)]


def count_plain(ctx: JudgeContext, at: int, number: int, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the plain model's buffers after batch ``number``, starting from ``start``, or from 0 if it is empty."""
    training, plan = TRAININGS[ctx.variant], ctx.baseline.spec.pp_plan
    model = prepare_model(ctx.baseline.build_module(), plan)
    evaluate_blocks(model, training)
    with torch.no_grad():
        for name, value in start.items():
            model.get_buffer(name).copy_(value)
        for index in range(training.shape.micro_batches):
            ctx.baseline.batch(at, number * MICRO_BATCHES + index).feed(model)
    return read_buffers(model, list(plan))


LAWS = (
    pipeline_law(
        "buffers",
        "each micro-batch changes the buffers of blocks in training mode once in each stage, and a load restores them",
        observe_buffers,
        judge_buffers,
        tuple(
            Variant(
                name,
                training.features,
                schedules=tuple(filter(None, (training.schedule,))),
                micro_batches=training.shape.micro_batches,
            )
            for name, training in TRAININGS.items()
        ),
        models=("chain",),
        kept_because="the only law of a pipeline with a buffer that forwards change, as in batch norm",
    ),
)
