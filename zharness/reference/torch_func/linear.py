"""The linear layer of ZeRO-3 as an ``autograd.Function``: it keeps its inputs, and no transposed or cast copy of them.

Stage 3 needs none of it: its promises work with torch's own ``F.linear``. It is here because DeepSpeed's stage 3 puts
such a Function in the place of ``F.linear``, and what makes one right is worth reading on its own
(deepspeedai/DeepSpeed#7913 and #7916):

* ``forward`` without ctx plus ``setup_context``: the one form that torch.func can transform. Rules for vmap and for
  forward mode are part of it, so grad, grad_and_value, jacrev, vmap, jvp, jacfwd and hessian go through.
* The state of ``torch.autocast`` is recorded in ``setup_context``, where ``torch.amp.custom_fwd`` cannot reach, and set
  again around ``backward``: to True and to False alike, also where backward is called inside another autocast. (There
  plain PyTorch lets the outer autocast decide: a float32 forward then gets bfloat16 products in its backward.)
* Where torch lacks ``setup_context``, ``linear`` runs the legacy form, ``forward(ctx, ...)``, without torch.func.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zharness.reference.torch_func import torch_fallback


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """``input @ weight.T + bias`` as ``torch.nn.functional.linear`` computes it, through ``Zero3Linear``.

    input (*, in), weight (out, in), bias (out) or None; returns (*, out), with any number of leading dimensions.
    """
    result: Tensor = torch_fallback.apply_function(
        Zero3Linear, *((input, weight) if bias is None else (input, weight, bias))
    )
    return result


class Zero3Linear(torch.autograd.Function):
    """``Zero3Linear.apply(input, weight)`` or ``.apply(input, weight, bias)``; shapes as for ``linear``."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        if bias is None:
            return input.matmul(weight.t())
        # One kernel, and one rounding, as in F.linear. Under autocast a sum after the product would end in fp32.
        rows = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t())
        return rows.reshape(*input.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        given, weight = inputs[:2]
        bias = inputs[2] if len(inputs) > 2 else None
        ctx.arguments = len(inputs)
        ctx.device = given.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device)
        ctx.autocast_dtype = torch.get_autocast_dtype(ctx.device)
        ctx.save_for_backward(given, weight, bias)
        ctx.save_for_forward(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, weight, bias = ctx.saved_tensors
        needed = (*ctx.needs_input_grad, False)
        rows, features = grad.reshape(-1, grad.shape[-1]), given.reshape(-1, given.shape[-1])
        with torch.autocast(ctx.device, ctx.autocast_dtype, enabled=ctx.autocast):
            to_input = grad.matmul(weight) if needed[0] else None
            to_weight = rows.t().matmul(features) if needed[1] else None
            to_bias = rows.sum(0) if bias is not None and needed[2] else None
        return (to_input, to_weight, to_bias)[: ctx.arguments]

    @staticmethod
    def jvp(ctx: Any, d_input: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None = None) -> Tensor:
        """The tangent of the output; a tangent that is None is zero."""
        given, weight, _ = ctx.saved_tensors
        parts = [
            d_input.matmul(weight.t()) if d_input is not None else None,
            given.matmul(d_weight.t()) if d_weight is not None else None,
            d_bias.expand(*given.shape[:-1], -1) if d_bias is not None else None,
        ]
        present = [part for part in parts if part is not None]
        return torch.stack(present).sum(0) if len(present) > 1 else present[0]

    generate_vmap_rule = True
