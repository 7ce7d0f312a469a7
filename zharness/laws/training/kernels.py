"""Define the law training.kernels: local gradients are as close to float64 as those that torch's kernels compute.

Reduced gradients have to be the mean of the engine's own local gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zharness.law_kit.buffers import copy_buffers, restore_buffers
from zharness.law_kit.hints import hint_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, ModelScope, Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.mesh import CONTEXT
from zharness.parity import Comparison, Part, Tier, compare_ranks, compare_within_bound
from zharness.parity.bounds import gamma, mean_and_bound
from zharness.parity.calibration import calibrate, calibrate_mean, compare_calibrated
from zharness.parity.certificate import is_power_of_two
from zharness.parity.compare import attach_plain_values


def observe_kernels(ctx: RankContext) -> None:
    """Run one backward per rank in which only that rank's loss counts, and one in which all losses count.

    Each of the first backwards gives the local gradient of one rank, divided by the world size. Every forward starts
    from the initial buffers, as the forwards of plain PyTorch do.
    """
    engine = ctx.build_engine(optimizer=ZERO_LR_SGD)
    first_buffers = copy_buffers(engine.module)
    for chosen in range(ctx.data_size + 1):
        restore_buffers(engine.module, first_buffers)
        counts = chosen in (ctx.data_coordinate, ctx.data_size)
        engine.backward(ctx.loss(engine, 0, f"loss-{chosen}") * float(counts))
        ctx.record("grads", engine.full_grads(), chosen)
        engine.step()
        engine.zero_grad()
    engine.close()


def get_plain_gradient(ctx: JudgeContext, rank: int, name: str) -> Tensor:
    """Return plain PyTorch's gradient of the parameter ``name`` for one rank's loss, summed over all ranks."""
    results = ctx.baseline.run_all_ranks(weigh=lambda loss, other: loss * float(other == rank))
    return torch.stack([result.grads[name] for result in results if name in result.grads]).sum(0)


def judge_kernels(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare local gradients by tier C, and reduced gradients by tier S with the mean of the local gradients."""
    size = ctx.data_size
    engine_grads = []
    for rank in range(size):
        calibrated = calibrate(ctx.baseline, rank, loss_weights=tuple(float(at == rank) for at in range(size)))
        rank_grad_alone = ctx.rank_records("grads", rank)[0]
        ctx.check_gradient_names(calibrated.oracle.keys(), rank_grad_alone)
        engine_grads.append({name: rank_grad_alone[name].double() * size for name in calibrated.oracle})
        comparison = compare_calibrated(
            ctx.location("", Part.LOCAL_GRADIENT, rank=rank), calibrated, engine_grads[rank]
        )
        if comparison.mismatch is not None:
            comparison = attach_plain_values(
                hint_factor(comparison, engine_grads[rank], calibrated.oracle),
                partial(get_plain_gradient, ctx, rank, comparison.mismatch.parameter),
            )
        yield comparison
    rank_grads = ctx.rank_records("grads", size)
    if ctx.baseline.joins_ranks or CONTEXT in ctx.mesh.axes:
        yield from compare_joined_grads(ctx, rank_grads)
        return
    for name in engine_grads[0]:
        terms = [grads[name] for grads in engine_grads]
        grad_dtype = rank_grads[0][name].dtype
        reduce_dtype = ctx.get_reduce_dtype(name, grad_dtype)
        mean, bound = mean_and_bound(terms, reduce_dtype, grad_dtype)
        if not is_power_of_two(size):  # the division of one rank's gradient by N has rounded
            bound = bound + gamma(1, reduce_dtype) * sum(term.abs() for term in terms) / size
        for rank, record in enumerate(rank_grads):
            yield compare_within_bound(ctx.location(name, Part.REDUCTION, 0, rank), mean, record[name], bound)
        yield from compare_ranks(ctx.location(name, Part.REDUCTION), [record[name] for record in rank_grads])


def compare_joined_grads(ctx: JudgeContext, rank_grads: Sequence[Mapping[str, Tensor]]) -> Iterator[Comparison]:
    """Compare reduced gradients by tier C with float64: through a SyncBatchNorm every loss reaches every rank.

    With all losses, the kernels then round other numbers than in the backwards in which one loss counts. On cp, the sum
    over ranks adds parts of each local gradient. These parts cancel, so a bound on the sum of local gradients does not
    hold either.
    """
    size = ctx.data_size
    joined = ctx.baseline.joins_ranks
    calibrated = (
        calibrate(ctx.baseline, 0, loss_weights=(1 / size,) * size) if joined else calibrate_mean(ctx.baseline, size)
    )
    for rank, record in enumerate(rank_grads):
        grads = {name: record[name].double() for name in calibrated.oracle}
        yield compare_calibrated(ctx.location("", Part.REDUCTION, rank=rank), calibrated, grads)
    for name in calibrated.oracle:
        yield from compare_ranks(ctx.location(name, Part.REDUCTION), [record[name] for record in rank_grads])


LAWS = (
    Law(
        name="training.kernels",
        statement="local gradients are as close to float64 as torch's kernels, and reduced gradients are their mean",
        tier=Tier.CALIBRATED,
        models=("mlp", "transformer"),
        observe=observe_kernels,
        judge=judge_kernels,
        dtypes=("fp32",),
        variants=(Variant(model_scope=ModelScope.ANY),),
        is_gradient_law=True,
        kept_because="the only law for random weights on an engine with kernels of its own",
    ),
)
