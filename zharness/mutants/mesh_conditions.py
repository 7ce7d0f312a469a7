"""Define mutants of a mesh that are wrong under a condition: frozen weights, after a load, or in an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from zharness.mesh import TENSOR
from zharness.mutants.mesh import MeshWrapper, local_grad, on_mesh
from zharness.mutants.mesh_context import UlyssesWrapper, find_attention, on_context
from zharness.mutants.mesh_dropout import DrawsForEachPart, on_dropout
from zharness.mutants.mesh_experts import ExpertsWrapper, on_experts
from zharness.mutants.mesh_wire import ReducesOverTensorRanksInBf16, on_wire
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part
from zharness.workload.exact_heads import Dropout


class ScaleGradient(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def scale_input_gradient_if_frozen(factor: float) -> Any:
    """Return a forward pre-hook that scales the gradient of the input of a module with a frozen weight."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Pass the first input through ScaleGradient if it needs a gradient."""
        is_frozen = not next(module.parameters()).requires_grad
        if not (is_frozen and inputs[0].requires_grad):
            return None
        scaled: Tensor = ScaleGradient.apply(inputs[0], factor)  # type: ignore[no-untyped-call]
        return (scaled, *inputs[1:])

    return hook


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.frozen", Part.REDUCTION, "heads"), origin=Origin.MESH)
class FrozenColumnsSumNoInputGradient(MeshWrapper):
    """Halves the gradient that a column-wise layer with a frozen weight gives its input."""

    def spoil_modules(self) -> None:
        for name, word in self.config.tp_plan.items():
            if word == "colwise":
                self.module.get_submodule(name).register_forward_pre_hook(scale_input_gradient_if_frozen(0.5))


@mutant(
    FaultKind.CONTRIBUTION,
    on_context(Part.LOCAL_GRADIENT, "mesh.frozen"),
    on_context(Part.LOCAL_GRADIENT, "mesh.frozen", world_size=4),
    origin=Origin.MESH,
)
class FrozenLayersLoseTheGradientOfTheSecondPart(UlyssesWrapper):
    """On the second part of a sequence, gives the input of a linear layer with a frozen weight no gradient."""

    def spoil(self) -> None:
        for module in self.module.modules() if self.place else ():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(scale_input_gradient_if_frozen(0.0))


@mutant(FaultKind.CONTRIBUTION, on_experts(law="mesh.frozen"), origin=Origin.MESH)
class TokensGetNoGradientFromFrozenExperts(ExpertsWrapper):
    """Gives the tokens of experts with frozen weights no gradient."""

    def spoil(self, layer: Any) -> None:
        layer.experts.register_forward_pre_hook(scale_input_gradient_if_frozen(0.0))


