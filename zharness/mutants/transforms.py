"""Mutants that are wrong under torch.func, with keyword arguments, or with substituted weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zharness import torch_private
from zharness.engines import (
    EngineConfig,
    ddp,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines, seams_stage3
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, HookedParameters, in_backward
from zharness.parity import Part


@mutant(
    FaultKind.GRAPH,
    Target("torch_func.grad", Part.LOCAL_GRADIENT),
    Target("torch_func.hessian", Part.LOCAL_GRADIENT, model="exact"),
    Target("torch_func.vmap_grad", Part.LOCAL_GRADIENT, model="conv"),
    origin=Origin.GRAPHS,
    imitates=deepspeed(8026),
)
class SilentTransform(EngineWrapper):
    """Detaches its output inside a torch.func transform, so that the transform's gradient is zero."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return output.detach() if torch_private.is_transforming() else output


@mutant(
    FaultKind.GRAPH,
    Target("torch_func.grad", Part.LOCAL_GRADIENT, model="exact"),
    Target("torch_func.grad_and_value", Part.LOCAL_GRADIENT),
    Target("torch_func.has_aux", Part.LOCAL_GRADIENT),
    Target("torch_func.vjp", Part.LOCAL_GRADIENT),
    Target("torch_func.vmap", Part.LOCAL_GRADIENT),
    Target("torch_func.jvp", Part.LOCAL_GRADIENT, model="exact"),
    Target("torch_func.jacrev", Part.LOCAL_GRADIENT, model="exact"),
    Target("torch_func.jacfwd", Part.LOCAL_GRADIENT, model="exact"),
    Target("torch_func.hessian", Part.LOCAL_GRADIENT, model="exact"),
    Target("torch_func.identities", Part.LOCAL_GRADIENT, model="exact"),
    Target("torch_func.through_transforms", Part.LOCAL_GRADIENT, model="blocks"),
    origin=Origin.GRAPHS,
    imitates=deepspeed(8026),
)
class ScaledTransform(EngineWrapper):
    """Halves its output inside a torch.func transform, like an engine that divides the output by accumulation steps."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return output / 2 if torch_private.is_transforming() else output


@mutant(
    FaultKind.GRAPH,
    Target("torch_func.grad", None, cause="setup_context"),
    origin=Origin.GRAPHS,
    imitates=deepspeed(7913),
)
class LegacyFunctions(EngineWrapper):
    """Uses autograd Functions whose forward takes ``ctx``, which torch.func does not support."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.original_check = torch_private.has_setup_context
        super().__init__(model, config)
        torch_private.has_setup_context = lambda: False

    def close(self) -> None:
        torch_private.has_setup_context = self.original_check
        self.base.close()


class LinearWithoutVmapRule(torch.autograd.Function):
    """A linear layer as an autograd.Function for which torch.func.vmap has no rule."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the layer."""
        output = inputs @ weight.t()
        return output if bias is None else output + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        """Save inputs and weight for backward."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of inputs, weight and bias."""
        inputs, weight, bias = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ weight, rows.t() @ inputs.reshape(-1, inputs.shape[-1]), None if bias is None else rows.sum(0)


