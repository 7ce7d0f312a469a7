"""Define mutants of a pipeline that are wrong only under one setting of the optimizer, of clipping or of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.mutants.pipeline_products import on_any_order
from zharness.parity import Part


class ClipsByItself(PipelineWrapper):
    """The base class of mutants that clip instead of the engine: they multiply gradients by ``find_factor``."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=None))
        self.limit = config.clip
        self.norm = float("nan")

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages that have gradients."""
        return [param for param in seams_engines.stage_params(self.base).values() if param.grad is not None]

    def measure(self, grads: Sequence[Tensor]) -> float:
        """Return the norm of gradients of all stages."""
        total = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def step(self) -> None:
        if self.limit is not None:
            self.norm = self.measure([param.grad for param in self.params if param.grad is not None])
            factor = self.find_factor(self.limit)
            for param in self.params:
                param.grad = None if param.grad is None else param.grad * factor
        self.base.step()

    def grad_norm(self) -> float | None:
        return None if self.limit is None else self.norm

    def find_factor(self, limit: float) -> float:
        """Return the number by which gradients are multiplied."""
        raise NotImplementedError


@mutant(FaultKind.CLIPPING, on_any_order("clipped", "blocks.*"), origin=Origin.MESH)
class RaisesSmallNormsToTheLimit(ClipsByItself):
    """Scales gradients to the clipping limit even if their norm is below the limit."""

    def find_factor(self, limit: float) -> float:
        return limit / self.norm


@mutant(FaultKind.CLIPPING, on_any_order("accumulated_losses_clipped", "blocks.*"), origin=Origin.MESH)
class ClipsByTheNormOfTheLastBatch(ClipsByItself):
    """If a step has several batches, clips the sum of their gradients by the norm of the last batch's gradients."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.before: dict[nn.Parameter, Tensor] = {}

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        self.before = {param: param.grad.clone() for param in self.params if param.grad is not None}
        return super().train_batch(micro_batches, loss)

    def find_factor(self, limit: float) -> float:
        own = [param.grad - self.before.get(param, 0) for param in self.params if param.grad is not None]
        return min(1.0, limit / (self.measure(own) + 1e-6))


