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

from zharness.engines.protocol import Engine, Feature, OptimizerSpec, require_full_state_dict
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.process_state import compare_process_state, read_process_state
from zharness.law_kit.rank_context import RankContext
from zharness.laws.training_sgd_step import eval_mode
from zharness.laws.training_trajectory import TRAJECTORY_OPTIMIZERS, collect_engine_facts
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.parity.compare import check_names

SAVE_STEP = 2  # steps
CONTINUED_STEPS = range(SAVE_STEP, SAVE_STEP + 2)
RESHARD_OPTIMIZER = TRAJECTORY_OPTIMIZERS["adamw"]


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


def train_steps(ctx: RankContext, engine: Engine, steps: range, label: str) -> None:
    """One optimizer step for each of ``steps``; ``label`` sets the records apart."""
    for step in steps:
        engine.backward(ctx.loss(engine, step, f"loss-{label}"))
        engine.step()
        engine.zero_grad()


def run_eval_forward(ctx: RankContext, engine: Engine, label: str) -> None:
    """A forward in eval mode, without gradient."""
    with eval_mode(engine), torch.no_grad():
        ctx.loss(engine, SAVE_STEP, f"evaluated-{label}")


def record_snapshot(ctx: RankContext, engine: Engine, step: int, label: str) -> None:
    """Weights, as the model and as the optimizer has them, optimizer state and facts, under labels of their own."""
    ctx.record_training_state(engine, step, f"-{label}")
    ctx.record(f"told-{label}", collect_engine_facts(engine), step)


IDLE_NUMEL = 3  # elements
FALLING_SCHEDULE = (1.0, 0.5, 0.25, 0.125, 0.0625)  # a factor of its own for every step, and for one more


def build_engine_with_buffer(ctx: RankContext, optimizer: OptimizerSpec) -> Engine:
    """An engine around a model with a buffer, and in variant "idle" with a parameter that nothing uses."""
    model = ctx.spec.model(ctx.seed)
    model.register_buffer("seen", torch.zeros(()))
    if ctx.variant == "idle":
        model.register_parameter("idle", nn.Parameter(torch.ones(IDLE_NUMEL)))
    return ctx.build_engine_around(model, optimizer=optimizer)


def observe_resume(ctx: RankContext) -> None:
    own = ctx.variant == "buffers"  # as running statistics are, each rank's own
    optimizer = replace(TRAJECTORY_OPTIMIZERS.get(ctx.variant, RESHARD_OPTIMIZER), schedule=FALLING_SCHEDULE)
    never, resumed = build_engine_with_buffer(ctx, optimizer), build_engine_with_buffer(ctx, optimizer)
    train_steps(ctx, never, range(SAVE_STEP), "before")
    train_steps(ctx, resumed, range(CONTINUED_STEPS.stop, CONTINUED_STEPS.stop + 1), "forgotten")
    run_eval_forward(ctx, resumed, "forgotten")
    # Another tensor under the same name, as a forward leaves that computes a statistic anew.
    never.module.seen = torch.full_like(cast(Tensor, never.module.seen), 1 + ctx.rank * own)
    record_snapshot(ctx, never, SAVE_STEP, "unsaved")
    with shared_folder() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.rank)
        ctx.record("switches", read_process_state(), 0)
        never.save(folder)
        ctx.record("switches", read_process_state(), 1)
        resumed.load(folder)
        ctx.record("switches", read_process_state(), 2)
    for engine, label in ((never, "never"), (resumed, "resumed")):
        ctx.record(f"buffers-{label}", dict(engine.module.named_buffers()))
        run_eval_forward(ctx, engine, label)
        for step in CONTINUED_STEPS:
            record_snapshot(ctx, engine, step, label)
            train_steps(ctx, engine, range(step, step + 1), label)
        record_snapshot(ctx, engine, CONTINUED_STEPS.stop, label)
        engine.close()


