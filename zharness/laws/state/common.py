"""Define functions that several laws of saved state use: training, recording, and the step after a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zharness.engines.protocol import Engine
from zharness.law_kit.engine_facts import collect_engine_facts
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizer_step import (
    RecordedStep,
    compare_published_weights,
    compare_ranks_after_step,
    judge_step,
)
from zharness.law_kit.optimizers import TRAJECTORY_OPTIMIZERS
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.split_sums import compare_split_grads, splits_sums
from zharness.parity import Comparison, Part, compare_bitwise

SAVE_STEP = 2

RESHARD_OPTIMIZER = TRAJECTORY_OPTIMIZERS["adamw"]


def train_steps(ctx: RankContext, engine: Engine, steps: range, label: str) -> None:
    """Make one optimizer step for each number in ``steps``, and record the losses under a name with ``label``."""
    for step in steps:
        ctx.train(engine, step, f"loss-{label}")
        engine.step()
        engine.zero_grad()


def record_changes(ctx: RankContext, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Record for each weight and each entry of the optimizer state whether a refused load changed it."""
    ctx.record("changed", find_changes(before, after))


def find_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for each entry of ``before`` 1 if it is missing in ``after`` or has other values there, and else 0."""
    return {
        name: torch.tensor(float(name not in after or not after[name].equal(value))) for name, value in before.items()
    }


def compare_changes(ctx: JudgeContext, rank: int) -> Iterator[Comparison]:
    """Check that a refused load changed no weight and no optimizer state of one rank."""
    for name, changed in ctx.rank_records("changed")[rank].items():
        yield compare_bitwise(ctx.location(name, Part.GATHER, 0, rank), torch.zeros(()), changed)


def run_eval_forward(ctx: RankContext, engine: Engine, label: str) -> None:
    """Run a forward in eval mode without gradients, and record its loss under a name with ``label``."""
    with eval_mode(engine), torch.no_grad():
        ctx.loss(engine, SAVE_STEP, f"evaluated-{label}")


def record_snapshot(ctx: RankContext, engine: Engine, step: int, label: str) -> None:
    """Record weights, master weights, optimizer state, learning rates and loss scale under names with ``label``."""
    ctx.record_training_state(engine, step, f"-{label}")
    ctx.record(f"facts-{label}", collect_engine_facts(engine), step)


def record_next_step(ctx: RankContext, engine: Engine, label: str) -> None:
    """Record the loaded weights and state, make one step, and record the weights and state after it."""
    record_snapshot(ctx, engine, SAVE_STEP, label)
    ctx.train(engine, SAVE_STEP, f"loss-{label}")
    ctx.record(f"grads-{label}", engine.full_grads(), SAVE_STEP)
    engine.step()
    record_snapshot(ctx, engine, SAVE_STEP + 1, label)


def judge_next_step(ctx: JudgeContext, label: str) -> Iterator[Comparison]:
    """Judge the step of ``record_next_step`` from the weights and state that the engine had loaded."""
    loaded = ctx.rank_records(f"params-{label}", SAVE_STEP)[0]
    if splits_sums(ctx):
        yield from compare_split_grads(ctx, f"grads-{label}", SAVE_STEP, loaded)
    else:
        local = ctx.compute_local_grads(SAVE_STEP, loaded)
        yield from ctx.compare_losses(SAVE_STEP, local, f"loss-{label}")
        yield from ctx.compare_reduced_grads(f"grads-{label}", [local], SAVE_STEP)
    before = RecordedStep(SAVE_STEP, f"masters-{label}", f"state-{label}")
    yield from judge_step(ctx, RESHARD_OPTIMIZER, ctx.rank_records(f"grads-{label}", SAVE_STEP)[0], before)
    after = RecordedStep(SAVE_STEP + 1, before.params_label, before.state_label)
    yield from compare_ranks_after_step(ctx, after)
    yield from compare_published_weights(ctx, after, f"params-{label}")
