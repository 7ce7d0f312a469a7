"""Define mutants that break the sequence axis cp. The mutants wrap DeepSpeed's Ulysses, and need DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import CONTEXT
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part

LOSS_TIMES_SIZE = "https://github.com/huggingface/transformers/issues/46775"


def on_context(
    part: Part = Part.REDUCTION,
    law: str = "mesh.training",
    parameter: str = "*",
    world_size: int = 2,
    model: str = "context",
    cause: str = "",
) -> Target:
    """Return a target on ranks of which every two neighbours split a sequence."""
    return Target(law, part, model, parameter=parameter, cause=cause, world_size=world_size, mesh="cp2")


ON_TOKENS = on_context(law="mesh.token_loss", model="context_tokens")
ON_PART = on_context(Part.LOCAL_GRADIENT, "mesh.token_loss", model="context_tokens")


class UlyssesWrapper(EngineWrapper):
    """The base class of mutants of sequence parallelism, which are right if no axis splits sequences."""

    wraps = "deepspeed"
    stages: ClassVar[tuple[int, ...]] = (0, 1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.size = config.mesh.size(CONTEXT)
        self.place = config.mesh.coordinates(dist.get_rank(), dist.get_world_size())[CONTEXT]
        if self.size > 1:
            self.spoil()

    def spoil(self) -> None:
        """Register hooks on modules; subclasses that break the forward of a part override this method."""

    def reversed_parts(self, whole: Tensor) -> Tensor:
        """Return the parts of a sequence in reversed order, from the last rank's part to the first rank's part."""
        return torch.cat(whole.chunk(self.size, dim=1)[::-1], dim=1)


@mutant(
    FaultKind.SCALE,
    on_context(),
    on_context(world_size=4),
    on_context(law="mesh.mean_gradient", model="random_context"),
    origin=Origin.MESH,
)
class DividesByTheRanksOfASequence(UlyssesWrapper):
    """Divides the gradients by the number of ranks, as if each rank had a micro-batch of its own."""

    def spoil(self) -> None:
        seams_engines.count_sequence_ranks_as_data(self.base)


@mutant(
    FaultKind.SCALE,
    on_context(),
    on_context(law="mesh.one_hot"),
    ON_TOKENS,
    origin=Origin.MESH,
    imitates=LOSS_TIMES_SIZE,
)
class MultipliesTheLossByTheRanksOfASequence(UlyssesWrapper):
    """Runs backward on the loss times the number of ranks that split a sequence."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(self.size * loss, retain_graph=retain_graph)


@mutant(FaultKind.CONTRIBUTION, on_context(), on_context(world_size=4), origin=Origin.MESH)
class ReducesOverTheDataAlone(UlyssesWrapper):
    """Sums the gradients over the ranks that have the same part of the sequence, like DeepSpeed with ``mesh_param``."""

    stages = (0,)

    def spoil(self) -> None:
        ranks = range(dist.get_world_size())
        groups = [dist.new_group(list(ranks)[place :: self.size]) for place in range(self.size)]
        seams_engines.set_sequence_data_group(groups[self.place])


@mutant(
    FaultKind.CONTRIBUTION,
    on_context(Part.LOCAL_GRADIENT),
    ON_PART,
    Target("training.trajectory", Part.LOCAL_GRADIENT, "mlp_context", "sgd", mesh="cp2"),
    Target("training.any_order", Part.LOCAL_GRADIENT, "mlp_context", "steps", mesh="cp2"),
    Target("precision.autocast_states", Part.REDUCTION, "mixed_context", mesh="cp2"),
    Target("precision.weights_of_two_dtypes", Part.REDUCTION, "adapted_context", mesh="cp2"),
    origin=Origin.MESH,
)
class LosesTheGradientOfTheLastPart(UlyssesWrapper):
    """Gives the loss of the last part of a sequence no gradient."""

    def spoil(self) -> None:
        if self.place == self.size - 1:
            self.module.register_forward_hook(lambda _module, _inputs, output: output.detach() + 0 * output)


@mutant(FaultKind.CONTRIBUTION, on_context(Part.FORWARD), origin=Origin.MESH)
class DropsTheLastPartOfTheKeys(UlyssesWrapper):
    """Zeroes the keys of attention in the last part of a sequence."""

    def spoil(self) -> None:
        if self.place == self.size - 1:
            change_inputs(self.module, lambda query, key, value: (query, 0 * key, value))


@mutant(FaultKind.SHARDS, on_context(Part.FORWARD), origin=Origin.MESH)
class SplitsSequencesInReversedOrder(UlyssesWrapper):
    """Gives the last rank the first part of a sequence, and joins the outputs in the same reversed order."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.size == 1:
            return self.base(*args, **kwargs)
        return self.reversed_parts(self.base(*map(self.reversed_parts, args), **kwargs))


@mutant(
    FaultKind.SHARDS,
    on_context(Part.FORWARD),
    Target("training.forward_alone", Part.FORWARD, "mlp_context", "eval", mesh="cp2"),
    origin=Origin.MESH,
)
class JoinsOutputsInReversedOrder(UlyssesWrapper):
    """Joins the parts of the output in reversed order, from the last rank's part to the first rank's part."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return output if self.size == 1 else self.reversed_parts(output)


@mutant(FaultKind.CONTRIBUTION, on_context(Part.FORWARD), origin=Origin.MESH)
class AttendsWithinEachPart(UlyssesWrapper):
    """Exchanges nothing in attention: each rank attends with all heads to its own part of the sequence alone."""

    def spoil(self) -> None:
        for attention in find_attention(self.module):
            attention.register_forward_hook(lambda module, inputs, _output: module.attention.local_attn(*inputs))


@mutant(FaultKind.SHARDS, on_context(Part.FORWARD), origin=Origin.MESH)
class ExchangesKeysForOtherHeads(UlyssesWrapper):
    """Gives each rank the keys of other heads than the heads of its queries."""

    def spoil(self) -> None:
        change_inputs(self.module, lambda query, key, value: (query, key.flip(2), value))


@mutant(FaultKind.RANKS, on_context(Part.FORWARD), origin=Origin.MESH)
class SplitsTheSequenceOfAnotherRank(UlyssesWrapper):
    """Gives the ranks of a sequence different samples, as if each of these ranks were a rank of the data."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(args[0].roll(self.place, 0), *args[1:], **kwargs)


def find_attention(module: nn.Module) -> list[Any]:
    """Return the modules around DeepSpeed's DistributedAttention."""
    return [each for each in module.modules() if hasattr(getattr(each, "attention", None), "local_attn")]


def change_inputs(module: nn.Module, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    """Pass query, key and value of every attention through ``change`` before they are exchanged."""
    for attention in find_attention(module):
        attention.register_forward_pre_hook(lambda _module, inputs: change(*inputs))
