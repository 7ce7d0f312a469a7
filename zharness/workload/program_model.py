"""Build the model of a program from its layers, and define the modules of these layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.workload.model_shape import ModelShape, shape_after_layer
from zharness.workload.models import SAMPLES, Batch, ModelSpec
from zharness.workload.programs import Layer, LayerKind, join_words


class ProgramModelBuilder:
    """A builder that makes the modules of a program's layers, in order.

    The builder keeps track of the width of the last output, and of the weights to which a later layer may be tied.
    """

    def __init__(self) -> None:
        self._model_shape = ModelShape()
        self._tieable_weights: list[nn.Parameter] = []

    def build_chain(self, layers: Sequence[Layer]) -> Chain:
        """Build a Chain of the modules of ``layers``, which must be legal."""
        return Chain([self.build_layer(layer) for layer in layers])

    def build_layer(self, layer: Layer) -> nn.Module:
        """Build the module of ``layer``, and update the width and the weights that may be tied."""
        before = self._model_shape
        module = (
            BLOCK_CLASSES[layer.kind](self.build_chain(layer.inner))
            if layer.kind in BLOCK_CLASSES
            else self._build_leaf(layer)
        )
        self._model_shape = shape_after_layer(before, layer)
        return module

    def _build_leaf(self, layer: Layer) -> nn.Module:
        """Build the module of ``layer``, which has no inner layers."""
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
        """Record the weight of ``module``, so that later tied layers can use it, and return ``module``."""
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        self._tieable_weights.append(weight)
        return module


class Chain(nn.Module):
    """A sequence of modules, which a program's model and each of its blocks consist of.

    The forward's argument ``odd_micro_batch`` says whether the number of the micro-batch is odd. Blocks of kind
    ``sometimes`` use their inner layers only in odd micro-batches.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def forward(self, x: Tensor, odd_micro_batch: bool = False) -> Tensor:
        for module in self.children():
            x = module(x, odd_micro_batch) if isinstance(module, LayerBlock) else module(x)
        return x


class TiedLinear(nn.Module):
    """A linear layer without bias that uses the weight of an earlier layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class FrozenLinear(nn.Module):
    """A linear layer with a frozen weight.

    The forward casts the weight to the dtype of the input, because weight and input may differ in dtype under mixed
    precision.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class UncalledLinear(nn.Module):
    """A linear layer that reads the weight of its submodule as an attribute and never calls the submodule."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.owner = nn.Linear(width, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.owner.weight)


class Conv(nn.Module):
    """A convolution along the width; it maps (samples, width) to (samples, channels x width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.conv(x.unsqueeze(1))
        return convolved.flatten(1)


class UnusedParameter(nn.Module):
    """An identity module with a parameter that the forward does not use."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x


class LayerBlock(nn.Module):
    """The base class of modules that wrap a Chain of inner layers."""

    def __init__(self, inner: Chain) -> None:
        super().__init__()
        self.inner = inner


class ResidualBlock(LayerBlock):
    """A block that adds the output of its inner layers to its input."""

    def forward(self, x: Tensor, odd_micro_batch: bool) -> Tensor:
        inner: Tensor = self.inner(x, odd_micro_batch)
        return x + inner


class RepeatedBlock(LayerBlock):
    """A block that applies its inner layers twice."""

    def forward(self, x: Tensor, odd_micro_batch: bool) -> Tensor:
        output: Tensor = self.inner(self.inner(x, odd_micro_batch), odd_micro_batch)
        return output


class AlternatingBlock(LayerBlock):
    """A block that applies its inner layers in odd micro-batches, and returns its input in even micro-batches."""

    def forward(self, x: Tensor, odd_micro_batch: bool) -> Tensor:
        output: Tensor = self.inner(x, odd_micro_batch) if odd_micro_batch else x
        return output


class CheckpointBlock(LayerBlock):
    """A block that recomputes its inner layers in backward (activation checkpointing)."""

    reentrant = False

    def forward(self, x: Tensor, odd_micro_batch: bool) -> Tensor:
        output: Tensor = checkpoint(self.inner, x, odd_micro_batch, use_reentrant=self.reentrant)
        return output


class ReentrantCheckpointBlock(CheckpointBlock):
    """A block that recomputes its inner layers with torch's reentrant activation checkpointing."""

    reentrant = True


BLOCK_CLASSES: dict[LayerKind, type[LayerBlock]] = {
    LayerKind.RESIDUAL: ResidualBlock,
    LayerKind.TWICE: RepeatedBlock,
    LayerKind.SOMETIMES: AlternatingBlock,
    LayerKind.CHECKPOINT: CheckpointBlock,
    LayerKind.REENTRANT: ReentrantCheckpointBlock,
}


class ProgramModelSpec(ModelSpec):
    """The ModelSpec of a program's model.

    The initial weights are drawn once and then copied, because seeding torch's generator is slow.
    """

    def model(self, seed: int) -> nn.Module:
        return copy.deepcopy(build_initial_model(self, seed))


@lru_cache(maxsize=1)
def build_initial_model(spec: ProgramModelSpec, seed: int) -> nn.Module:
    """Build the model with initial weights drawn from ``seed``, and cache it. Callers train only copies of it."""
    return ModelSpec.model(spec, seed)


@lru_cache(maxsize=1)
def program_model_spec(layers: tuple[Layer, ...]) -> ModelSpec:
    """Return the ModelSpec of a model with the layers ``layers``.

    The name of the ModelSpec is the text of the layers; the model's batches are seeded by this name.
    """
    shape = ModelShape()
    for layer in layers:
        shape = shape_after_layer(shape, layer)

    def batch(generator: torch.Generator) -> Batch:
        source = layers[0]
        if source.kind is LayerKind.TOKENS:
            inputs = torch.randint(source.sizes[0], (SAMPLES,), generator=generator)
        else:
            inputs = torch.randn(SAMPLES, source.sizes[0], generator=generator)
        return Batch(inputs, torch.randn(SAMPLES, shape.width, generator=generator))

    return ProgramModelSpec(
        name=join_words(layers),
        summary="the model of a program",
        build=lambda: ProgramModelBuilder().build_chain(layers),
        batch=batch,
        loss=nn.functional.mse_loss,
    )
