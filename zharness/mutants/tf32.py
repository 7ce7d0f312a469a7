"""Mutants that multiply float32 matrices in TF32, as GPUs do, in cells that expect full float32 precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zharness.device.float32_products import Float32Products
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import DDPWrapper, EngineWrapper
from zharness.parity import Part
from zharness.parity.certificate import round_to_bits

aten = torch.ops.aten
# The position of the first of the two factors among the arguments of each operator.
PRODUCTS: Mapping[Any, int] = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


class RoundedFactors(TorchDispatchMode):
    """A mode that rounds the factors of float32 products to TF32's 11 bits, as a GPU does, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = PRODUCTS.get(func)
        if first is not None and args[first].dtype is torch.float32:
            bits = Float32Products.TF32.factor_bits
            factors = [round_to_bits(factor, bits) for factor in args[first : first + 2]]
            args = (*args[:first], *factors, *args[first + 2 :])
        return func(*args, **(kwargs or {}))


@mutant(
    FaultKind.AUTOCAST,
    Target("training.grads", Part.FORWARD),
    Target("training.trajectory", Part.FORWARD, variant="sgd"),
    origin=Origin.PRECISION,
)
class ForwardsInTf32(EngineWrapper):
    """Runs forwards in TF32."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with RoundedFactors():
            return self.base(*args, **kwargs)


@mutant(FaultKind.AUTOCAST, Target("training.grads", Part.LOCAL_GRADIENT), origin=Origin.PRECISION)
class BackwardsInTf32(DDPWrapper):
    """Runs backwards in TF32."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with RoundedFactors():
            self.base.backward(loss, retain_graph=retain_graph)
