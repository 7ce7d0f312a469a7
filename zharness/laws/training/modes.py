"""Define the law training.modes: dropout, batch norm statistics and eval mode behave as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature, OptimizerSpec
from zharness.law_kit.integer_steps import UNIT_SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.rank_actions import eval_mode
from zharness.law_kit.rank_context import RankContext
from zharness.laws.training.common import variation_law
from zharness.parity import Comparison, Part, compare_bitwise

SGD = OptimizerSpec(name="sgd", args={"lr": 0.05})

STEPS = 2

EVALUATION_MICRO = 10  # the micro-batch of the evaluation after step 0

GENERATOR = "generator"  # the record of the random state after a training forward
HOOK_CALLS = "calls of a forward hook of the whole model"
LAST_MICRO = EVALUATION_MICRO + STEPS  # the step under which buffers after the last forward are recorded


def observe_modes(ctx: RankContext) -> None:
    """Train with dropout and batch norm, evaluate after each step, and record buffers, modes and random state.

    Finally, run one forward in training mode without gradients. Count the calls of a forward hook.
    """
    ranks_keep_buffers = ctx.capabilities.refusal(Feature.RANK_BUFFERS) is None
    ctx.record("case", {"own": torch.tensor(float(ranks_keep_buffers))})
    engine = ctx.build_engine(optimizer=UNIT_SIGN_STEPS if ctx.spec.exact else SGD)
    calls: list[str] = []
    hook = engine.module.register_forward_hook(lambda *_: calls.append(HOOK_CALLS))
    for step in range(STEPS):
        ctx.record("params", engine.full_params(), step)
        engine.backward(ctx.loss(engine, step))
        ctx.record("grads", engine.full_grads(), step)
        ctx.record("buffers", dict(engine.module.named_buffers()), step)
        engine.step()
        engine.zero_grad()
        ctx.record("params", engine.full_params(), EVALUATION_MICRO + step)
        with eval_mode(engine), torch.no_grad():
            ctx.loss(engine, EVALUATION_MICRO + step)
            ctx.record("modes", get_training_modes(engine), step)
        ctx.record("buffers", dict(engine.module.named_buffers()), EVALUATION_MICRO + step)
    with torch.no_grad():
        ctx.record(GENERATOR, {GENERATOR: ctx.batch(0).generator_state_after(engine)})
    ctx.record("buffers", dict(engine.module.named_buffers()), LAST_MICRO)
    hook.remove()
    ctx.record("calls", {HOOK_CALLS: torch.tensor(float(len(calls)))})
    engine.close()


def get_training_modes(engine: Engine) -> dict[str, Tensor]:
    """Return a dictionary from the name of each module to its training flag."""
    return {f"mode of {name}": torch.tensor(float(module.training)) for name, module in engine.module.named_modules()}


def judge_modes(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses, gradients, buffers, the random state after dropout, and the training flag of every module.

    If the engine claims that ranks keep their own running statistics, the statistics of every rank are compared in
    every step. Otherwise, after step 0, only those of ranks with rank 0's micro-batches are compared.
    """
    ranks_keep_buffers = bool(ctx.rank_records("case")[0]["own"])
    buffers: list[Mapping[str, Tensor]] = [{} for _ in range(ctx.world_size)]
    for step in range(STEPS):
        local = ctx.compute_local_grads(step, ctx.rank_records("params", step)[0])
        yield from ctx.compare_losses(step, local)
        yield from ctx.compare_reduced_grads("grads", [local], step)
        for rank in range(ctx.world_size):
            training = load_recorded_baseline(ctx, rank, step, buffers[rank])
            compute_loss(ctx, training, rank, step)
            buffers[rank] = {name: buffer.clone() for name, buffer in training.named_buffers()}
            if ranks_keep_buffers or ctx.data_coordinate(rank) == 0:
                yield from judge_evaluation(ctx, rank, step, buffers[rank])
            elif step == 0:
                yield from compare_buffers(ctx, rank, 0, buffers[rank])
    for rank in range(ctx.world_size):
        compares_buffers = ranks_keep_buffers or ctx.data_coordinate(rank) == 0
        yield from judge_last_forward(ctx, rank, buffers[rank], compares_buffers)


