"""Compute the buffers that plain PyTorch has after a step's forwards, and compare an engine's buffers with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from zharness.engines.protocol import BufferPromise
from zharness.law_kit.judge_context import JudgeContext
from zharness.parity import Comparison, Part, Tier, compare_bitwise, compare_within_bound
from zharness.parity.baseline import Baseline, convert_to_float64, run_backward
from zharness.parity.bounds import unit_roundoff
from zharness.parity.calibration import LARGEST_FACTOR
from zharness.parity.compare import check_names
from zharness.parity.sample_draws import permute_rows
from zharness.parity.sample_runs import CALIBRATION_RUNS
from zharness.workload import Batch

Buffers = Mapping[str, Tensor]


def copy_buffers(module: nn.Module) -> Buffers:
    """Return copies of the module's buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def restore_buffers(module: nn.Module, saved: Buffers) -> None:
    """Write the numbers of ``saved`` into the module's buffers; a buffer that has changed its shape stays."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in saved and buffer.shape == saved[name].shape:
                buffer.copy_(saved[name])


def compare_buffers(
    ctx: JudgeContext, step: int, params: Mapping[str, Tensor] | None, before: Sequence[Buffers], own_kernels: bool
) -> Iterator[Comparison]:
    """Compare the buffers that each rank recorded after ``step`` with those of plain PyTorch.

    ``params`` are the weights of the step's forwards, or None for the initial weights, and ``before[at]`` the buffers
    of a data coordinate before the step. The engine's promise about buffers decides from which buffers a rank's forward
    starts. If the engine has its own kernels, floating-point buffers are compared within the error that torch's kernels
    have in several runs with permuted samples.
    """
    records, promise = ctx.rank_records("buffers", step), ctx.claims.buffers
    expected = run_plain_forwards(ctx, step, params, before, wide=False)
    wide = run_plain_forwards(ctx, step, params, before, wide=True) if own_kernels else expected
    runs = run_permuted_forwards(ctx, step, params, before) if own_kernels else []
    for rank, record in enumerate(records):
        at = ctx.data_coordinate(rank)
        check_names("named_buffers() of the engine's module", expected[at], record)
        for name, plain in expected[at].items():
            place = ctx.location(name, Part.FORWARD, step, rank)
            if own_kernels and plain.is_floating_point():
                truth = wide[at][name]
                bound = bound_own_kernel([(narrow[at][name], exact[at][name]) for narrow, exact in runs])
                comparison = compare_within_bound(place, truth, record[name], bound, Tier.CALIBRATED)
            else:
                comparison = compare_bitwise(place, plain, record[name])
            yield add_promise(comparison, promise)


def bound_own_kernel(runs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the largest error of a right kernel's buffer, in the way in which tier C limits the error of a gradient.

    Each run is a pair of the buffer that torch's kernels wrote and the same buffer in float64. The bound is one number
    for the whole tensor, since a single element may be right by chance. The bound is at least the error of one rounding
    of the largest element to the buffer's dtype.
    """
    errors = [(plain.double() - truth).abs().max() for plain, truth in runs if plain.numel()]
    roundings = [unit_roundoff(plain.dtype) * truth.abs().max() for plain, truth in runs if plain.numel()]
    largest = torch.stack([*errors, *roundings]).max() if errors else torch.zeros((), dtype=torch.float64)
    return LARGEST_FACTOR * largest


def add_promise(comparison: Comparison, promise: BufferPromise) -> Comparison:
    """Add a hint to a mismatch: the engine's promise about buffers."""
    if comparison.mismatch is None:
        return comparison
    hint = f"the engine claims BufferPromise.{promise.name}: {promise.value}"
    return replace(comparison, mismatch=replace(comparison.mismatch, hint=hint))


def run_permuted_forwards(
    ctx: JudgeContext, step: int, params: Mapping[str, Tensor] | None, before: Sequence[Buffers]
) -> list[tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]]:
    """Return each rank's buffers in the model's dtype and in float64, for several permutations of the samples."""
    return [
        (
            run_plain_forwards(ctx, step, params, before, wide=False, order_seed=seed),
            run_plain_forwards(ctx, step, params, before, wide=True, order_seed=seed),
        )
        for seed in range(CALIBRATION_RUNS)
    ]


def run_plain_forwards(
    ctx: JudgeContext,
    step: int,
    params: Mapping[str, Tensor] | None,
    before: Sequence[Buffers],
    wide: bool,
    order_seed: int | None = None,
) -> list[dict[str, Tensor]]:
    """Return each rank's buffers after plain PyTorch has run the forwards and backwards of one step.

    A backward that recomputes a forward writes the buffers too. ``wide`` computes in float64. ``order_seed`` is the
    seed of a permutation of each micro-batch; if it is None, the samples keep their order.
    """
    buffers = [dict(rank_buffers) for rank_buffers in before]
    for _ in range(ctx.setting.accumulation_steps):
        if ctx.claims.buffers is BufferPromise.FROM_RANK_0:
            buffers = [buffers[0]] * ctx.data_size
        before_step = buffers

        def train(rank: int) -> dict[str, Tensor]:
            """Train the micro-batch of one rank."""
            batch = permute(ctx.baseline.batch(rank, step), order_seed)
            return train_micro_batch(ctx.baseline, batch, params, before_step[rank], wide)  # noqa: B023 - called at once

        buffers = ctx.baseline.run_ranks(train)
    return buffers


def permute(batch: Batch, seed: int | None) -> Batch:
    """Return ``batch`` with its samples in the order that ``seed`` determines, or unchanged if it is None."""
    if seed is None:
        return batch
    order = permute_rows(batch.num_samples, seed)
    return batch.map_tensors(lambda tensor: tensor[order])


def train_micro_batch(
    baseline: Baseline, batch: Batch, params: Mapping[str, Tensor] | None, buffers: Buffers, wide: bool
) -> dict[str, Tensor]:
    """Return the buffers after forward and backward of one micro-batch in a plain model that begins with ``buffers``.

    ``wide`` computes in float64.
    """
    module = baseline.build_module(params)
    replace_buffers(module, buffers)
    if wide:
        module, batch = convert_to_float64(module, batch)
    run_backward(module, baseline.objective(baseline.compute_output(module, batch), batch))
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def replace_buffers(module: nn.Module, buffers: Buffers) -> None:
    """Replace the buffers of ``module`` by copies of ``buffers``, which may have another dtype."""
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer.clone())


def read_initial_buffers(ctx: JudgeContext) -> list[dict[str, Tensor]]:
    """Return each rank's buffers before training: the model's, in the dtypes in which the rank recorded them."""
    initial = dict(ctx.baseline.build_module().named_buffers())
    return [
        {name: buffer.to(record[name].dtype) if name in record else buffer for name, buffer in initial.items()}
        for record in ctx.rank_records("buffers")
    ]


def read_buffers(ctx: JudgeContext, step: int) -> list[dict[str, Tensor]]:
    """Return the buffers that the first rank of each data coordinate recorded after ``step``."""
    records = ctx.rank_records("buffers", step)
    by_coordinate = {ctx.data_coordinate(rank): record for rank, record in reversed([*enumerate(records)])}
    return [dict(by_coordinate[at]) for at in range(ctx.data_size)]
