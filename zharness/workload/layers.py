"""The models of programs, built from their layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zharness.workload.models import SAMPLES, Batch, ModelSpec
from zharness.workload.programs import Kind, Layer, Widths, behind, words


class Builder:
    """Builds layers one after the other; it knows the width, and the weights that may be tied."""

    def __init__(self) -> None:
        self._widths = Widths()
        self._weights: list[nn.Parameter] = []

    def chain(self, layers: Sequence[Layer]) -> Chain:
        """Modules for ``layers``, which must be legal."""
        return Chain([self.one(layer) for layer in layers])

    def one(self, layer: Layer) -> nn.Module:
        """The module of one layer."""
        before = self._widths
        module = BLOCKS[layer.kind](self.chain(layer.inner)) if layer.kind in BLOCKS else self._leaf(layer)
        self._widths = behind(before, layer)
        return module

    def _leaf(self, layer: Layer) -> nn.Module:
        width, size = self._widths.width, (0, *layer.sizes)[-1]
        if layer.kind is Kind.TOKENS:
            return self._tieable(nn.Embedding(layer.sizes[0], size))
        if layer.kind in (Kind.LINEAR, Kind.MATRIX):
            return self._tieable(nn.Linear(width, size, bias=layer.kind is Kind.LINEAR))
        if layer.kind is Kind.TIED:
            shape = self._widths.fitting()
            return Tied(next(weight for weight in reversed(self._weights) if weight.shape == shape))
        simple: dict[Kind, Callable[[], nn.Module]] = {
            Kind.INPUTS: nn.Identity,
            Kind.FROZEN: lambda: Frozen(width, size),
            Kind.READ: lambda: Read(width, size),
            Kind.CONV: lambda: Conv(size),
            Kind.NORM: lambda: nn.LayerNorm(width),
            Kind.RELU: nn.ReLU,
            Kind.GELU: nn.GELU,
            Kind.UNUSED: lambda: Unused(size),
        }
        return simple[layer.kind]()

    def _tieable(self, module: nn.Linear | nn.Embedding) -> nn.Module:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        self._weights.append(weight)
        return module


class Chain(nn.Module):
    """Modules one after the other; ``odd`` says whether the micro-batch is one in which ``sometimes`` is used."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def forward(self, x: Tensor, odd: bool = False) -> Tensor:
        for module in self.children():
            x = module(x, odd) if isinstance(module, Block) else module(x)
        return x


class Tied(nn.Module):
    """A linear layer without bias in the weight of another layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Frozen(nn.Module):
    """A linear layer that is not trained; cast where it is used, as it has to be where parameters may be lowered."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class Read(nn.Module):
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


class Unused(nn.Module):
    """The identity, beside a parameter that nobody uses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    """Something around a chain."""

    def __init__(self, inner: Chain) -> None:
        super().__init__()
        self.inner = inner


class Residual(Block):
    def forward(self, x: Tensor, odd: bool) -> Tensor:
        inner: Tensor = self.inner(x, odd)
        return x + inner


class Twice(Block):
    def forward(self, x: Tensor, odd: bool) -> Tensor:
        again: Tensor = self.inner(self.inner(x, odd), odd)
        return again


class Sometimes(Block):
    def forward(self, x: Tensor, odd: bool) -> Tensor:
        used: Tensor = self.inner(x, odd) if odd else x
        return used


class Checkpoint(Block):
    reentrant = False

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        recomputed: Tensor = checkpoint(self.inner, x, odd, use_reentrant=self.reentrant)
        return recomputed


class Reentrant(Checkpoint):
    reentrant = True


BLOCKS: dict[Kind, type[Block]] = {
    Kind.RESIDUAL: Residual,
    Kind.TWICE: Twice,
    Kind.SOMETIMES: Sometimes,
    Kind.CHECKPOINT: Checkpoint,
    Kind.REENTRANT: Reentrant,
}


class Written(ModelSpec):
    """The model of a program. Its initial weights are drawn once and copied: torch's generator takes long to seed."""

    def model(self, seed: int) -> nn.Module:
        return copy.deepcopy(drawn(self, seed))


@lru_cache(maxsize=1)
def drawn(spec: Written, seed: int) -> nn.Module:
    """The model in the initial weights of ``seed``; it is copied, never trained."""
    return ModelSpec.model(spec, seed)


@lru_cache(maxsize=1)
def spec_of(layers: tuple[Layer, ...]) -> ModelSpec:
    """The model of ``layers`` as the workload has models: its batches follow from its text."""
    widths = Widths()
    for layer in layers:
        widths = behind(widths, layer)

    def batch(generator: torch.Generator) -> Batch:
        source = layers[0]
        if source.kind is Kind.TOKENS:
            inputs = torch.randint(source.sizes[0], (SAMPLES,), generator=generator)
        else:
            inputs = torch.randn(SAMPLES, source.sizes[0], generator=generator)
        return Batch(inputs, torch.randn(SAMPLES, widths.width, generator=generator))

    return Written(
        name=words(layers),
        summary="the model of a program",
        build=lambda: Builder().chain(layers),
        batch=batch,
        loss=nn.functional.mse_loss,
    )