def judge_last_forward(
    ctx: JudgeContext, rank: int, buffers: Mapping[str, Tensor], compares_buffers: bool
) -> Iterator[Comparison]:
    """Compare random state and buffers after a training-mode forward without gradients, and the hook's calls."""
    module = load_recorded_baseline(ctx, rank, LAST_MICRO - 1, buffers)
    batch = ctx.baseline.batch(ctx.data_coordinate(rank), 0)
    with torch.no_grad():
        state = batch.generator_state_after(module)
    recorded = ctx.rank_records(GENERATOR)[rank][GENERATOR]
    yield compare_bitwise(
        ctx.location(GENERATOR, Part.FORWARD, STEPS, rank), state.double().to(recorded.device), recorded.double()
    )
    if compares_buffers:
        yield from compare_buffers(ctx, rank, LAST_MICRO, dict(module.named_buffers()))
    calls = ctx.rank_records("calls")[rank][HOOK_CALLS]
    yield compare_bitwise(ctx.location(HOOK_CALLS, Part.FORWARD, STEPS, rank), torch.tensor(2.0 * STEPS + 1), calls)


def judge_evaluation(ctx: JudgeContext, rank: int, step: int, buffers: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """Compare the buffers after a training forward, and the evaluation after the next optimizer step."""
    yield from compare_buffers(ctx, rank, step, buffers)
    for name, mode in ctx.rank_records("modes", step)[rank].items():
        yield compare_bitwise(ctx.location(name, Part.FORWARD, step, rank), torch.tensor(0.0), mode)
    micro = EVALUATION_MICRO + step
    loss = compute_loss(ctx, load_recorded_baseline(ctx, rank, micro, buffers).eval(), rank, micro)
    yield compare_bitwise(
        ctx.location("loss", Part.FORWARD, step, rank), loss, ctx.rank_records("loss", micro)[rank]["loss"]
    )
    yield from compare_buffers(ctx, rank, micro, buffers)


def load_recorded_baseline(ctx: JudgeContext, rank: int, step: int, buffers: Mapping[str, Tensor]) -> nn.Module:
    """Return the plain model with the weights recorded at ``step`` and with ``buffers``."""
    module = ctx.baseline.build_module(ctx.rank_records("params", step)[rank])
    module.load_state_dict(dict(buffers), strict=False)
    return module


@torch.no_grad()
def compute_loss(ctx: JudgeContext, module: nn.Module, rank: int, micro: int) -> Tensor:
    """Return the plain model's loss on one rank's micro-batch."""
    batch = ctx.baseline.batch(ctx.data_coordinate(rank), micro)
    return ctx.baseline.objective(ctx.baseline.compute_output(module, batch), batch)


def compare_buffers(ctx: JudgeContext, rank: int, step: int, expected: Mapping[str, Tensor]) -> Iterator[Comparison]:
    """Compare the recorded buffers of one rank with the expected buffers."""
    for name, buffer in expected.items():
        recorded = ctx.rank_records("buffers", step)[rank][name]
        yield compare_bitwise(
            ctx.location(name, Part.FORWARD, step % EVALUATION_MICRO, rank), buffer.double(), recorded.double()
        )


LAWS = (
    variation_law(
        "modes",
        "dropout, batch norm and evaluation work as in plain PyTorch, with the caller's generator and mode",
        observe_modes,
        judge_modes,
        models=("stateful",),
        dtypes=("fp32",),  # a batch norm with narrower weights may refuse fp32 running statistics
        kept_because="the only law with dropout, running statistics, and evaluation that differs from training",
    ),
)
