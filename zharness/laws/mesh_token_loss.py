"""Define the law mesh.token_loss: a loss over all tokens that count, divided once by their number, on every mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.laws.mesh import mesh_law
from zharness.mesh import TENSOR
from zharness.parity import Comparison
from zharness.parity.baseline import Baseline, LocalResult, Objective, run_local
from zharness.parity.bounds import unit_roundoff
from zharness.parity.certificate import Exactness, certify_multiples
from zharness.workload import Batch
from zharness.workload.exact_tokens import PADDING, sum_cross_entropy

MICRO_BATCHES = range(2)
PLACES = 8  # of a micro-batch, in which tokens may count: every model has as many places or more


@cache
def share_tokens(places: int, data_size: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Return how many of its ``places`` count in each micro-batch of a step, for each data coordinate.

    Their sum is a power of two, so that a division by it rounds nothing. Every micro-batch has another number, if that
    is possible; or else every data coordinate, and the micro-batches of each, as far as the places allow. So a mean of
    the means of micro-batches or of data coordinates is another number than the mean over all tokens.
    """
    entries = data_size * micro_batches
    powers = (2**power for power in range(64))
    totals = [power for power in powers if entries * places <= 4 * power <= 3 * entries * places]
    for total in reversed(totals):
        numbers = spread(total, entries, places)
        if len({*numbers}) == entries:
            return tuple(numbers[start : start + micro_batches] for start in range(0, entries, micro_batches))
    return tuple(spread(own, micro_batches, places) for own in spread(totals[-1], data_size, places * micro_batches))


def spread(total: int, parts: int, limit: int) -> tuple[int, ...]:
    """Return ``parts`` numbers from 0 to ``limit`` in rising order whose sum is ``total``, as few of them alike as fit.

    Each is one more than the one before; if the sum or the limit is too small, only every second one is, and so on.
    """
    for shift in count():
        steps = [place >> shift for place in range(parts)]
        share, rest = divmod(total - sum(steps), parts)
        numbers = tuple(step + share + (place >= parts - rest) for place, step in enumerate(steps))
        if share >= 0 and numbers[-1] <= limit:
            return numbers
    raise AssertionError("unreachable")  # because all steps are 0 in the end


