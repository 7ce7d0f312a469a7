"""Define the law precision.output_containers: in low precision, an engine returns the container of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from zharness.errors import EngineContractError
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.optimizers import ZERO_LR_SGD
from zharness.law_kit.rank_context import RankContext
from zharness.laws.backward_outputs import OUTPUT_CONTAINERS, Pack, note_types, require_type
from zharness.laws.precision.common import INNER, plan_inner_modules
from zharness.parity import Comparison, Tier


class PackingModel(nn.Module):
    """A model that returns the output of the module ``inner`` in a container."""

    def __init__(self, inner: nn.Module, pack: Pack) -> None:
        super().__init__()
        self.inner = inner
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        """Return the container that ``pack`` makes of the output and the sum of its columns."""
        output = self.inner(x)
        return self.pack(output, output.sum(dim=1))


def observe_output_containers(ctx: RankContext) -> None:
    """Train one micro-batch with the output in the container of the law variant, and record loss and gradients.

    Raises EngineContractError if the engine returns a container of another type than the model.
    """
    pack, unpack = OUTPUT_CONTAINERS[ctx.variant]
    pack_and_note, made = note_types(pack)
    model, batch = PackingModel(ctx.spec.model(ctx.seed), pack_and_note), ctx.batch(0)
    engine = ctx.build_engine_around(model, optimizer=ZERO_LR_SGD, **plan_inner_modules(ctx))
    packed = engine(batch.inputs)
    if not made:
        raise EngineContractError("the engine's forward did not call the model's")
    require_type(packed, made[-1])
    loss = ctx.spec.loss(unpack(packed), batch.target)
    ctx.record("loss", {"loss": loss})
    engine.backward(loss)
    ctx.record("grads", {name.removeprefix(INNER): grad for name, grad in engine.full_grads().items()})
    engine.close()


def judge_output_containers(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the loss with that of plain PyTorch, and the gradients with the mean over ranks."""
    local = ctx.compute_local_grads(0)
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local])


LAWS = (
    Law(
        name="precision.output_containers",
        statement="in low precision, a forward returns the model's container, and gradients are plain PyTorch's",
        tier=Tier.STAGED,
        models=("mlp", "mixed"),
        observe=observe_output_containers,
        judge=judge_output_containers,
        dtypes=("bf16", "fp16"),  # the law backward.outputs covers fp32
        variants=tuple(map(Variant, OUTPUT_CONTAINERS)),
        kept_because="the only low-precision outputs in containers, which an engine that casts outputs has to rebuild",
    ),
)
