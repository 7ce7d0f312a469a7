"""Mutants that do not reduce gradients over ranks, or whose reduction is wrong by a factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    Reduction,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines, seams_stage3
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper, HookedParameters
from zharness.parity import Part


@mutant(
    FaultKind.CONTRIBUTION,
    Target("training.grads", model="transformer"),
    Target("training.one_hot_rank", model="conv"),
    origin=Origin.CONTRIBUTIONS,
    imitates=deepspeed(7665),
)
class NeverReduces(EngineWrapper):
    """Does not reduce gradients: each rank keeps the gradient of its own micro-batch."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.base.no_sync():
            return self.base(*args, **kwargs)


@mutant(FaultKind.CONTRIBUTION, Target("training.one_hot_rank"), origin=Origin.CONTRIBUTIONS)
class ReducesNothingAtStage3(EngineWrapper):
    """Does not reduce gradients: each rank keeps its shard of its own gradient, divided as for a mean."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        divisor = seams.divisor(self.base)

        def keep_own_shard(param: seams.ModelParam, full: Tensor) -> Tensor:
            start, stop = param.layout.shard_bounds(dist.get_rank())
            shard = full.new_zeros(param.layout.shard_length)
            shard[: stop - start] = full.reshape(-1)[start:stop] / divisor
            return shard

        seams_stage3.replace_reduce_grad(self.base, keep_own_shard)


@mutant(FaultKind.CONTRIBUTION, Target("training.grads", parameter="first.weight"), origin=Origin.CONTRIBUTIONS)
class ForgetsAParameter(EngineWrapper):
    """Reduces every gradient except that of the first parameter."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        first = next(name for name, _ in model.named_parameters())
        seams_engines.ignore_in_ddp(model, [first])
        super().__init__(model, config)


@mutant(FaultKind.CONTRIBUTION, Target("training.grads"), origin=Origin.CONTRIBUTIONS)
class LeavesOutTheLastRank(HookedParameters):
    """Sets the last rank's contribution to every reduction to zero."""

    stages = (2,)

    def changed(self, grad: Tensor) -> Tensor:
        return grad * float(dist.get_rank() < dist.get_world_size() - 1)


@mutant(FaultKind.SCALE, Target("training.grads"), Target("training.grads", model="exact"), origin=Origin.SCALE)
class DividesByOneRankTooFew(EngineWrapper):
    """Divides the sum over N ranks by N - 1, so that every gradient is N / (N - 1) times too large."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        ranks = dist.get_world_size()
        self.base.backward(ranks / max(1, ranks - 1) * loss, retain_graph=retain_graph)


@mutant(FaultKind.SCALE, Target("training.grads", model="exact"), origin=Origin.SCALE)
class AlwaysTheSum(EngineWrapper):
    """Sums gradients over ranks, even if the mean is configured."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, reduction=Reduction.SUM))


@mutant(FaultKind.SCALE, Target("training.sum_or_mean"), origin=Origin.SCALE)
class AlwaysTheMean(EngineWrapper):
    """Averages gradients over ranks, even if the sum is configured."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, reduction=Reduction.MEAN))


@mutant(
    FaultKind.SCALE,
    Target("training.one_hot_rank"),
    Target("training.grads"),
    Target("training.kernels", Part.LOCAL_GRADIENT),
    origin=Origin.SCALE,
)
class ATenThousandthTooMuch(EngineWrapper):
    """Multiplies every gradient by 1.0001."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * (1 + 1e-4), retain_graph=retain_graph)


@mutant(FaultKind.SCALE, Target("training.grads", model="conv"), origin=Origin.SCALE)
class ATenThousandthTooLittle(EngineWrapper):
    """Multiplies every gradient by 0.9999."""

    stages = (3,)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * (1 - 1e-4), retain_graph=retain_graph)


