"""Stand in for ``deepspeed.runtime.zero.linear`` with the reference engine's ``Zero3Linear``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zharness.reference.torch_func.linear import Zero3Linear


class LinearFunctionForZeroStage3(Zero3Linear):
    """``Zero3Linear`` with the attributes in which DeepSpeed's Function records the state of torch.autocast."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        """Save the inputs and the state of torch.autocast for ``backward``."""
        Zero3Linear.setup_context(ctx, inputs, output)
        ctx._fwd_used_autocast = ctx.autocast
        ctx._dtype = ctx.autocast_dtype if ctx.autocast else None

    generate_vmap_rule = True


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Compute ``input @ weight.T + bias``; ``input`` has shape (*, in), ``weight`` (out, in), ``bias`` (out)."""
    arguments = (input, weight) if bias is None else (input, weight, bias)
    result: Tensor = LinearFunctionForZeroStage3.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class LinearModuleForZeroStage3(nn.Linear):
    """``torch.nn.Linear`` that computes with ``LinearFunctionForZeroStage3``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return ``zero3_linear_wrap`` of the input and this module's parameters."""
        return zero3_linear_wrap(input, self.weight, self.bias)
