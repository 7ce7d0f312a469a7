"""Define mutants of a pipeline that are wrong on one stage or rank alone, and only after certain other calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.mutants.pipeline_state import square
from zharness.parity import Part

LAST_OF_FOUR = 3  # a rank of the last stage


def on_any_order(variant: str, parameter: str, part: Part = Part.OPTIMIZER, world_size: int = 2) -> Target:
    """Return a target of the law pipeline.any_order."""
    return on_pipeline(part, parameter=parameter, law="pipeline.any_order", variant=variant, world_size=world_size)


@mutant(FaultKind.CLIPPING, on_any_order("clipped", "blocks.2.*"), origin=Origin.MESH)
class ClipsTheLastStageByTheNormBefore(PipelineWrapper):
    """From the second step on, clips the last stage by the norm of the previous step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=None))
        self.limit = config.clip
        self.norms: list[Tensor] = []

    def step(self) -> None:
        params = seams_engines.stage_params(self.base).values()
        total = torch.stack([square(param) for param in params]).sum()
        dist.all_reduce(total)
        self.norms.append(total.sqrt())
        used = self.norms[-2:][0] if dist.get_rank() else self.norms[-1]
        if self.limit is not None:
            torch.nn.utils.clip_grads_with_norm_(params, self.limit, used)
        self.base.step()

    def grad_norm(self) -> float | None:
        return None if self.limit is None else float(self.norms[-1])


@mutant(FaultKind.STATE, on_any_order("single", "blocks.2.*/momentum_buffer"), origin=Origin.MESH)
class LoadsTheLastStagesStateOnce(PipelineWrapper):
    """From the second load of an engine on, does not load the optimizer state of the last stage."""

    loads = 0

    def load(self, path: Path) -> None:
        before = {
            param: {key: value.clone() for key, value in state.items()} for param, state in self.optimizer.state.items()
        }
        self.base.load(path)
        self.loads += 1
        if self.loads > 1 and dist.get_rank():
            self.optimizer.state.update(before)


@mutant(FaultKind.CONTRIBUTION, on_any_order("gpipe", "blocks.1.linear.bias", Part.REDUCTION), origin=Origin.MESH)
class KeepsABiasThatWasGivenUp(PipelineWrapper):
    """Keeps the gradient of the first stage's last bias in a ``zero_grad`` that does not follow a step."""

    stepped = False

    def step(self) -> None:
        self.base.step()
        self.stepped = True

    def zero_grad(self) -> None:
        bias = self.module.get_parameter("blocks.1.linear.bias")
        kept = None if self.stepped else bias.grad
        self.base.zero_grad()
        bias.grad, self.stepped = kept, False


@mutant(FaultKind.SCALE, on_any_order("1f1b", "blocks.0.*", Part.REDUCTION), origin=Origin.MESH)
class DividesOddBatchesByOneMore(PipelineWrapper):
    """Divides the first stage's gradients by n + 1 if a batch has an odd number n > 1 of micro-batches."""

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        count = len(micro_batches)
        if dist.get_rank() == 0 and count % 2 and count > 1:
            for parameter in self.parameters_with_grad():
                parameter.grad = None if parameter.grad is None else parameter.grad * (count / (count + 1))
        return losses


@mutant(FaultKind.STATE, on_any_order("single", "learning rate*"), origin=Origin.MESH)
class KeepsTheRateWhenItGoesBack(PipelineWrapper):
    """Does not restore the last stage's learning rate at load if the checkpoint has fewer steps than the engine."""

    def load(self, path: Path) -> None:
        schedule = seams_engines.stage_schedule(self.base)
        before, rate = schedule.last_epoch, self.optimizer.param_groups[0]["lr"]
        self.base.load(path)
        if dist.get_rank() and schedule.last_epoch < before:
            schedule.last_epoch = before
            self.optimizer.param_groups[0]["lr"] = rate


@mutant(FaultKind.STALE, on_any_order("interleaved", "blocks.*"), origin=Origin.MESH)
class StepsTheLastStageFromItsOwnCopies(PipelineWrapper):
    """Steps the last rank's weights from copies, so that an edit of the weights since the last step is lost."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.copies: dict[nn.Parameter, Tensor] = {}
        self.copy_weights()

    def copy_weights(self) -> None:
        """Copy the weights of this rank's stages, unless this rank is rank 0."""
        params = seams_engines.stage_params(self.base).values()
        self.copies = {param: param.detach().clone() for param in params} if dist.get_rank() else {}

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.copy_weights()

    @torch.no_grad()
    def step(self) -> None:
        for param, copy in self.copies.items():
            param.copy_(copy)
        self.base.step()
        self.copy_weights()


@mutant(
    FaultKind.RANKS, on_any_order("single", "blocks.3.linear.bias", Part.REDUCTION, world_size=4), origin=Origin.MESH
)
class OneReplicaDoesNotAverageAfterTwoLoads(PipelineWrapper):
    """From the second load on, uses the unaveraged gradient of the last bias on one of the last stage's two ranks."""

    name = "blocks.3.linear.bias"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.loads = 0
        self.own: Tensor | None = None
        self.module.get_parameter(self.name).register_hook(self.keep)  # type: ignore[no-untyped-call]

    def keep(self, grad: Tensor) -> None:
        """Keep this rank's gradient, before it is averaged."""
        self.own = grad.clone()

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.loads += 1

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        if self.loads > 1 and dist.get_rank() == LAST_OF_FOUR and self.own is not None:
            self.module.get_parameter(self.name).grad = self.own
        return losses


@mutant(FaultKind.PARAMETERS, on_any_order("frozen", "blocks.*.linear.weight/momentum_buffer"), origin=Origin.MESH)
class ThawedWeightsBeginWithoutMomentum(PipelineWrapper):
    """Sets the momentum to zeros if a weight is trained again after a step in which it had no gradient."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.left_out: set[nn.Parameter] = set()

    def step(self) -> None:
        params = seams_engines.stage_params(self.base).values()
        for param in self.left_out & {param for param in params if param.grad is not None}:
            for value in self.optimizer.state[param].values():
                value.zero_()
        self.left_out = {param for param in params if param.grad is None}
        self.base.step()


@mutant(FaultKind.STALE, on_any_order("zbv", "blocks.*"), origin=Origin.MESH)
class ReadingAgainHalvesTheLastRanksGradients(PipelineWrapper):
    """Halves the last rank's gradients after the caller has read the gradients of one batch a second time."""

    reads = 0

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        self.reads = 0
        return super().train_batch(micro_batches, loss)

    def full_grads(self) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = self.base.full_grads()
        self.reads += 1
        for param in seams_engines.stage_params(self.base).values() if dist.get_rank() and self.reads == 2 else ():
            param.grad = None if param.grad is None else param.grad / 2
        return grads


@mutant(FaultKind.CONTRIBUTION, on_any_order("accumulated_singles", "blocks.0.*", Part.REDUCTION), origin=Origin.MESH)
class DropsTheFirstOfThreeBatches(PipelineWrapper):
    """Drops the first stage's gradients of the first batch when a third batch runs before the step."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.first: list[Tensor] = []
        self.batches = 0

    def zero_grad(self) -> None:
        self.base.zero_grad()
        self.batches = 0

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        self.batches += 1
        params = [*seams_engines.stage_params(self.base).values()] if dist.get_rank() == 0 else []
        if self.batches == 1:
            self.first = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
        elif self.batches == 3:
            for param, first in zip(params, self.first, strict=True):
                param.grad = None if param.grad is None else param.grad - first
        return losses