def apply_without_vmap_rule(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the output of a linear layer, with the arguments of torch.nn.functional.linear."""
    output: Tensor = LinearWithoutVmapRule.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return output


@mutant(
    FaultKind.GRAPH,
    Target("backward.engine_backward", None, model="mapped", cause="vmap"),
    origin=Origin.GRAPHS,
    imitates=deepspeed(8023),
)
class ReplacesLinear(EngineWrapper):
    """Replaces torch.nn.functional.linear by an autograd.Function that no forward can call under torch.func.vmap."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.original_linear = nn.functional.linear
        nn.functional.linear = apply_without_vmap_rule  # type: ignore[assignment]

    def close(self) -> None:
        nn.functional.linear = self.original_linear
        self.base.close()


@mutant_factory(
    FaultKind.GRAPH,
    Target("torch_func.through_transforms", model="blocks"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_1,
)
def reduced_once_a_backward(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, reduces a parameter's gradient once per backward, and returns this result for all later gradients.

    The result is wrong if one backward reduces several gradients of the parameter: with ``is_grads_batched`` (all rows
    equal the first), under torch.func with a module that is called twice, and with ``create_graph`` over two forwards
    (the gradient of the first forward is used for both).
    """
    engine, done = seams.build(model, config), dict[str, Tensor]()
    last_task = -1

    def wrap(reduce: seams_stage3.GradCollective) -> seams_stage3.GradCollective:
        def reduce_once(param: seams.ModelParam, full: Tensor) -> Tensor:
            nonlocal last_task
            task = in_backward()
            if task == -1:
                return reduce(param, full)
            if task != last_task:
                done.clear()
                last_task = task
            if param.name not in done:
                done[param.name] = reduce(param, full)
            return done[param.name].clone()

        return reduce_once

    seams_stage3.wrap_reduce_grad(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("torch_func.through_transforms", None, model="blocks", cause="does not require grad"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_2,
)
def transforms_read_detached(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, reads weights as constants inside torch.func, so that no wrapper tensor outlives its transform.

    ``torch.func.grad`` with respect to the engine's input is right, but a penalty on this gradient contributes nothing
    to the gradients of the weights. No error is raised if another loss gives the weights a gradient.
    """
    engine = seams.build(model, config)
    seams_stage3.wrap_unshard(engine, _detach_in_transforms)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("torch_func.through_transforms", None, model="blocks", cause="does not require grad"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_4,
)
def constants_in_transforms(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, treats a weight that is read inside a torch.func transform as a constant.

    A loss on a derivative that torch.func computes (for example of the output with respect to the input) gives this
    weight no gradient.
    """
    engine = seams.build(model, config)
    seams_stage3.wrap_unshard(engine, _detach_in_transforms)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("torch_func.through_transforms", None, model="blocks", cause="does not require grad"),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_6,
)
def weights_are_constants_in_transforms(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, detaches a weight that is read inside a torch.func transform from the graph of the outer backward.

    A model that takes ``torch.func.grad`` of a part of itself (forces from an energy) is trained without the gradients
    of that part.
    """
    engine = seams.build(model, config)
    seams_stage3.wrap_unshard(engine, _detach_in_transforms)
    return engine


def _detach_in_transforms(unshard: seams_stage3.Unshard) -> seams_stage3.Unshard:
    """Wrap ``unshard`` so that it returns a detached weight inside a torch.func transform."""

    def unshard_detached(value: Any) -> Any:
        full = unshard(value)
        return full.detach() if full is not value and torch_private.is_transforming() else full

    return unshard_detached


@mutant_factory(
    FaultKind.GRAPH,
    Target("torch_func.functional_call", Part.LOCAL_GRADIENT),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_3,
)
def substituted_weights_ignored(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, looks up a weight by its module and name in a table that was made at construction.

    ``torch.func.functional_call`` with other parameters computes with the engine's own parameters, and the other
    parameters get no gradient.
    """
    engine = seams.build(model, config)
    _read_own_parameters(engine, model)
    return engine


@mutant_factory(
    FaultKind.GRAPH,
    Target("torch_func.functional_call", Part.LOCAL_GRADIENT),
    wraps="reference",
    stages=(3,),
    origin=Origin.BLIND_5,
)
def own_weights_always(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stage 3, finds the parameter to unshard by its module and attribute name, as they were at construction.

    ``torch.func.functional_call`` with other weights computes with the engine's weights, which then get the gradient.
    """
    engine = seams.build(model, config)
    _read_own_parameters(engine, model)
    return engine


def _read_own_parameters(engine: ReferenceEngine, model: nn.Module) -> None:
    """Replace attribute reads of parameters, so that they return the parameters that ``model`` has at this call."""
    owned = {
        (id(module), name): parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }

    def read_owned(base: type[nn.Module]) -> Callable[[nn.Module, str], Any]:
        def read_attribute(self: nn.Module, name: str) -> Any:
            own = owned.get((id(self), name))
            return seams_stage3.unshard_if_sharded(engine, base.__getattr__(self, name) if own is None else own)

        return read_attribute

    for base, sharded_class in seams_stage3.sharded_classes(engine).items():
        sharded_class.__getattr__ = read_owned(base)  # type: ignore[method-assign]


@mutant_factory(
    FaultKind.GRAPH,
    Target("torch_func.has_aux", Part.LOCAL_GRADIENT),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_1,
)
def ddp_detaches_keywords(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Detaches tensors that are passed to DDP's forward as keyword arguments.

    Tensors from which these arguments are computed (another model's output, an input) get no gradient.
    """
    engine = ddp.factory(model, config)

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_detached(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **{k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()})

        return forward_detached

    seams_engines.wrap_forward(engine, wrap)
    return engine


@mutant(
    FaultKind.GRAPH,
    Target("double_backward.weight_penalty", model="blocks", variant="reduced_batched"),
    origin=Origin.BLIND_9,
)
class UsesOneRowOfABatch(HookedParameters):
    """If weight gradients are computed for a batch of output gradients, returns the first row's result for all rows."""

    stages = (3,)

    def changed(self, grad: Tensor | None) -> Tensor | None:  # type: ignore[override]
        if grad is None:  # autograd.grad was asked for this parameter, but nothing used it
            return None
        rows: list[Tensor] = []

        def first_row(row: Tensor) -> Tensor:
            rows.append(row)
            return rows[0]

        return torch_private.map_batch_rows(first_row, grad)
