"""Mutants that change the caller's model, inputs or process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.AUTOCAST,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="mode of *"),
    origin=Origin.ONLOOKERS,
)
class TrainsInEvaluation(EngineWrapper):
    """Switches the model to training mode before every forward."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module.train()
        return self.base(*args, **kwargs)


@mutant(
    FaultKind.RANKS,
    Target("training.sgd_step", Part.GATHER, parameter="precision of matrix products"),
    origin=Origin.ORDERS,
)
class LowersMatrixProducts(EngineWrapper):
    """Lowers the precision of matrix products in the whole process at construction, as if for speed."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        torch.set_float32_matmul_precision("high")
        super().__init__(model, config)

    def close(self) -> None:
        self.base.close()
        torch.set_float32_matmul_precision("highest")  # the next cell of the process must have full precision


@mutant(
    FaultKind.STALE, Target("training.any_order", Part.FORWARD, variant="steps", parameter="loss"), origin=Origin.ORDERS
)
class LogsTheMeanLoss(EngineWrapper):
    """Averages the loss over ranks for its log, and overwrites the caller's loss tensor with the mean."""

    wraps = "ddp"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        dist.all_reduce(loss.data)
        loss.data /= dist.get_world_size()


@mutant(
    FaultKind.GRAPH,
    Target("training.any_order", Part.FORWARD, variant="steps", parameter="inputs"),
    origin=Origin.ORDERS,
)
class WantsGradientsOfInputs(EngineWrapper):
    """Makes the caller's input tensors require a gradient, as if for reentrant checkpoints."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf and torch.is_grad_enabled():
                value.requires_grad_()
        return self.base(*args, **kwargs)


def modes_target(parameter: str, variant: str = "") -> Target:
    """Return the target in training.caller_modes whose mode or state is named ``parameter``."""
    return Target("training.caller_modes", Part.FORWARD, variant=variant, parameter=parameter)


@mutant(FaultKind.AUTOCAST, modes_target("default dtype after full_state_dict", "float64"), origin=Origin.BLIND_7)
class ResetsTheDefaultDtype(EngineWrapper):
    """Sets torch's default dtype to float32 in ``full_state_dict``."""

    def full_state_dict(self) -> dict[str, Tensor]:
        torch.set_default_dtype(torch.float32)
        state: dict[str, Tensor] = self.base.full_state_dict()
        return state


@mutant(FaultKind.STATE, modes_target("random state after step", "clipped"), origin=Origin.BLIND_7)
class DrawsNumbersToClip(EngineWrapper):
    """Draws a random number in a step if clipping is configured."""

    wraps = "ddp"

    def step(self) -> None:
        if self.config.clip is not None:
            torch.rand(1)
        self.base.step()


class EnablesGradientsAtTheEnd(EngineWrapper):
    """The base class of mutants that disable gradients; ``close`` enables them for the next cell of the process."""

    wraps = "ddp"

    def close(self) -> None:
        torch.set_grad_enabled(True)
        self.base.close()


@mutant(FaultKind.AUTOCAST, modes_target("gradient mode after step", "clipped"), origin=Origin.BLIND_7)
class EndsClippingWithoutGradients(EnablesGradientsAtTheEnd):
    """Leaves gradients disabled after a step if clipping is configured."""

    def step(self) -> None:
        self.base.step()
        torch.set_grad_enabled(self.config.clip is None)


@mutant(FaultKind.AUTOCAST, modes_target("gradient mode after read_param", "read_out"), origin=Origin.BLIND_7)
class ReadsWithoutGradients(EnablesGradientsAtTheEnd):
    """Leaves gradients disabled after ``read_param``."""

    def read_param(self, name: str) -> Tensor:
        torch.set_grad_enabled(False)
        weight: Tensor = self.base.read_param(name)
        return weight


@mutant(
    FaultKind.AUTOCAST,
    modes_target("gradient mode after read_param under no_grad", "read_out"),
    origin=Origin.ONLOOKERS,
)
class ReadsWithGradients(EngineWrapper):
    """Leaves gradients enabled after ``read_param``, even if the caller has disabled them."""

    def read_param(self, name: str) -> Tensor:
        weight: Tensor = self.base.read_param(name)
        torch.set_grad_enabled(True)
        return weight


@mutant(FaultKind.AUTOCAST, modes_target("training flag of * after forward under no_grad"), origin=Origin.BLIND_7)
class StaysInEvaluation(EngineWrapper):
    """Switches the model to evaluation mode after a forward without gradients."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.module.eval()
        return output


@mutant(
    FaultKind.AUTOCAST,
    modes_target("gradient mode after forward under no_grad"),
    origin=Origin.BLIND_12,
)
class EnablesGradientsAfterForwards(EngineWrapper):
    """Leaves gradients enabled after a forward, even if the caller has disabled them."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        torch.set_grad_enabled(True)
        return output


@mutant(FaultKind.AUTOCAST, modes_target("training flag of * after a forward that raises"), origin=Origin.BLIND_7)
class EvaluatesAfterErrors(EngineWrapper):
    """Switches the model to evaluation mode after a forward that raised."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.base(*args, **kwargs)
        except Exception:
            self.module.eval()
            raise


@mutant(
    FaultKind.GRAPH,
    Target("training.forward_alone", Part.FORWARD, variant="no_grad", parameter="requires_grad of the outputs"),
    origin=Origin.ONLOOKERS,
)
class ForwardsWithGradients(EngineWrapper):
    """Enables gradients in every forward, even if the caller has disabled them."""

    wraps = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return self.base(*args, **kwargs)


CONSTRUCTOR = "__init__"


@mutant(FaultKind.RANKS, modes_target("constructors of torch.nn after building the engine"), origin=Origin.ORDERS)
class ReplacesInheritedConstructors(EngineWrapper):
    """Sets the inherited constructor of ``nn.BatchNorm1d`` on the class itself, and leaves it there."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        setattr(nn.BatchNorm1d, CONSTRUCTOR, nn.BatchNorm1d.__init__)

    def close(self) -> None:
        self.base.close()
        delattr(nn.BatchNorm1d, CONSTRUCTOR)  # the next cell of the process must have the inherited constructor


class ResetsFlagsInEvaluation(EngineWrapper):
    """The base class of mutants that put all submodules into evaluation mode after a call if the model is in it."""

    def reset_flags(self) -> None:
        """If the model is in evaluation mode, also put its submodules in training mode into evaluation mode."""
        if not self.module.training:
            self.module.eval()


@mutant(FaultKind.STATE, modes_target("training flag of * after save", "evaluating"), origin=Origin.ORDERS)
class SaveResetsFlags(ResetsFlagsInEvaluation):
    """Puts all submodules into evaluation mode after a save if the model is in evaluation mode."""

    def save(self, path: Path) -> None:
        self.base.save(path)
        self.reset_flags()


@mutant(FaultKind.STATE, modes_target("training flag of * after load", "evaluating"), origin=Origin.ORDERS)
class LoadResetsFlags(ResetsFlagsInEvaluation):
    """Puts all submodules into evaluation mode after a load if the model is in evaluation mode."""

    def load(self, path: Path) -> None:
        self.base.load(path)
        self.reset_flags()