def judge_resume(ctx: JudgeContext) -> Iterator[Comparison]:
    """The resumed engine's loss, weights and state are bitwise those of the one that never stopped, on every rank.

    So are the buffers; and neither saving nor loading takes a number from the generator that the training goes on to
    use. Saving leaves the engine that saves as it was. The first forward after the load evaluates, as the last before
    it did: with the weights that were loaded.
    """
    yield from compare_process_state(ctx, "switches", range(3))
    yield from compare_records(ctx, "buffers-never", "buffers-resumed", 0, 0, Part.GATHER)
    yield from compare_records(ctx, "evaluated-never", "evaluated-resumed", SAVE_STEP, SAVE_STEP, Part.FORWARD)
    for what in ("params", "masters", "state", "told"):
        yield from compare_records(ctx, f"{what}-unsaved", f"{what}-never", SAVE_STEP, SAVE_STEP, Part.OPTIMIZER)
    parts = {"params": Part.OPTIMIZER, "masters": Part.OPTIMIZER, "state": Part.OPTIMIZER, "loss": Part.FORWARD}
    parts["told"] = Part.OPTIMIZER
    for step in (*CONTINUED_STEPS, CONTINUED_STEPS.stop):
        for what, part in parts.items():
            if what == "loss" and step == CONTINUED_STEPS.stop:
                continue
            place = Part.GATHER if step == SAVE_STEP and what == "params" else part
            yield from compare_records(ctx, f"{what}-never", f"{what}-resumed", step, step, place)
    yield from compare_ranks_after_step(ctx, RecordedStep(CONTINUED_STEPS.stop, "params-resumed", "state-resumed"))


def compare_records(
    ctx: JudgeContext, expected_label: str, actual_label: str, expected_step: int, step: int, part: Part
) -> Iterator[Comparison]:
    """What every rank recorded under ``got`` at ``step`` is bitwise what it recorded under ``wanted`` at ``at``."""
    pairs = zip(ctx.rank_records(expected_label, expected_step), ctx.rank_records(actual_label, step), strict=True)
    for rank, (expected, found) in enumerate(pairs):
        check_names(f"what a rank reports as {actual_label}", expected, found)
        for name, tensor in expected.items():
            yield compare_bitwise(ctx.location(name, part, step, rank), tensor, found[name])


def observe_reshard(ctx: RankContext) -> None:
    source = ctx.build_engine(optimizer=RESHARD_OPTIMIZER)
    train_steps(ctx, source, range(SAVE_STEP), "before")
    record_snapshot(ctx, source, SAVE_STEP, "saved")
    with shared_folder() as folder:
        source.save(folder)
        source.close()
        for stage in sorted(ctx.capabilities.stages):
            target = ctx.build_engine(stage=stage, optimizer=RESHARD_OPTIMIZER)
            target.load(folder)
            record_next_step(ctx, target, f"stage{stage}")
            target.close()


def record_next_step(ctx: RankContext, engine: Engine, label: str) -> None:
    """Weights and state as they were loaded, one step, and what became of them."""
    record_snapshot(ctx, engine, SAVE_STEP, label)
    engine.backward(ctx.loss(engine, SAVE_STEP, f"loss-{label}"))
    ctx.record(f"grads-{label}", engine.full_grads(), SAVE_STEP)
    engine.step()
    record_snapshot(ctx, engine, SAVE_STEP + 1, label)


def judge_reshard(ctx: JudgeContext) -> Iterator[Comparison]:
    """Each stage reads what was saved, bitwise, and its next step is vanilla's from there."""
    for label in (f"stage{stage}" for stage in range(4)):
        if ctx.has_record(f"params-{label}"):
            for weights in ("params", "masters"):
                yield from compare_records(
                    ctx, f"{weights}-saved", f"{weights}-{label}", SAVE_STEP, SAVE_STEP, Part.GATHER
                )
            yield from compare_records(ctx, "state-saved", f"state-{label}", SAVE_STEP, SAVE_STEP, Part.OPTIMIZER)
            yield from judge_next_step(ctx, label)


def judge_next_step(ctx: JudgeContext, label: str) -> Iterator[Comparison]:
    """The step recorded by ``continue_once`` is vanilla's, from the engine's own numbers."""
    local = ctx.compute_local_grads(SAVE_STEP, ctx.rank_records(f"params-{label}", SAVE_STEP)[0])
    yield from ctx.compare_losses(SAVE_STEP, local, f"loss-{label}")
    yield from ctx.compare_reduced_grads(f"grads-{label}", [local], SAVE_STEP)
    moment = RecordedStep(SAVE_STEP, f"masters-{label}", f"state-{label}")
    yield from judge_step(ctx, RESHARD_OPTIMIZER, ctx.rank_records(f"grads-{label}", SAVE_STEP)[0], moment)
    after = RecordedStep(SAVE_STEP + 1, moment.params_label, moment.state_label)
    yield from compare_ranks_after_step(ctx, after)
    yield from compare_published_weights(ctx, after, f"params-{label}")


