"""Define mutants of dropout on a mesh, around FSDP2 whose dropout masks are right on a CPU too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mesh import TENSOR
from zharness.mutants.mesh import MeshWrapper, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part
from zharness.workload.exact_heads import Dropout, draw_mask


def on_dropout(model: str, part: Part = Part.FORWARD, parameter: str = "*", variant: str = "") -> Target:
    """Return a target of the law mesh.dropout."""
    return on_mesh("mesh.dropout", part, model, parameter=parameter, variant=variant)


class DrawsForEachPart(MeshWrapper):
    """FSDP2 that draws the dropout of a part of the activations from a generator of this rank of tp.

    torch's DTensor does so only on a GPU. ``sequence_parallel_to_tensor`` is the word of plans for such a dropout.
    """

    def spoil_modules(self) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, Dropout):
                self.spoil_dropout(module, self.config.tp_plan.get(name) == "sequence_parallel_to_tensor")

    def spoil_dropout(self, dropout: Dropout, is_split: bool) -> None:
        """Make a dropout draw for this rank's part; subclasses override this method with a fault."""
        if is_split:
            dropout.draw = self.draw_for(self.coordinates[TENSOR])

    def draw_for(self, place: int) -> Draw:
        """Return a function that draws a mask from the state of torch's generator and the number ``place``."""
        return Draw(place)


class Draw:
    """Draws a mask with a seed that is a random number from torch's generator, plus ``place``."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __call__(self, activations: Tensor) -> Tensor:
        seed = int(torch.randint(1 << 30, ()))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed + self.place)
            return draw_mask(activations)


class DrawFromASeed(Draw):
    """Draws the mask of the seed ``place`` in each call, independent of the state of torch's generator."""

    def __call__(self, activations: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.place)
            return draw_mask(activations)


class DrawAnew(DrawFromASeed):
    """Draws another mask in each call, independent of the state of torch's generator."""

    def __call__(self, activations: Tensor) -> Tensor:
        self.place += 1
        return super().__call__(activations)


@mutant(
    FaultKind.RANKS, on_dropout("dropped_sequence", parameter="masks of drop_*", variant="masks"), origin=Origin.MESH
)
class DrawsOneMaskForAllParts(DrawsForEachPart):
    """In one of two dropouts, drops the same elements in the sequence parts of all ranks of tp."""

    def spoil_dropout(self, dropout: Dropout, is_split: bool) -> None:
        if is_split:
            is_last = dropout is self.module.get_submodule("drop_mlp")
            dropout.draw = self.draw_for(0 if is_last else self.coordinates[TENSOR])


@mutant(FaultKind.RANKS, on_dropout("dropped_heads", parameter="masks of drop_*", variant="masks"), origin=Origin.MESH)
class DrawsOtherMasksOnEachTensorRank(DrawsForEachPart):
    """On each rank of tp, drops other elements of activations that all ranks of tp have."""

    def spoil_dropout(self, dropout: Dropout, is_split: bool) -> None:
        dropout.draw = self.draw_for(self.coordinates[TENSOR])


@mutant(
    FaultKind.GRAPH,
    on_dropout("dropped_sequence", Part.LOCAL_GRADIENT, "mask of drop_*", "recomputed"),
    origin=Origin.MESH,
)
class RecomputesWithANewMaskOfItsPart(DrawsForEachPart):
    """In a recomputation, drops other elements of a part of the sequence than the forward did."""

    def spoil_dropout(self, dropout: Dropout, is_split: bool) -> None:
        dropout.draw = DrawAnew(100 * self.coordinates[TENSOR]) if is_split else dropout.draw


@mutant(FaultKind.CONTRIBUTION, on_dropout("dropped_sequence", Part.LOCAL_GRADIENT), origin=Origin.MESH)
class BackwardPassesDroppedElements(DrawsForEachPart):
    """Ignores the dropout mask in the backward of the second part of the sequence."""

    def spoil_modules(self) -> None:
        super().spoil_modules()
        if self.coordinates[TENSOR] and hasattr(self.module, "drop_mlp"):
            self.hook_output("drop_mlp")

    def changed_output(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        activations: Tensor = inputs[0].to_local()
        return output.detach() + activations - activations.detach()


@mutant(FaultKind.RANKS, on_dropout("dropped_heads", parameter="masks of drop_*", variant="masks"), origin=Origin.MESH)
class SeedsDropoutByTheRankOfTheWorld(DrawsForEachPart):
    """Draws dropout from a generator that the engine has seeded by the rank, instead of the caller's generator."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            if isinstance(module, Dropout) and config.mesh.sizes:
                module.draw = DrawAnew(1000 * dist.get_rank())


@mutant(FaultKind.RANKS, on_dropout("dropped_heads", parameter="masks of drop_*", variant="masks"), origin=Origin.MESH)
class StopsDropoutOfOneTensorRankByAnEvaluation(DrawsForEachPart):
    """On the second rank of tp, drops nothing in any nn.Dropout after this dropout has run in an evaluation."""

    def spoil_modules(self) -> None:
        super().spoil_modules()
        for module in self.module.modules():
            if isinstance(module, nn.Dropout) and self.coordinates[TENSOR]:
                module.register_forward_hook(stop_after_evaluation)


def stop_after_evaluation(module: nn.Module, _inputs: Any, _output: Any) -> None:
    """Make a dropout keep all elements after it has run in evaluation mode."""
    if isinstance(module, Dropout) and not module.training:
        module.draw = torch.ones_like
