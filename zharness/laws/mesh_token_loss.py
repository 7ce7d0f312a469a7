"""Define the law mesh.token_loss: a loss over all tokens that count, divided once by their number, on every mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from zharness.engines.protocol import Feature
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.optimizers import UNIT_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.laws.mesh import mesh_law
from zharness.mesh import TENSOR
from zharness.parity import Comparison
from zharness.parity.baseline import Baseline, LocalResult, run_local
from zharness.workload import Batch
from zharness.workload.exact_tokens import PADDING, sum_cross_entropy

# The tokens that count in the micro-batches of a step, for even and odd data coordinates: a step has the first two of
# them, or all four. Ranks have different numbers of them, so that a mean of the ranks' means is another number, and all
# of them, as those of one coordinate of 0, have a power of two.
COUNTED_TOKENS = ((3, 1, 4, 0), (5, 7, 8, 4))  # of 8 or more, whose targets are words
COUNTED_ROWS = ((1, 2), (4, 1))  # of 4 that are routed to experts, whose targets are vectors
MICRO_BATCHES = range(2)


def count_tokens(target: Tensor, data_coordinate: int) -> tuple[int, ...]:
    """Return how many tokens count in each micro-batch of a data coordinate, for targets as ``target``."""
    return (COUNTED_ROWS if target.is_floating_point() else COUNTED_TOKENS)[data_coordinate % 2]


def pad(batch: Batch, data_coordinate: int, micro: int) -> Batch:
    """Return the batch with padding as the target of all tokens behind the first ones, which count."""
    counted, target = count_tokens(batch.target, data_coordinate)[micro], batch.target.clone()
    if target.is_floating_point():
        target[counted:] = 0.0
    else:
        target.view(-1)[counted:] = PADDING
    return replace(batch, target=target)


@dataclass(frozen=True)
class TokenLoss:
    """A micro-batch's part of the mean over all tokens of a step that count, times the terms of an engine's mean.

    A step has ``micro_batches`` micro-batches of each of ``data_size`` data coordinates.
    """

    data_size: int
    micro_batches: int
    terms: int

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        tokens = sum(sum(count_tokens(target, at)[: self.micro_batches]) for at in range(self.data_size))
        return sum_over_tokens(output, target) * self.terms / tokens

    def run_plain(self, baseline: Baseline, micro: int) -> list[LocalResult]:
        """Return plain PyTorch's losses and gradients of micro-batch ``micro``, for each data coordinate."""

        def objective(output: Any, batch: Batch) -> Tensor:
            """Return the loss of a batch."""
            return self(output, batch.target)

        batches = [pad(baseline.batch(at, micro), at, micro) for at in range(self.data_size)]
        return [run_local(baseline.build_module(), batch, objective) for batch in batches]


def sum_over_tokens(output: Any, target: Tensor) -> Tensor:
    """Return the sum of the losses of tokens: a cross-entropy, or the product with a target that is a vector."""
    return (output * target).sum() if target.is_floating_point() else sum_cross_entropy(output, target)


def build_loss(data_size: int) -> TokenLoss:
    """Return the loss of an engine that averages over ``data_size`` coordinates, and whose caller adds up a step."""
    return TokenLoss(data_size, len(MICRO_BATCHES), terms=data_size)


def observe_token_loss(ctx: RankContext) -> None:
    """Run forward and backward of the micro-batches of a step, and record losses and gradients."""
    engine = ctx.build_engine(optimizer=UNIT_LR_SGD, accumulation_steps=len(MICRO_BATCHES))
    compute_loss = build_loss(ctx.data_size)
    for micro in MICRO_BATCHES:
        batch = pad(ctx.batch(micro), ctx.data_coordinate, micro)
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
    rows = [build_loss(ctx.data_size).run_plain(ctx.baseline, micro) for micro in MICRO_BATCHES]
    for micro, row in enumerate(rows):
        yield from ctx.compare_losses(micro, row)
    # A loss is linear in the output: its gradient has elements in {-1, 0, 1}, over a power of two.
    exact = ctx.certify_exactness(MICRO_BATCHES, objective=sum_of_logits)
    yield from ctx.compare_reduced_grads("grads", rows, exact=exact, scale=len(MICRO_BATCHES))


def sum_of_logits(output: Tensor, batch: Batch) -> Tensor:
    """Return a loss whose sums are at least as large as those of the losses of any targets."""
    return output.sum() / len(batch.inputs)


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
