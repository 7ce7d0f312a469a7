"""Implement ZeRO-3's linear layer as an ``autograd.Function`` that saves its inputs without transposing or casting.

This engine does not need this layer: the engine's unpack hooks work with torch's own ``F.linear``. DeepSpeed's stage 3
replaces ``F.linear`` by such a Function; this one shows what makes it correct (deepspeedai/DeepSpeed#7913 and #7916):

* ``forward`` without ctx plus ``setup_context`` is the only form that torch.func can transform. With rules for vmap and
  for forward mode, grad, grad_and_value, jacrev, vmap, jvp, jacfwd and hessian work.
* The state of ``torch.autocast`` is recorded in ``setup_context``, where ``torch.amp.custom_fwd`` has no effect, and
  restored around ``backward``, whether it was enabled or disabled, even if backward is called under another
  torch.autocast. (There plain PyTorch uses the outer autocast: a float32 forward then gets bfloat16 products in its
  backward.)
* If torch lacks ``setup_context``, ``linear`` uses the legacy form, ``forward(ctx, ...)``, without torch.func.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zharness.reference.torch_func import torch_fallback


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """Compute ``input @ weight.T + bias`` with ``Zero3Linear``, as ``torch.nn.functional.linear`` does.

    ``input`` has shape (*, in), ``weight`` (out, in), and ``bias`` (out) or is None. The result has shape (*, out),
    where * is any number of leading dimensions.
    """
    result: Tensor = torch_fallback.apply_function(
        Zero3Linear, *((input, weight) if bias is None else (input, weight, bias))
    )
    return result


class Zero3Linear(torch.autograd.Function):
    """The linear layer as a Function: call ``apply(input, weight)`` or ``apply(input, weight, bias)``."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        """Compute the output. torch.func calls this method without ctx."""
        if bias is None:
            return input.matmul(weight.t())
        # addmm rounds once, as F.linear does. Under autocast a separate addition would return fp32.
        rows = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t())
        return rows.reshape(*input.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        """Save the inputs and the state of torch.autocast for ``backward`` and ``jvp``."""
        features, weight = inputs[:2]
        bias = inputs[2] if len(inputs) > 2 else None
        ctx.arguments = len(inputs)
        ctx.device = features.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device)
        ctx.autocast_dtype = torch.get_autocast_dtype(ctx.device)
        ctx.save_for_backward(features, weight, bias)
        ctx.save_for_forward(features, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the needed gradients of input, weight and bias, under the forward's state of torch.autocast."""
        features, weight, bias = ctx.saved_tensors
        needed = (*ctx.needs_input_grad, False)
        grad_rows, rows = grad.reshape(-1, grad.shape[-1]), features.reshape(-1, features.shape[-1])
        with torch.autocast(ctx.device, ctx.autocast_dtype, enabled=ctx.autocast):
            grad_input = grad.matmul(weight) if needed[0] else None
            grad_weight = grad_rows.t().matmul(rows) if needed[1] else None
            grad_bias = grad_rows.sum(0) if bias is not None and needed[2] else None
        return (grad_input, grad_weight, grad_bias)[: ctx.arguments]

    @staticmethod
    def jvp(ctx: Any, d_input: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None = None) -> Tensor:
        """Return the tangent of the output in forward mode, where a tangent that is None counts as zero."""
        features, weight, _ = ctx.saved_tensors
        parts = [
            d_input.matmul(weight.t()) if d_input is not None else None,
            features.matmul(d_weight.t()) if d_weight is not None else None,
            d_bias.expand(*features.shape[:-1], -1) if d_bias is not None else None,
        ]
        present = [part for part in parts if part is not None]
        return torch.stack(present).sum(0) if len(present) > 1 else present[0]

    generate_vmap_rule = True