@mutant(FaultKind.CLIPPING, on_any_order("interleaved_clipped", "norm", Part.REDUCTION), origin=Origin.MESH)
class CountsOneOfTwoStagesOfARank(ClipsByItself):
    """Counts only the second of a rank's two stages in the global norm."""

    def measure(self, grads: Sequence[Tensor]) -> float:
        return super().measure(grads[len(grads) // 2 :])

    def find_factor(self, limit: float) -> float:
        return min(1.0, limit / (self.norm + 1e-6))


@mutant(FaultKind.CLIPPING, on_any_order("frozen_clipped", "blocks.*"), origin=Origin.MESH)
class ClipsNoStageWithFrozenWeights(ClipsByItself):
    """Does not clip gradients on a rank that has a frozen weight."""

    def find_factor(self, limit: float) -> float:
        is_frozen = any(not param.requires_grad for param in seams_engines.stage_params(self.base).values())
        return 1.0 if is_frozen else min(1.0, limit / (self.norm + 1e-6))


def drop_groups(config: EngineConfig) -> EngineConfig:
    """Return ``config`` without the overrides of its parameter groups, or ``config`` itself on rank 0."""
    groups = tuple(replace(group, overrides={}) for group in config.optimizer.groups)
    return replace(config, optimizer=replace(config.optimizer, groups=groups)) if dist.get_rank() else config


@mutant(FaultKind.OPTIMIZER, on_any_order("adamw", "*"), origin=Origin.MESH)
class LastStageHasNoGroups(PipelineWrapper):
    """Ignores the overrides of parameter groups (learning rate and weight decay of biases) on the last rank."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, drop_groups(config))


@mutant(FaultKind.OPTIMIZER, on_any_order("single", "blocks.*"), origin=Origin.MESH)
class LastStageHasPlainMomentum(PipelineWrapper):
    """Uses plain momentum instead of Nesterov momentum in SGD on the last rank."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        args = {name: value for name, value in config.optimizer.args.items() if name != "nesterov"}
        plain = replace(config, optimizer=replace(config.optimizer, args=args))
        super().__init__(model, plain if dist.get_rank() else config)


@mutant(FaultKind.STATE, on_any_order("adamw", "*/max_exp_avg_sq"), origin=Origin.MESH)
class LoadsNoMaximumOfTheLastStage(PipelineWrapper):
    """Does not load AMSGrad's maxima of second moments on the last rank."""

    def load(self, path: Path) -> None:
        before = {param: state["max_exp_avg_sq"].clone() for param, state in self.maxima()}
        self.base.load(path)
        for param, state in self.maxima():
            state["max_exp_avg_sq"].copy_(before[param])

    def maxima(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Return the parameters and states that have a maximum; rank 0 gets an empty list."""
        states = self.optimizer.state.items() if dist.get_rank() else ()
        return [(param, state) for param, state in states if "max_exp_avg_sq" in state]


@mutant(FaultKind.STATE, on_any_order("accumulated_singles", "blocks.*", Part.ACCUMULATION), origin=Origin.MESH)
class SaveGivesUpGradients(PipelineWrapper):
    """Drops all gradients in ``save``, so that a save between two batches of a step loses the first batch."""

    def save(self, path: Path) -> None:
        self.base.save(path)
        self.base.zero_grad()


@mutant(FaultKind.STALE, on_any_order("1f1b", "blocks.*"), origin=Origin.MESH)
class StepsBiasesFromItsOwnCopies(PipelineWrapper):
    """Steps biases from copies, so that an edit of a bias since the last step is lost."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.copies: dict[nn.Parameter, Tensor] = {}
        self.copy_biases()

    def copy_biases(self) -> None:
        """Copy the biases of this rank's stages."""
        named = seams_engines.stage_params(self.base).items()
        self.copies = {param: param.detach().clone() for name, param in named if fnmatchcase(name, "*.bias")}

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.copy_biases()

    @torch.no_grad()
    def step(self) -> None:
        for param, copy in self.copies.items():
            param.copy_(copy)
        self.base.step()
        self.copy_biases()


class ChangesGradients(PipelineWrapper):
    """The base class of mutants that scale the gradients of this rank's stages after the first batch of each step."""

    batches = 0

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        named = seams_engines.stage_params(self.base)
        is_new = all(param.grad is None for param in named.values())
        losses = super().train_batch(micro_batches, loss)
        self.batches += 1
        for name, param in named.items() if is_new else ():
            if param.grad is not None:
                param.grad = param.grad * self.find_factor(name, param, len(micro_batches))
        return losses

    def find_factor(self, name: str, param: nn.Parameter, micro_batches: int) -> float:
        """Return the number by which the gradient of a parameter is multiplied."""
        raise NotImplementedError


@mutant(FaultKind.CONTRIBUTION, on_any_order("gpipe", "blocks.*", Part.REDUCTION), origin=Origin.MESH)
class LosesOneOfMoreThanSixMicroBatches(ChangesGradients):
    """Scales the last rank's gradients by 6 / n if a batch has n > 6 micro-batches, as if n - 6 of them were lost."""

    def find_factor(self, name: str, param: nn.Parameter, micro_batches: int) -> float:
        return min(6, micro_batches) / micro_batches if dist.get_rank() else 1


@mutant(
    FaultKind.SHARDS,
    on_pipeline(model="random_chain", parameter="blocks.*", variant="1f1b"),
    on_pipeline(model="random_chain", parameter="blocks.*", law="pipeline.any_order", variant="interleaved"),
    on_pipeline(
        model="random_chain",
        parameter="blocks.*",
        law="pipeline.any_order",
        variant="interleaved",
        world_size=4,
        mesh="pp2.tp2",
    ),
    origin=Origin.MESH,
)
class DoesNotDivideOddWeights(ChangesGradients):
    """Sums the gradients of weights with an odd number of elements over micro-batches instead of averaging them."""

    def find_factor(self, name: str, param: nn.Parameter, micro_batches: int) -> float:
        return micro_batches if param.numel() % 2 else 1


@mutant(
    FaultKind.PARAMETERS,
    on_pipeline(model="tied_chain", parameter="blocks.1.linear.bias", law="pipeline.any_order", variant="single"),
    origin=Origin.MESH,
)
class AveragesTiedBiasesFromTheThirdBatch(ChangesGradients):
    """From the third batch on, averages a tied bias's gradients over its two stages instead of summing them."""

    def find_factor(self, name: str, param: nn.Parameter, micro_batches: int) -> float:
        return 0.5 if self.batches > 2 and name == "blocks.1.linear.bias" else 1


@mutant(
    FaultKind.STATE,
    on_pipeline(Part.FORWARD, "random_chain", "loss*", "pipeline.resume", ""),
    on_pipeline(Part.FORWARD, "random_chain", "loss*", "pipeline.resume", "", world_size=4, mesh="pp2.tp2"),
    on_pipeline(Part.GATHER, "chain", "blocks.2.*", "pipeline.buffers", "loaded"),
    origin=Origin.MESH,
)
class LoadsNoBuffersOfTheLastStage(PipelineWrapper):
    """Does not load the buffers of the last rank's stages."""

    def load(self, path: Path) -> None:
        before = [buffer.clone() for buffer in self.module.buffers()]
        self.base.load(path)
        for buffer, value in zip(self.module.buffers(), before, strict=True) if dist.get_rank() else ():
            buffer.copy_(value)


@mutant(
    FaultKind.CONTRIBUTION,
    on_pipeline(model="skips", parameter="blocks.*", law="pipeline.any_order", variant="single"),
    origin=Origin.MESH,
)
class LosesTheSecondGradientFromTheThirdBatch(PipelineWrapper):
    """From the third batch on, loses the gradient of the second tensor that the first stage sends."""

    batches = 0

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module.get_submodule("blocks.1").register_forward_hook(self.send)

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        self.batches += 1
        return super().train_batch(micro_batches, loss)

    def send(self, module: nn.Module, inputs: Sequence[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Replace the gradient of the second output by zeros from the third batch on."""
        if self.batches > 2 and output[1].requires_grad:
            output[1].register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