@dataclass(frozen=True)
class TokenLoss:
    """A micro-batch's part of the mean over all tokens of a step that count, times the terms of an engine's mean.

    A step has ``micro_batches`` micro-batches of each of ``data_size`` data coordinates. Each gradient is ``terms``
    times an integer over a power of two, so that also a mean of three terms is exact.
    """

    data_size: int
    micro_batches: int
    terms: int

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        tokens = sum(map(sum, self.count_tokens(target)))
        return sum_over_tokens(output, target) * self.terms / tokens

    def count_tokens(self, target: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return how many tokens count in each micro-batch of each data coordinate, for targets as ``target``.

        These are words, or vectors of rows that are routed to experts.
        """
        places = len(target) if target.is_floating_point() else PLACES
        return share_tokens(places, self.data_size, self.micro_batches)

    def pad(self, batch: Batch, data_coordinate: int, micro: int) -> Batch:
        """Return the batch with padding as the target of all tokens behind the first ones, which count."""
        counted, target = self.count_tokens(batch.target)[data_coordinate][micro], batch.target.clone()
        if target.is_floating_point():
            target[counted:] = 0.0
        else:
            target.view(-1)[counted:] = PADDING
        return replace(batch, target=target)

    def run_plain(self, baseline: Baseline, micro: int) -> list[LocalResult]:
        """Return plain PyTorch's losses and gradients of micro-batch ``micro``, for each data coordinate."""

        def objective(output: Any, batch: Batch) -> Tensor:
            """Return the loss of a batch."""
            return self(output, batch.target)

        return [run_local(baseline.build_module(), batch, objective) for batch in self.list_batches(baseline, micro)]

    def list_batches(self, baseline: Baseline, micro: int) -> list[Batch]:
        """Return micro-batch ``micro`` of each data coordinate, with padding."""
        return [self.pad(baseline.batch(at, micro), at, micro) for at in range(self.data_size)]

    def certify(self, baseline: Baseline, dtype: torch.dtype, repeats: int = 1) -> Exactness:
        """Return whether the mean of all gradients of a step is exact, where each micro-batch occurs ``repeats`` times.

        The losses are linear in the outputs, whose gradients have elements in {-1, 0, 1}, over a power of two.
        """
        batches = [batch for micro in range(self.micro_batches) for batch in self.list_batches(baseline, micro)]
        objectives = ((batch, linearize(baseline, batch)) for batch in batches)
        return certify_multiples(baseline, objectives, dtype, len(batches) * repeats)


def sum_over_tokens(output: Any, target: Tensor) -> Tensor:
    """Return the sum of the losses of tokens: a cross-entropy, or the product with a target that is a vector."""
    return (output * target).sum() if target.is_floating_point() else sum_cross_entropy(output, target)


def linearize(baseline: Baseline, batch: Batch) -> Objective:
    """Return a loss that multiplies each element of the output by the absolute value of the gradient that it gets."""
    output = batch.feed(baseline.build_module()).detach().requires_grad_()
    (grad,) = torch.autograd.grad(sum_over_tokens(output, batch.target), output)

    def objective(output: Any, batch: Batch) -> Tensor:
        """Return the loss of the batch."""
        product: Tensor = (output * grad.abs()).sum() / len(batch.inputs)
        return product

    return objective


def build_loss(data_size: int) -> TokenLoss:
    """Return the loss of an engine that averages over ``data_size`` coordinates, and whose caller adds up a step."""
    return TokenLoss(data_size, len(MICRO_BATCHES), terms=data_size)


def observe_token_loss(ctx: RankContext) -> None:
    """Run forward and backward of the micro-batches of a step, and record losses and gradients."""
    engine = ctx.build_engine(optimizer=UNIT_LR_SGD, accumulation_steps=len(MICRO_BATCHES))
    compute_loss = build_loss(ctx.data_size)
    for micro in MICRO_BATCHES:
        batch = compute_loss.pad(ctx.batch(micro), ctx.data_coordinate, micro)
        with compute_loss_on_parts(ctx):
            loss = compute_loss(batch.feed(engine), batch.target)
            ctx.record("loss", {"loss": read_whole(loss)}, micro)
            engine.backward(loss)
    ctx.record("grads", engine.full_grads())
    engine.close()


def compute_loss_on_parts(ctx: RankContext) -> AbstractContextManager[Any]:
    """Return torch's ``loss_parallel`` if the model's logits are split over tp, and else a context without effect."""
    if TENSOR not in ctx.config.mesh.axes or not ctx.config.tp_plan.get("head", "").endswith("split_logits"):
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    context: AbstractContextManager[Any] = loss_parallel()
    return context


def read_whole(loss: Any) -> Tensor:
    """Return a loss as a tensor, which may be a DTensor."""
    whole: Tensor = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return whole.detach()


def judge_token_loss(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare losses and gradients bitwise with plain PyTorch's sum over all micro-batches."""
    loss = build_loss(ctx.data_size)
    rows = [loss.run_plain(ctx.baseline, micro) for micro in MICRO_BATCHES]
    for micro, row in enumerate(rows):
        yield from ctx.compare_losses(micro, row)
    exact = certify_mean(ctx, loss)
    yield from ctx.compare_reduced_grads("grads", rows, exact=exact, scale=len(MICRO_BATCHES))


def certify_mean(ctx: JudgeContext, loss: TokenLoss) -> Exactness:
    """Return whether the mean of the gradients of a step is exact in the dtypes of the cell."""
    narrowest = max(ctx.dtype, ctx.reduce_dtype, key=unit_roundoff)
    return loss.certify(ctx.baseline, narrowest, ctx.setting.accumulation_steps)


LAWS = (
    mesh_law(
        "token_loss",
        "with unequal padding on ranks and in micro-batches, the loss is one sum over one number of tokens",
        observe_token_loss,
        judge_token_loss,
        Feature.CALLER_ACCUMULATION,
        models=("tokens", "parallel_tokens", "sequence_tokens", "routed"),
        kept_because="the only law of a loss whose logits are split, and of one that counts tokens, on a mesh",
    ),
)
