"""Define the law pipeline.any_order: each call of a random program of whole-batch calls is judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from zharness.engines.protocol import Engine
from zharness.law_kit.engine_facts import build_facts
from zharness.law_kit.given_programs import ProgramCell, split_variant
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.program_law import add_program_hint
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, flatten_optimizer_state, scalar
from zharness.laws.pipeline import MODELS, RANDOM_MODEL, pipeline_law, require_schedule, select_schedule, train_batch
from zharness.laws.pipeline_cuts import CALL_PROGRAMS, parse_calls
from zharness.laws.pipeline_program_judge import EDIT_FACTOR, STRIDE, BatchProgramJudge, make_batch_shape
from zharness.laws.pipeline_programs import (
    BATCHES,
    TEMPLATES,
    Call,
    CallKind,
    find_shared_weights,
    select_parameter,
)
from zharness.mesh import TENSOR
from zharness.parity import Comparison
from zharness.workload.programs import join_words


@dataclass
class ProgramRunner:
    """Runs the calls of a program, and records the results of each call; all ranks share ``folder``.

    ``version`` is the number under which weights and state were last recorded, and ``saves`` the number of checkpoints.
    """

    ctx: RankContext
    engine: Engine
    folder: Path
    version: int = 0
    saves: int = 0

    def run(self, position: int, call: Call) -> None:
        """Run the call at a position of the program."""
        if call.kind in BATCHES:
            losses = train_batch(self.ctx, self.engine, STRIDE * position, make_batch_shape(call))
            self.ctx.record("losses", losses, position)
            if call.kind is not CallKind.UNSEEN:
                self.ctx.record("grads", self.engine.full_grads(), position)
        elif call.kind is CallKind.ZERO_GRAD:
            self.engine.zero_grad()
        elif call.kind is CallKind.LOOK:
            self.record_readout(position)
        elif call.kind in (CallKind.FREEZE, CallKind.THAW):
            self.find_weight(call).requires_grad_(call.kind is CallKind.THAW)
        else:
            self.run_update(position, call)
            self.version += 1
            self.record_version()

    def run_update(self, position: int, call: Call) -> None:
        """Run a call that changes weights or state, or that could change them by mistake."""
        if call.kind is CallKind.STEP:
            self.engine.step()
            norm = self.engine.grad_norm()
            self.ctx.record("norm", {} if norm is None else {"norm": scalar(norm)}, position)
            self.engine.zero_grad()
        elif call.kind is CallKind.EDIT:
            with torch.no_grad():
                self.find_weight(call).mul_(EDIT_FACTOR)
        elif call.kind is CallKind.SAVE:
            self.engine.save(self.folder / str(self.saves))
            self.saves += 1
        else:
            self.engine.load(self.folder / str(0 if call.kind is CallKind.LOAD_OLD else self.saves - 1))

    def find_weight(self, call: Call) -> nn.Parameter:
        """Return the weight of the whole model that a call edits, freezes or unfreezes.

        On a rank whose stages do not hold the weight, it is a copy that no stage uses: changing the copy has no effect.
        """
        return self.engine.module.get_parameter(select_parameter(self.ctx.spec, self.ctx.seed, call))

    def record_readout(self, position: int) -> None:
        """Read gradients, weights and state again, and record them."""
        self.ctx.record("grads", self.engine.full_grads(), position)
        self.ctx.record("looked", self.engine.full_params(), position)
        state = flatten_optimizer_state(self.engine.full_optimizer_state())
        self.ctx.record("looked-state", state, position)

    def record_version(self) -> None:
        """Record weights, state, and the learning rates that the engine reports."""
        observations = self.ctx.record_training_state(self.engine, self.version)
        self.ctx.record("facts", build_facts(observations), self.version)


def observe_any_order(ctx: RankContext) -> None:
    """Run the program drawn from the cell's seed, and record its calls and their results."""
    name, _ = split_variant(ctx.variant)
    cell, template = ProgramCell(ctx.spec.name, name, ctx.seed, ctx.config.dtype, ctx.capabilities), TEMPLATES[name]
    calls = parse_calls(CALL_PROGRAMS.choose(ctx.variant, cell))
    rounds_in_parts = TENSOR in ctx.config.mesh.axes and not ctx.spec.exact
    if rounds_in_parts or find_shared_weights(ctx.spec, ctx.seed):  # the rounding of unread gradients is unknown
        calls = tuple(replace(call, kind=CallKind.TRAIN) if call.kind is CallKind.UNSEEN else call for call in calls)
    ctx.record("calls", {"text": torch.tensor([*join_words(calls).encode()], dtype=torch.uint8)})
    engine = ctx.build_engine(
        optimizer=template.select_optimizer(ctx.capabilities),
        options=select_schedule(template.schedule),
        clip=template.clip,
    )
    with shared_folder() as folder:
        caller = ProgramRunner(ctx, engine, folder)
        caller.record_version()
        for position, call in enumerate(calls, start=1):
            caller.run(position, call)
    engine.close()


def judge_any_order(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge every call of the program; a mismatch says which calls the program had made."""
    text = bytes(ctx.rank_records("calls")[0]["text"].tolist()).decode()
    calls, (name, _) = parse_calls(text), split_variant(ctx.variant)
    for comparison in BatchProgramJudge(ctx, TEMPLATES[name], calls).judge():
        yield add_program_hint(comparison, calls)


_LAW = pipeline_law(
    "any_order",
    "after each call of a random program, losses, gradients, weights, state and rates are plain PyTorch's",
    observe_any_order,
    judge_any_order,
    tuple(
        Variant(
            name, template.features, schedules=require_schedule(template.schedule), micro_batches=min(template.sizes)
        )
        for name, template in TEMPLATES.items()
    ),
    models=(*MODELS, RANDOM_MODEL),
    kept_because="the only law that finds errors of one stage or rank that need certain calls before them",
)
LAWS = (replace(_LAW, weights_stay_integers=False, programs=CALL_PROGRAMS),)
