"""Train a few steps on an engine and keep every loss, gradient and weight, to see whether a mutant changes a number."""

from __future__ import annotations

from pathlib import Path

import torch

from zharness import engines
from zharness.cell import Cell
from zharness.engines import AccumulationOwner, Capabilities, Engine
from zharness.law_kit.optimizers import TRAJECTORY_OPTIMIZERS
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext
from zharness.mutants import MUTANTS, PATH
from zharness.parity.snapshot import read_evidence
from zharness.run.observe_and_judge import build_cell_context
from zharness.world.rank import seed_torch

STEPS, MICRO_STEPS, CLIP = 3, 2, 0.5
UNUSED_SEED = 1  # of the checkpointed engine's first weights, which the load replaces


def get_short_run_claims(engine: str, stage: int) -> Capabilities:
    """Return the claims of a built-in engine or of a mutant."""
    known = engines.capabilities(engine, stage)
    return known or MUTANTS[engine.removeprefix(PATH)].claims(stage)


def train_and_record(cell: Cell, folder: str) -> None:
    """Train ``STEPS`` clipped steps of AdamW with an evaluation before each, and one more from a checkpoint."""
    ctx = build_cell_context(cell, 0, get_short_run_claims(cell.engine, cell.stage), {}, Path(folder))
    seed_torch(cell.seed(0))
    owner = ctx.accumulation_owners()[-1]
    settings = {
        "optimizer": TRAJECTORY_OPTIMIZERS["adamw"],
        "clip": CLIP,
        "accumulation_steps": MICRO_STEPS,
        "accumulation_owner": owner,
    }
    engine = ctx.build_engine(**settings)
    for step in range(STEPS):
        train_step(ctx, engine, step, owner)
    resumed = ctx.build_engine(**settings)
    with shared_folder() as checkpoint:
        engine.save(checkpoint)
        resumed.load(checkpoint)
    engine.close()
    train_step(ctx, resumed, STEPS, owner)
    resumed.close()
    ctx.finish()


def train_step(ctx: RankContext, engine: Engine, step: int, owner: AccumulationOwner) -> None:
    """Evaluate, train one window of micro-batches, and record losses, gradients and weights under the step."""
    with torch.no_grad():
        ctx.loss(engine, step * MICRO_STEPS, "evaluation")
    for micro in range(step * MICRO_STEPS, (step + 1) * MICRO_STEPS):
        loss = ctx.loss(engine, micro)
        engine.backward(loss / MICRO_STEPS if owner is AccumulationOwner.CALLER else loss)
        if owner is AccumulationOwner.ENGINE and micro + 1 < (step + 1) * MICRO_STEPS:
            engine.step()
    ctx.record("gradient", engine.full_grads(), step)
    engine.step()
    engine.zero_grad()
    ctx.record("weight", engine.full_params(), step)


def find_difference(folder: Path, right_folder: Path, world_size: int) -> str:
    """Name the first recorded number of any rank that differs from the right engine's; empty if all are equal."""
    for rank in range(world_size):
        wrong, right = read_evidence(folder, rank), read_evidence(right_folder, rank)
        for mine, other in zip(wrong.snapshots, right.snapshots, strict=True):
            for name in {**mine.tensors, **other.tensors}:
                pair = mine.tensors.get(name), other.tensors.get(name)
                if None in pair or not torch.equal(*(tensor.nan_to_num() for tensor in pair if tensor is not None)):
                    return f"{mine.label} {name} after step {mine.step}"
    return ""
