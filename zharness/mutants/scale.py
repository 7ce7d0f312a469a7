"""Gradients that are a factor off, everywhere or in one spelling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import AccumulationOwner, EngineConfig, Reduction
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target, deepspeed
from zharness.parity import Part


class DividesByOneRankTooFew(Around):
    """Divides by N - 1: every gradient is N / (N - 1) too large (at two ranks, the sum instead of the mean)."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        ranks = dist.get_world_size()
        self.right.backward(ranks / max(1, ranks - 1) * loss, retain_graph=retain_graph)


class AlwaysTheSum(Around):
    """Reduces by the sum, whatever was asked for."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, reduction=Reduction.SUM))


class AlwaysTheMean(Around):
    """Reduces by the mean, whatever was asked for."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, reduction=Reduction.MEAN))


class ATenThousandthTooMuch(Around):
    """A ten-thousandth too much of every gradient."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss * (1 + 1e-4), retain_graph=retain_graph)


class ATenThousandthTooLittle(Around):
    """A ten-thousandth too little of every gradient."""

    stages = (3,)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss * (1 - 1e-4), retain_graph=retain_graph)


class DividesTwiceByTheAccumulation(Around):
    """Divides the loss by the accumulation steps, and the gradient as well."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        owned = self.config.accumulation_owner is AccumulationOwner.ENGINE
        self.right.backward(loss / self.config.accumulation_steps if owned else loss, retain_graph=retain_graph)


class NeverDividesByTheAccumulation(Around):
    """Hands out the sum over the micro-batches of a step, not their mean."""

    stages = (2,)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        owned = self.config.accumulation_owner is AccumulationOwner.ENGINE
        self.right.backward(loss * self.config.accumulation_steps if owned else loss, retain_graph=retain_graph)


class LosesBf16ByALossScale(Around):
    """Divides bf16 gradients by a loss scale of 65536 that nobody multiplied by."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        scaled = loss / 65536 if self.config.dtype == "bf16" else loss
        self.right.backward(scaled, retain_graph=retain_graph)


class ScalesTheLossTwice(Around):
    """Multiplies by the loss scale twice and divides by it once."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss * self.config.loss_scale, retain_graph=retain_graph)


class DecaysGradients(Around):
    """Adds a thousandth of the weight to its gradient, whatever the loss."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        decay = torch.stack([parameter.square().sum() for parameter in self.module.parameters()]).sum() / 2000
        self.right.backward(loss + decay, retain_graph=retain_graph)


class TakesTheBucketForAFactor(Around):
    """Takes the size of its buckets for a factor."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        size = self.config.options.get("zero_optimization", {}).get("reduce_bucket_size", 0)
        self.right.backward(loss * (1.5 if size == 1 else 1.0), retain_graph=retain_graph)


class ReportsTheScaledNorm(Around):
    """Reports the norm times a loss scale that bf16 does not have."""

    def grad_norm(self) -> float | None:
        norm = self.right.grad_norm()
        return None if norm is None else 65536 * norm


class HookedOutputs(Around):
    """Changes the gradient of every tensor that it returns as its only output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self.changed)  # type: ignore[no-untyped-call]
        return output

    def changed(self, grad: Tensor) -> Tensor:
        """What the gradient becomes."""
        return 2 * grad


class DoublesWhatComesToItsOutput(HookedOutputs):
    """Doubles the gradient of every output."""


class DividesEveryBackward(HookedOutputs):
    """Divides by the accumulation steps in any backward from its output, also in one that trains nothing."""

    def changed(self, grad: Tensor) -> Tensor:
        return grad / self.config.accumulation_steps


class TheSmallestBuckets(Around):
    """Sends each parameter in a bucket of its own, whatever was asked for."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        section = {**config.options.get("zero_optimization", {}), "reduce_bucket_size": 1}
        super().__init__(model, replace(config, options={**config.options, "zero_optimization": section}))


class AddsToOneModule(Around):
    """Adds a little to what the module in the middle returns."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        modules = list(self.module.modules())
        modules[len(modules) // 2].register_forward_hook(lambda _module, _args, output: output + 1e-3)


REDUCED, LOCAL = Part.REDUCTION, Part.LOCAL_GRADIENT

MUTANTS = (
    Mutant(
        DividesByOneRankTooFew,
        Kind.SCALE,
        (Target("training.grads"), Target("training.grads", model="exact")),
    ),
    Mutant(AlwaysTheSum, Kind.SCALE, (Target("training.grads", model="exact"),)),
    Mutant(AlwaysTheMean, Kind.SCALE, (Target("training.sum_or_mean"),)),
    Mutant(
        ATenThousandthTooMuch,
        Kind.SCALE,
        (Target("training.one_hot_rank"), Target("training.grads"), Target("training.kernels", LOCAL)),
    ),
    Mutant(ATenThousandthTooLittle, Kind.SCALE, (Target("training.grads", model="conv"),)),
    Mutant(
        DividesTwiceByTheAccumulation,
        Kind.SCALE,
        (Target("training.accumulation", variant="engine"),),
        imitates=deepspeed(8224),
    ),
    Mutant(NeverDividesByTheAccumulation, Kind.SCALE, (Target("training.accumulation", variant="engine"),)),
    Mutant(LosesBf16ByALossScale, Kind.LOSS_SCALE, (Target("training.grads", dtype="bf16"),), deepspeed(7837)),
    Mutant(ScalesTheLossTwice, Kind.LOSS_SCALE, (Target("training.grads", dtype="fp16"),)),
    Mutant(DecaysGradients, Kind.SCALE, (Target("training.loss_scale_power", LOCAL),)),
    Mutant(TakesTheBucketForAFactor, Kind.SCALE, (Target("training.config_invariance"),)),
    Mutant(
        ReportsTheScaledNorm,
        Kind.LOSS_SCALE,
        (Target("precision.autocast_norm", Part.OPTIMIZER, "mixed"),),
        imitates=deepspeed(7534),
    ),
    Mutant(
        DoublesWhatComesToItsOutput,
        Kind.SCALE,
        (
            Target("backward.joint_loss", REDUCED, "blocks"),
            Target("backward.bypass", REDUCED, "blocks"),
            Target("backward.recurrent", REDUCED, "blocks"),
            Target("backward.backward_inputs", LOCAL, "blocks"),
        ),
    ),
    Mutant(
        DividesEveryBackward,
        Kind.SCALE,
        (Target("backward.autograd_grad", LOCAL, "blocks"),),
        imitates=deepspeed(8026),
    ),
    Mutant(AddsToOneModule, Kind.SCALE, (Target("training.grads", LOCAL, "transformer"),)),
    Mutant(
        TheSmallestBuckets,
        Kind.SCALE,
        (),
        equivalent="a bucket decides which gradients travel together, and neither their sum nor how much is sent",
    ),
)
