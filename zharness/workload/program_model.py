"""The models of programs, built from their layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.workload.models import SAMPLES, Batch, ModelSpec
from zharness.workload.programs import Layer, LayerKind, ModelShape, join_words, shape_after_layer


class ProgramModelBuilder:
    """Builds layers one after the other; it knows the width, and the weights that may be tied."""

    def __init__(self) -> None:
        self._model_shape = ModelShape()
        self._tieable_weights: list[nn.Parameter] = []

    def build_chain(self, layers: Sequence[Layer]) -> Chain:
        """Modules for ``layers``, which must be legal."""
        return Chain([self.build_layer(layer) for layer in layers])

    def build_layer(self, layer: Layer) -> nn.Module:
        """The module of one layer."""
        before = self._model_shape
        module = (
            BLOCK_CLASSES[layer.kind](self.build_chain(layer.inner))
            if layer.kind in BLOCK_CLASSES
            else self._build_leaf(layer)
        )
        self._model_shape = shape_after_layer(before, layer)
        return module

    def _build_leaf(self, layer: Layer) -> nn.Module:
        width, size = self._model_shape.width, (0, *layer.sizes)[-1]
        if layer.kind is LayerKind.TOKENS:
            return self._record_tieable(nn.Embedding(layer.sizes[0], size))
        if layer.kind in (LayerKind.LINEAR, LayerKind.MATRIX):
            return self._record_tieable(nn.Linear(width, size, bias=layer.kind is LayerKind.LINEAR))
        if layer.kind is LayerKind.TIED:
            shape = self._model_shape.find_tieable_weight()
            return TiedLinear(next(weight for weight in reversed(self._tieable_weights) if weight.shape == shape))
        simple: dict[LayerKind, Callable[[], nn.Module]] = {
            LayerKind.INPUTS: nn.Identity,
            LayerKind.FROZEN: lambda: FrozenLinear(width, size),
            LayerKind.READ: lambda: UncalledLinear(width, size),
            LayerKind.CONV: lambda: Conv(size),
            LayerKind.NORM: lambda: nn.LayerNorm(width),
            LayerKind.RELU: nn.ReLU,
            LayerKind.GELU: nn.GELU,
            LayerKind.UNUSED: lambda: UnusedParameter(size),
        }
        return simple[layer.kind]()

    def _record_tieable(self, module: nn.Linear | nn.Embedding) -> nn.Module:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        self._tieable_weights.append(weight)
        return module


class Chain(nn.Module):
    """Modules one after the other; ``odd`` says whether the micro-batch is one in which ``sometimes`` is used."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def forward(self, x: Tensor, odd: bool = False) -> Tensor:
        for module in self.children():
            x = module(x, odd) if isinstance(module, LayerBlock) else module(x)
        return x


class TiedLinear(nn.Module):
    """A linear layer without bias in the weight of another layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class FrozenLinear(nn.Module):
    """A linear layer that is not trained; cast where it is used, as it has to be where parameters may be lowered."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class UncalledLinear(nn.Module):
    """A matrix that is a module of its own, never called: its weight is read by attribute."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.owner = nn.Linear(width, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.owner.weight)


class Conv(nn.Module):
    """A convolution along the width: (samples, width) to (samples, channels x width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.conv(x.unsqueeze(1))
        return convolved.flatten(1)


class UnusedParameter(nn.Module):
    """The identity, beside a parameter that nobody uses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x


class LayerBlock(nn.Module):
    """Something around a chain."""

    def __init__(self, inner: Chain) -> None:
        super().__init__()
        self.inner = inner


class ResidualBlock(LayerBlock):
    def forward(self, x: Tensor, odd: bool) -> Tensor:
        inner: Tensor = self.inner(x, odd)
        return x + inner


class RepeatedBlock(LayerBlock):
    def forward(self, x: Tensor, odd: bool) -> Tensor:
        again: Tensor = self.inner(self.inner(x, odd), odd)
        return again


class AlternatingBlock(LayerBlock):
    def forward(self, x: Tensor, odd: bool) -> Tensor:
        used: Tensor = self.inner(x, odd) if odd else x
        return used


class CheckpointBlock(LayerBlock):
    reentrant = False

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        recomputed: Tensor = checkpoint(self.inner, x, odd, use_reentrant=self.reentrant)
        return recomputed


class ReentrantCheckpointBlock(CheckpointBlock):
    reentrant = True


BLOCK_CLASSES: dict[LayerKind, type[LayerBlock]] = {
    LayerKind.RESIDUAL: ResidualBlock,
    LayerKind.TWICE: RepeatedBlock,
    LayerKind.SOMETIMES: AlternatingBlock,
    LayerKind.CHECKPOINT: CheckpointBlock,
    LayerKind.REENTRANT: ReentrantCheckpointBlock,
}


class ProgramModelSpec(ModelSpec):
    """The model of a program. Its initial weights are drawn once and copied: torch's generator takes long to seed."""

    def model(self, seed: int) -> nn.Module:
        return copy.deepcopy(build_initial_model(self, seed))


@lru_cache(maxsize=1)
def build_initial_model(spec: ProgramModelSpec, seed: int) -> nn.Module:
    """The model in the initial weights of ``seed``; it is copied, never trained."""
    return ModelSpec.model(spec, seed)


@lru_cache(maxsize=1)
def program_model_spec(layers: tuple[Layer, ...]) -> ModelSpec:
    """The model of ``layers`` as the workload has models: its batches follow from its text."""
    widths = ModelShape()
    for layer in layers:
        widths = shape_after_layer(widths, layer)

    def batch(generator: torch.Generator) -> Batch:
        source = layers[0]
        if source.kind is LayerKind.TOKENS:
            inputs = torch.randint(source.sizes[0], (SAMPLES,), generator=generator)
        else:
            inputs = torch.randn(SAMPLES, source.sizes[0], generator=generator)
        return Batch(inputs, torch.randn(SAMPLES, widths.width, generator=generator))

    return ProgramModelSpec(
        name=join_words(layers),
        summary="the model of a program",
        build=lambda: ProgramModelBuilder().build_chain(layers),
        batch=batch,
        loss=nn.functional.mse_loss,
    )
