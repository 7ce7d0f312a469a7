"""Define the law resources.poisoned_memory: a step does not read memory that it has not written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_actions import train_and_record_step
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.setting import SettingSupport
from zharness.laws.resources.common import resource_law
from zharness.parity import Comparison


@contextmanager
def poison_fresh_memory() -> Iterator[None]:
    """Fill newly allocated tensors with NaN in the ``with`` block, as torch's deterministic algorithms do."""
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=only_warned)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        settings.fill_uninitialized_memory = fill


def observe_poisoned_memory(ctx: RankContext) -> None:
    """Train and record one step while all newly allocated tensors are filled with NaN."""
    with poison_fresh_memory():
        engine = ctx.build_engine(optimizer=UNIT_LR_SGD)
        train_and_record_step(ctx, engine)
        engine.close()


def judge_poisoned_memory(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients with those of plain PyTorch, and check the optimizer step."""
    local = ctx.compute_local_grads()
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local], exact=ctx.certify_exactness(range(1)))
    yield from judge_step(ctx, UNIT_LR_SGD, ctx.rank_records("grads")[0], RecordedStep(0))
    yield from compare_ranks_after_step(ctx, RecordedStep(1))


LAWS = (
    resource_law(
        "poisoned_memory",
        "filling newly allocated memory with NaN does not change a training step",
        observe_poisoned_memory,
        judge_poisoned_memory,
        Feature.STEADINESS,
        models=("mlp", "conv"),
        weights_stay_integers=True,  # only gradients at the initial weights are compared
        variants=(Variant(),),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that distinguishes memory that was never written from zeros",
    ),
)