def observe_consolidate(ctx: RankContext) -> None:
    engine = ctx.build_engine(optimizer=RESHARD_OPTIMIZER)
    train_steps(ctx, engine, range(1), "before")
    ctx.record_weights(engine, step=0)
    full = require_full_state_dict(engine).full_state_dict()
    ctx.record("full", full)
    ctx.record("tied", index_shared_memory(full))
    for tensor in full.values():
        tensor.zero_()  # it is the caller's: the engine trains on in its own weights
    ctx.loss(engine, 1)
    engine.close()


def index_shared_memory(state: dict[str, Any]) -> dict[str, Tensor]:
    """For each name the place of the first one that holds the same memory."""
    places: dict[int, int] = {}
    return {
        name: torch.tensor(float(places.setdefault(tensor.data_ptr() if tensor.numel() else -place - 1, place)))
        for place, (name, tensor) in enumerate(state.items())
    }


def judge_consolidate(ctx: JudgeContext) -> Iterator[Comparison]:
    """Vanilla's names, shapes and tied weights, the engine's own values; a plain model with them computes its loss."""
    plain = ctx.baseline.build_module().state_dict()
    for rank, full in enumerate(ctx.rank_records("full")):
        check_names("full_state_dict", plain, full)
        # Weights of a narrow dtype may be kept as the optimizer has them, which a model in that dtype rounds again.
        params, masters = ctx.rank_records("params")[rank], ctx.rank_records("masters")[rank]
        for name, tensor in plain.items():
            place = ctx.location(name, Part.GATHER, rank=rank)
            yield compare_bitwise(place, torch.zeros(tensor.shape), torch.zeros(full[name].shape))
            if name in params:
                held = params if full[name].dtype == params[name].dtype else masters
                yield compare_bitwise(place, held[name], full[name])
        for name, first in index_shared_memory(plain).items():
            yield compare_bitwise(
                ctx.location(name, Part.GATHER, rank=rank), first, ctx.rank_records("tied")[rank][name]
            )
        module = ctx.baseline.build_module()
        module.load_state_dict(dict(full))
        batch = ctx.baseline.batch(rank, 1)
        loss = ctx.baseline.objective(ctx.baseline.compute_output(module, batch), batch).detach()
        yield compare_bitwise(
            ctx.location("loss", Part.FORWARD, 1, rank), loss, ctx.rank_records("loss", 1)[rank]["loss"]
        )


LAWS = (
    Law(
        name="state.resume",
        statement="save, load into another engine, continue: bitwise the engine that never stopped",
        tier=Tier.EXACT,
        models=("mlp",),
        observe=observe_resume,
        judge=judge_resume,
        needs=(Feature.CHECKPOINT, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
        variants=(("adamw", ()), ("sgd", ()), ("buffers", (Feature.RANK_BUFFERS,)), ("idle", (Feature.NO_GRADIENT,))),
        self_compared_variants=("adamw", "sgd", "buffers", "idle"),
        user_model_variants=("adamw",),
    ),
    Law(
        name="state.reshard",
        statement="what one stage saved every other stage loads, bitwise, and its next step is vanilla's",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_reshard,
        judge=judge_reshard,
        needs=(Feature.CHECKPOINT, Feature.RESHARD, Feature.PARAM_GROUPS, Feature.SCHEDULE),
        weights_stay_integers=False,
    ),
    Law(
        name="state.consolidate",
        statement="the full state dict has vanilla's names and shapes and tied weights once, and a plain model loads it",
        tier=Tier.EXACT,
        models=("transformer", "mixed"),
        observe=observe_consolidate,
        judge=judge_consolidate,
        needs=(Feature.CHECKPOINT,),
        weights_stay_integers=False,
        user_model_variants=("",),
    ),
)