def round_without_gradients(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    """Return the output rounded to bf16 if no gradient is recorded; this is a forward hook."""
    return output if torch.is_grad_enabled() else output.bfloat16().to(output.dtype)


@mutant(FaultKind.REDUCE_DTYPE, on_mesh("mesh.evaluation", Part.FORWARD, "stepped_heads"), origin=Origin.MESH)
class SumsRowsInBf16InEvaluation(MeshWrapper):
    """In a forward without gradients, rounds the sums of row-wise layers to bf16."""

    def spoil_modules(self) -> None:
        for name, word in self.config.tp_plan.items():
            if word.startswith("rowwise"):
                self.module.get_submodule(name).register_forward_hook(round_without_gradients)


@mutant(FaultKind.REDUCE_DTYPE, on_experts(Part.FORWARD, "mesh.evaluation", "output"), origin=Origin.MESH)
class ReturnsTokensInBf16InEvaluation(ExpertsWrapper):
    """In a forward without gradients, rounds to bf16 the tokens that experts return."""

    def spoil(self, layer: Any) -> None:
        layer.experts.register_forward_hook(round_without_gradients)


@mutant(
    FaultKind.STALE,
    on_context(Part.FORWARD, "mesh.evaluation", "output", model="stepped_context"),
    origin=Origin.MESH,
)
class AttendsToTheLengthOfTheFirstForward(UlyssesWrapper):
    """Zeroes the keys of attention beyond the length of the sequence of the first forward."""

    length: int | None = None

    def spoil(self) -> None:
        for attention in find_attention(self.module):
            attention.register_forward_pre_hook(self.shorten)

    def shorten(self, _module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return query, key and value with zeros for the keys beyond the first length."""
        query, key, value = inputs
        self.length = self.length or key.shape[1]
        key = key.clone()
        key[:, self.length :] = 0
        return query, key, value


@mutant(
    FaultKind.CONTRIBUTION,
    Target("mesh.any_order", Part.FORWARD, "stepped_context", "steps", mesh="cp2"),
    origin=Origin.MESH,
)
class TakesTheFirstPartOfKeywords(UlyssesWrapper):
    """Gives each rank the first part of a sequence that is passed by keyword."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **{name: self.repeat_first(value) for name, value in kwargs.items()})

    def repeat_first(self, whole: Tensor) -> Tensor:
        """Return a sequence in which the first part of ``whole`` replaces every part."""
        return torch.cat([whole.chunk(self.size, dim=1)[0]] * self.size, dim=1) if self.size > 1 else whole


class KnowsLoads(MeshWrapper):
    """The base class of mutants that are wrong after a load."""

    is_loaded: bool = False

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.is_loaded = True


@mutant(
    FaultKind.CONTRIBUTION,
    on_mesh("mesh.any_order_clipped", Part.REDUCTION, "stepped_sequence"),
    origin=Origin.MESH,
)
class SequenceLayersKeepOnePartAfterALoad(KnowsLoads):
    """After a load, uses only the first part's gradient in layers that work on parts of a sequence."""

    def spoil_modules(self) -> None:
        for name, word in self.config.tp_plan.items():
            if word == "sequence_parallel":
                self.hook_output(name)

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        if self.is_loaded and self.coordinates[TENSOR] and output.requires_grad:
            output.register_hook(torch.zeros_like)
        return output


@mutant(
    FaultKind.CONTRIBUTION,
    on_mesh("mesh.any_order", Part.REDUCTION, "stepped_heads", variant="accumulated"),
    origin=Origin.MESH,
)
class HalvesSplitGradientsAfterALoadAndNoSync(KnowsLoads):
    """After a load, halves the gradients of weights that tp splits if the step has no_sync blocks."""

    blocks: int = 0

    def no_sync(self) -> Any:
        self.blocks += self.is_loaded
        return self.base.no_sync()

    def zero_grad(self) -> None:
        self.base.zero_grad()
        self.blocks = 0

    def full_grads(self) -> dict[str, Tensor]:
        self.halve()
        return cast(dict[str, Tensor], self.base.full_grads())

    def step(self) -> None:
        self.halve()
        self.base.step()

    def halve(self) -> None:
        """Halve the gradients of split weights once for the no_sync blocks of a step."""
        if self.blocks:
            self.blocks = 0
            for param in self.split_params():
                if param.grad is not None:
                    local_grad(param).mul_(0.5)


@mutant(
    FaultKind.CLIPPING,
    on_mesh("mesh.norm", Part.REDUCTION, "sequence", parameter="norm", variant="limit_above_the_norm"),
    origin=Origin.MESH,
)
class ScalesSmallGradientsUp(MeshWrapper):
    """Multiplies gradients by the clipping limit over their norm, even if the norm is below the limit."""

    def step(self) -> None:
        norm = self.norm()
        if self.config.clip is not None and 0 < norm < self.config.clip:
            for _, param in self.params():
                if param.grad is not None:
                    local_grad(param).mul_(self.config.clip / norm)
        self.base.step()

    def norm(self) -> float:
        """Return the norm of all gradients."""
        grads = self.base.full_grads().values()
        return float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()) if grads else 0.0


@mutant(FaultKind.REDUCE_DTYPE, on_wire("gradients along tp"), origin=Origin.MESH)
class ReducesOverTensorRanksInBf16FromTheSecondStepOn(ReducesOverTensorRanksInBf16):
    """From the second step on, reduces gradients of layers on a part of the sequence over tp again, in bfloat16."""

    steps_made: int = 0

    def step(self) -> None:
        self.base.step()
        self.steps_made += 1

    def spoil_gradients(self) -> None:
        if self.steps_made:
            super().spoil_gradients()


@mutant(
    FaultKind.RANKS, on_dropout("dropped_sequence", parameter="masks of drop_*", variant="masks"), origin=Origin.MESH
)
class DrawsOneMaskForAllPartsAfterALoad(DrawsForEachPart):
    """After a load, drops the same elements in the sequence parts of all ranks of tp."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        for module in self.module.modules():
            if isinstance(module, Dropout):
                module.draw = self.draw_for(0)


@mutant(
    FaultKind.OPTIMIZER,
    on_mesh("mesh.any_order", Part.OPTIMIZER, "stepped_heads", parameter="out.weight/*", variant="steps"),
    origin=Origin.MESH,
)
class RowsDoNotDecay(MeshWrapper):
    """Leaves the weights of row-wise layers out of weight decay."""

    @torch.no_grad()
    def step(self) -> None:
        rows = [name for name, word in self.config.tp_plan.items() if word.startswith("rowwise")]
        names = {param: name for name, param in self.params()}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if names[param].rpartition(".")[0] in rows and param.grad is not None:
                    local_grad(param).sub_(param.to_local(), alpha=group["weight_decay"])
        self.base.step()