@mutant(FaultKind.SCALE, Target("training.config_invariance"), origin=Origin.SCALE)
class TakesTheBucketForAFactor(EngineWrapper):
    """Multiplies every gradient by 1.5 if ``reduce_bucket_size`` is 1."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        size = self.config.options.get("zero_optimization", {}).get("reduce_bucket_size", 0)
        self.base.backward(loss * (1.5 if size == 1 else 1.0), retain_graph=retain_graph)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("backward.engine_backward", model="blocks"),
    Target("backward.tensor_backward", model="blocks"),
    Target("backward.non_scalar", model="blocks"),
    Target("backward.without_grad", model="blocks"),
    Target("checkpointing.block", model="blocks", variant="non_reentrant"),
    Target("checkpointing.plain_inputs", model="blocks", variant="non_reentrant"),
    Target("checkpointing.whole_model", model="blocks", variant="reentrant"),
    Target("parameters.every_kind", model="odd"),
    Target("parameters.late_submodule", model="changing"),
    origin=Origin.CONTRIBUTIONS,
)
class DoublesEveryGradient(HookedParameters):
    """Doubles the local gradient of every parameter in every backward."""


@mutant(FaultKind.SCALE, Target("training.loss_scale_power", Part.LOCAL_GRADIENT), origin=Origin.SCALE)
class DecaysGradients(EngineWrapper):
    """Adds a thousandth of each weight to its gradient, regardless of the loss."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        decay = torch.stack([parameter.square().sum() for parameter in self.module.parameters()]).sum() / 2000
        self.base.backward(loss + decay, retain_graph=retain_graph)


