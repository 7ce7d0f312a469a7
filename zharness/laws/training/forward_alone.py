"""Define the law training.forward_alone: a forward without backward does not affect the training around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves  # FSDP2 uses these functions too

from zharness.engines.protocol import Absent, Engine
from zharness.law_kit.integer_steps import SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import ModelScope, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext
from zharness.law_kit.record_comparisons import compare_forward
from zharness.law_kit.setting import SettingSupport
from zharness.law_kit.split_sums import require_exact_sums
from zharness.laws.training.common import STEPS, variation_law
from zharness.parity import Comparison, Part, compare_bitwise
from zharness.parity.baseline import LocalResult

FORWARD_MODES: dict[str, Callable[[Engine], AbstractContextManager[object]]] = {
    "eval": eval_mode,
    "no_grad": lambda _: torch.no_grad(),
    "inference": lambda _: torch.inference_mode(),
}
MODES_WITHOUT_GRADIENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}

REQUIRES_GRAD = "requires_grad of the outputs"


def read_requires_grad(output: Any) -> Tensor:
    """Return, for each tensor in the output of a model, whether it requires a gradient."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.tensor([tensor.requires_grad for tensor in tensors], dtype=torch.float64)


def observe_forward_alone(ctx: RankContext) -> None:
    """Run a forward without backward before each backward and before each step, and record the losses and gradients.

    The steps of a random model change the weights, so exactness cannot be certified; the steps of an exact model keep
    the weights integers.
    """
    engine = ctx.build_engine(optimizer=SIGN_STEPS if ctx.spec.exact else UNIT_LR_SGD)
    for step in range(STEPS):
        ctx.record("params", engine.full_params(), step)
        with FORWARD_MODES[ctx.variant](engine):
            batch = ctx.batch(10 + step)
            output = batch.feed(engine)
            ctx.record("loss", {"loss": ctx.spec.loss(output, batch.target)}, 10 + step)
            ctx.record("graph", {REQUIRES_GRAD: read_requires_grad(output)}, step)
        gathered = engine.observe().gathered_bytes
        if not isinstance(gathered, Absent):
            ctx.record("left", {"gathered": torch.tensor(gathered)}, step)
        ctx.train(engine, step)
        ctx.record("grads", engine.full_grads(), step)
        with FORWARD_MODES[ctx.variant](engine):
            ctx.loss(engine, 20 + step)
        engine.step()
        engine.zero_grad()
    ctx.record("params", engine.full_params(), STEPS)  # shows whether a wrong forward used later weights
    engine.close()


def run_plain_forwards(ctx: JudgeContext, micro: int, params: Mapping[str, Tensor]) -> list[LocalResult]:
    """Return the losses and gradients of plain PyTorch on micro-batch ``micro`` of every rank.

    If the mode of the forward computes no gradients, only the losses are returned.
    """
    if ctx.variant not in MODES_WITHOUT_GRADIENT:
        return ctx.compute_local_grads(micro, params)
    with MODES_WITHOUT_GRADIENT[ctx.variant]():
        return [ctx.baseline.run_forward(rank, micro, params) for rank in range(ctx.data_size)]


def judge_forward_alone(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients with plain PyTorch, and check that no parameter stays gathered after a forward.

    The outputs of a forward must require a gradient exactly if plain PyTorch's outputs do, in the same mode.
    """
    with MODES_WITHOUT_GRADIENT.get(ctx.variant, nullcontext)():
        plain_output = ctx.baseline.compute_output(ctx.baseline.build_module(), ctx.baseline.batch(0, 10))
    for step in range(STEPS):
        params = ctx.rank_records("params", step)[0]
        for at in (10 + step, 20 + step):
            require_exact_sums(ctx, range(at, at + 1), params)
            yield from compare_forward(ctx, step, run_plain_forwards(ctx, at, params), at)
        if ctx.has_record("left"):
            for rank, record in enumerate(ctx.rank_records("left", step)):
                yield compare_bitwise(
                    ctx.location("gathered", Part.GATHER, step, rank), torch.tensor(0), record["gathered"]
                )
        for rank, record in enumerate(ctx.rank_records("graph", step)):
            place = ctx.location(REQUIRES_GRAD, Part.FORWARD, step, rank)
            yield compare_bitwise(place, read_requires_grad(plain_output), record[REQUIRES_GRAD])
        local = ctx.compute_local_grads(step, params)
        yield from ctx.compare_losses(step, local)
        exact = require_exact_sums(ctx, range(step, step + 1), params)
        yield from ctx.compare_reduced_grads("grads", [local], step, exact)


LAWS = (
    variation_law(
        "forward_alone",
        "a forward in eval mode, no_grad or inference_mode builds its mode's autograd graph; training is unaffected",
        observe_forward_alone,
        judge_forward_alone,
        variants=tuple(
            Variant(mode, model_scope=ModelScope.ANY if mode == "no_grad" else ModelScope.WORKLOAD)
            for mode in FORWARD_MODES
        ),
        steps=LawSteps(observe_forward_alone),
        compares_later_forwards=True,
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only forwards without a backward in each of three modes",
    ),
)
