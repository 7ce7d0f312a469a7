"""Define the law mesh.token_loss: on every mesh, a loss is the sum over all counted tokens divided by their number."""

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
PLACES = 8  # token positions of a micro-batch that may count: every model has at least as many


@cache
def share_tokens(places: int, data_size: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of counted tokens, of ``places`` in a micro-batch, for each data coordinate and micro-batch.

    The sum of these numbers is a power of two, so a division by the sum rounds nothing. If possible, all micro-batches
    have different numbers. Otherwise the data coordinates have different numbers, and also the micro-batches of each
    data coordinate, as far as ``places`` allows. So the mean of the means of micro-batches, or of data coordinates,
    differs from the mean over all tokens.
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
    """Return ``parts`` numbers from 0 to ``limit`` in rising order, with the sum ``total`` and the fewest equal ones.

    Each number is one more than the previous number. If the sum or the limit is too small for this, only every second
    number is larger than the previous one, and so on.
    """
    for shift in count():
        steps = [place >> shift for place in range(parts)]
        share, rest = divmod(total - sum(steps), parts)
        numbers = tuple(step + share + (place >= parts - rest) for place, step in enumerate(steps))
        if share >= 0 and numbers[-1] <= limit:
            return numbers
    raise AssertionError("unreachable")  # because all steps become 0 after enough shifts


@dataclass(frozen=True)
class TokenLoss:
    """A micro-batch's part of the mean over a step's counted tokens, times the number of terms in an engine's mean.

    A step has ``micro_batches`` micro-batches on each of ``data_size`` data coordinates. Each gradient is ``terms``
    times an integer over a power of two, so even a mean of three terms is exact.
    """

    data_size: int
    micro_batches: int
    terms: int

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        tokens = sum(map(sum, self.count_tokens(target)))
        return sum_over_tokens(output, target) * self.terms / tokens

    def count_tokens(self, target: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return how many tokens count in each micro-batch of each data coordinate, for targets shaped like ``target``.

        A target is the class of a token, or a vector for each row that is routed to experts.
        """
        places = len(target) if target.is_floating_point() else PLACES
        return share_tokens(places, self.data_size, self.micro_batches)

    def pad(self, batch: Batch, data_coordinate: int, micro: int) -> Batch:
        """Return the batch in which only the first tokens count, and all later tokens have padding as their target."""
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

        The losses are linear in the outputs. The outputs' gradients have elements in {-1, 0, 1} over a power of two.
        """
        batches = [batch for micro in range(self.micro_batches) for batch in self.list_batches(baseline, micro)]
        objectives = ((batch, linearize(baseline, batch)) for batch in batches)
        return certify_multiples(baseline, objectives, dtype, len(batches) * repeats)


def sum_over_tokens(output: Any, target: Tensor) -> Tensor:
    """Return the sum of the losses of tokens: a cross-entropy, or the product with targets that are vectors."""
    return (output * target).sum() if target.is_floating_point() else sum_cross_entropy(output, target)


def linearize(baseline: Baseline, batch: Batch) -> Objective:
    """Return a loss that multiplies each element of the output by the absolute value of the element's gradient."""
    output = batch.feed(baseline.build_module()).detach().requires_grad_()
    (grad,) = torch.autograd.grad(sum_over_tokens(output, batch.target), output)

    def objective(output: Any, batch: Batch) -> Tensor:
        """Return the loss of the batch."""
        product: Tensor = (output * grad.abs()).sum() / len(batch.inputs)
        return product

    return objective


def build_loss(data_size: int) -> TokenLoss:
    """Return the loss for an engine that averages over ``data_size`` coordinates, and sums micro-batches of a step."""
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
    """Return torch's ``loss_parallel`` if the model's logits are split over tp, else a context without effect."""
    if TENSOR not in ctx.config.mesh.axes or not ctx.config.tp_plan.get("head", "").endswith("split_logits"):
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    context: AbstractContextManager[Any] = loss_parallel()
    return context


def read_whole(loss: Any) -> Tensor:
    """Return a loss, which may be a DTensor, as a plain full tensor."""
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
        "with unequal padding, the loss is the sum over all tokens of a step on all ranks, divided by their number",
        observe_token_loss,
        judge_token_loss,
        Feature.CALLER_ACCUMULATION,
        models=("tokens", "parallel_tokens", "sequence_tokens", "routed"),
        kept_because="the only law on a mesh of a loss with split logits, and of a loss that counts tokens",
    ),
)