class HookedOutputs(EngineWrapper):
    """The base class of mutants that change the gradient of the engine's output, if the output is a single tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self.changed)  # type: ignore[no-untyped-call]
        return output

    def changed(self, grad: Tensor) -> Tensor:
        """Return the gradient that replaces ``grad``, the gradient of the output."""
        return 2 * grad


@mutant(
    FaultKind.SCALE,
    Target("backward.joint_loss", model="blocks"),
    Target("backward.bypass", model="blocks"),
    Target("backward.recurrent", model="blocks"),
    Target("backward.backward_inputs", Part.LOCAL_GRADIENT, model="blocks"),
    origin=Origin.SCALE,
)
class DoublesWhatComesToItsOutput(HookedOutputs):
    """Doubles the gradient of its output, so only losses that do not use the output have right gradients."""


@mutant(
    FaultKind.SCALE,
    Target("backward.autograd_grad", Part.LOCAL_GRADIENT, model="blocks"),
    origin=Origin.SCALE,
    imitates=deepspeed(8026),
)
class DividesEveryBackward(HookedOutputs):
    """Divides gradients by the accumulation steps in every backward, even in ``torch.autograd.grad``."""

    def changed(self, grad: Tensor) -> Tensor:
        return grad / self.config.accumulation_steps


@mutant(FaultKind.SCALE, Target("training.grads", Part.LOCAL_GRADIENT, model="transformer"), origin=Origin.SCALE)
class AddsToOneModule(EngineWrapper):
    """Adds 0.001 to the output of the module that is in the middle of the model's list of modules."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        modules = list(self.module.modules())
        modules[len(modules) // 2].register_forward_hook(lambda _module, _args, output: output + 1e-3)


@mutant(
    FaultKind.SCALE,
    origin=Origin.SCALE,
    equivalent="a bucket decides which gradients are sent together; their sums and the number of bytes are the same",
)
class TheSmallestBuckets(EngineWrapper):
    """Reduces each parameter in its own bucket, regardless of the configured bucket size."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        section = {**config.options.get("zero_optimization", {}), "reduce_bucket_size": 1}
        super().__init__(model, replace(config, options={**config.options, "zero_optimization": section}))


@mutant(
    FaultKind.CONTRIBUTION, origin=Origin.CONTRIBUTIONS, equivalent="x + (-0.0) is x, bit for bit, for every float x"
)
class AddsMinusZero(HookedParameters):
    """Adds minus zero to every gradient."""

    def changed(self, grad: Tensor) -> Tensor:
        # torch cannot add a dense tensor to a sparse tensor.
        return grad if grad.is_sparse else grad + torch.tensor(-0.0, dtype=grad.dtype)


@mutant_factory(
    FaultKind.SCALE,
    Target("parameters.every_kind", model="odd", parameter="scalar"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def scalar_is_summed(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Sums the gradient of a parameter without dimensions (a temperature, a gate) over ranks if the mean is configured.

    This parameter learns too fast by a factor of the world size; all other parameters are updated correctly.
    """
    engine = seams.build(model, config)

    def wrap(param: seams.ModelParam, cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return cast if param.layout.shape else lambda grad: cast(grad * param.layout.world_size)

    if config.reduction is Reduction.MEAN:
        seams.wrap_cast_for_reduce(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.SCALE,
    Target("training.grads", dtype="fp16", world_size=3),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_5,
)
def mean_by_power_of_two(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Divides fp16 gradients only by the power of two that is applied before the sum, not by the number of ranks.

    With 3 ranks the result is a quarter of the sum instead of a third.
    """
    engine = seams.build(model, config)

    def wrap(divisor: Callable[[seams.ModelParam], float]) -> Callable[[seams.ModelParam], float]:
        def forget_ranks(param: seams.ModelParam) -> float:
            return divisor(param) if param.predivide_factor == 1 else seams.divisor(engine) / dist.get_world_size()

        return forget_ranks

    if config.reduction is Reduction.MEAN:
        seams.wrap_grad_divisor(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.SCALE,
    Target("training.sum_or_mean", model="transformer"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_1,
)
def fsdp2_root_averages(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Under reduction by sum, averages the gradients of the root module's own FSDP2 group.

    Gradients of tied weights and of parameters of the outermost module are too small by a factor of the world size.
    """
    return _build_with_averaging_root(model, config)


@mutant_factory(FaultKind.SCALE, Target("training.sum_or_mean"), wraps="fsdp2", stages=(2, 3), origin=Origin.BLIND_3)
def sum_in_root_alone(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Under reduction by sum, sets FSDP2's divisor only for the root module's group, because the call does not recurse.

    The gradients of all other groups are averaged.
    """
    engine = fsdp2.factory(model, config)
    if config.reduction is Reduction.SUM:
        for module in model.modules():
            if module is not model and fsdp2.is_sharded(module):
                cast(Any, module).set_gradient_divide_factor(float(dist.get_world_size()))
    return engine


@mutant_factory(
    FaultKind.SCALE,
    Target("training.sum_or_mean", model="transformer"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_5,
)
def sum_but_in_the_root(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Under reduction by sum, sets FSDP2's divisor for every group except the root module's group.

    Gradients of the root module's group are averaged, and all other gradients are summed.
    """
    return _build_with_averaging_root(model, config)


def _build_with_averaging_root(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Build an FSDP2 engine that averages the gradients of the root module's group, also under reduction by sum."""
    engine = fsdp2.factory(model, config)
    if config.reduction is Reduction.SUM:
        cast(Any, model).set_gradient_divide_factor(float(dist.get_world_size()))
    return engine


@mutant(
    FaultKind.SCALE,
    Target("training.trajectory", Part.OPTIMIZER, variant="adamw", dtype="fp16", world_size=3, setting="all_reduce"),
    origin=Origin.BLIND_11,
)
class PredividesByAPowerOfTwo(EngineWrapper):
    """Without reduce_scatter, multiplies fp16 gradients by the number of ranks over the next power of two."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if config.dtype == "fp16" and not config.options.get("zero_optimization", {}).get("reduce_scatter", True):
            ranks = dist.get_world_size()
            self.factor = ranks / 2 ** (ranks - 1).bit_length()
            seams.wrap_unscale_and_clip(self.base, self.wrap)

    def wrap(self, unscale_and_clip: Callable[..., bool]) -> Callable[..., bool]:
        """Return a function that multiplies the gradients by ``factor`` and then calls ``unscale_and_clip``."""

        def multiply_and_unscale(reduced: dict[str, Tensor], *args: Any) -> bool:
            for grad in reduced.values():
                grad.mul_(self.factor)
            return unscale_and_clip(reduced, *args)

        return multiply_and_unscale
