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
from zharness.mutants.around import Around
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
)
from zharness.parity import Part


@mutant(
    FaultKind.AUTOCAST,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="mode of *"),
    origin=Origin.ONLOOKERS,
)
class TrainsInEvaluation(Around):
    """Switches the model to training mode before every forward."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module.train()
        return self.right(*args, **kwargs)


@mutant(
    FaultKind.RANKS,
    Target("training.sgd_step", Part.GATHER, parameter="precision of matrix products"),
    origin=Origin.ORDERS,
)
class LowersMatrixProducts(Around):
    """Lowers the precision of matrix products in the whole process at construction, as if for speed."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        torch.set_float32_matmul_precision("high")
        super().__init__(model, config)

    def close(self) -> None:
        self.right.close()
        torch.set_float32_matmul_precision("highest")  # the next cell of the process must have full precision


@mutant(
    FaultKind.STALE, Target("training.any_order", Part.FORWARD, variant="steps", parameter="loss"), origin=Origin.ORDERS
)
class LogsTheMeanLoss(Around):
    """Averages the loss over ranks for its log, and overwrites the caller's loss tensor with the mean."""

    over = "ddp"

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        dist.all_reduce(loss.data)
        loss.data /= dist.get_world_size()


@mutant(
    FaultKind.GRAPH,
    Target("training.any_order", Part.FORWARD, variant="steps", parameter="inputs"),
    origin=Origin.ORDERS,
)
class WantsGradientsOfInputs(Around):
    """Makes the caller's input tensors require a gradient, as if for reentrant checkpoints."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf and torch.is_grad_enabled():
                value.requires_grad_()
        return self.right(*args, **kwargs)


def modes_target(parameter: str, variant: str = "") -> Target:
    """Return the target in training.caller_modes whose mode or state is named ``parameter``."""
    return Target("training.caller_modes", Part.FORWARD, variant=variant, parameter=parameter)


@mutant(FaultKind.AUTOCAST, modes_target("default dtype after full_state_dict", "float64"), origin=Origin.BLIND_7)
class ResetsTheDefaultDtype(Around):
    """Sets torch's default dtype to float32 in ``full_state_dict``."""

    def full_state_dict(self) -> dict[str, Tensor]:
        torch.set_default_dtype(torch.float32)
        state: dict[str, Tensor] = self.right.full_state_dict()
        return state


@mutant(FaultKind.STATE, modes_target("random state after step", "clipped"), origin=Origin.BLIND_7)
class DrawsNumbersToClip(Around):
    """Draws a random number in a step if clipping is configured."""

    over = "ddp"

    def step(self) -> None:
        if self.config.clip is not None:
            torch.rand(1)
        self.right.step()


class EnablesGradientsAtTheEnd(Around):
    """The base class of mutants that disable gradients; ``close`` enables them for the next cell of the process."""

    over = "ddp"

    def close(self) -> None:
        torch.set_grad_enabled(True)
        self.right.close()


@mutant(FaultKind.AUTOCAST, modes_target("gradient mode after step", "clipped"), origin=Origin.BLIND_7)
class EndsClippingWithoutGradients(EnablesGradientsAtTheEnd):
    """Leaves gradients disabled after a step if clipping is configured."""

    def step(self) -> None:
        self.right.step()
        torch.set_grad_enabled(self.config.clip is None)


@mutant(FaultKind.AUTOCAST, modes_target("gradient mode after read_param", "read_out"), origin=Origin.BLIND_7)
class ReadsWithoutGradients(EnablesGradientsAtTheEnd):
    """Leaves gradients disabled after ``read_param``."""

    def read_param(self, name: str) -> Tensor:
        torch.set_grad_enabled(False)
        weight: Tensor = self.right.read_param(name)
        return weight


@mutant(
    FaultKind.AUTOCAST,
    modes_target("gradient mode after read_param under no_grad", "read_out"),
    origin=Origin.ONLOOKERS,
)
class ReadsWithGradients(Around):
    """Leaves gradients enabled after ``read_param``, even if the caller has disabled them."""

    def read_param(self, name: str) -> Tensor:
        weight: Tensor = self.right.read_param(name)
        torch.set_grad_enabled(True)
        return weight


@mutant(FaultKind.AUTOCAST, modes_target("training flag of * after forward under no_grad"), origin=Origin.BLIND_7)
class StaysInEvaluation(Around):
    """Switches the model to evaluation mode after a forward without gradients."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.module.eval()
        return output


@mutant(
    FaultKind.AUTOCAST,
    modes_target("gradient mode after forward under no_grad"),
    origin=Origin.BLIND_12,
)
class EnablesGradientsAfterForwards(Around):
    """Leaves gradients enabled after a forward, even if the caller has disabled them."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        torch.set_grad_enabled(True)
        return output


@mutant(FaultKind.AUTOCAST, modes_target("training flag of * after a forward that raises"), origin=Origin.BLIND_7)
class EvaluatesAfterErrors(Around):
    """Switches the model to evaluation mode after a forward that raised."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.right(*args, **kwargs)
        except Exception:
            self.module.eval()
            raise


@mutant(
    FaultKind.GRAPH,
    Target("training.forward_alone", Part.FORWARD, variant="no_grad", parameter="requires_grad of the outputs"),
    origin=Origin.ONLOOKERS,
)
class ForwardsWithGradients(Around):
    """Enables gradients in every forward, whatever the mode of the caller."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return self.right(*args, **kwargs)


CONSTRUCTOR = "__init__"


@mutant(FaultKind.RANKS, modes_target("constructors of torch.nn after building the engine"), origin=Origin.ORDERS)
class ReplacesInheritedConstructors(Around):
    """Leaves a class of torch.nn with a constructor of its own, where it had inherited one."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        setattr(nn.BatchNorm1d, CONSTRUCTOR, nn.BatchNorm1d.__init__)

    def close(self) -> None:
        self.right.close()
        delattr(nn.BatchNorm1d, CONSTRUCTOR)  # the next cell of the process must have the inherited constructor


class ResetsFlagsInEvaluation(Around):
    """The base class of mutants that put every module into evaluation mode after a call, if the model was in it."""

    def reset_flags(self) -> None:
        """Put the submodules that the caller has put into training mode into evaluation mode too."""
        if not self.module.training:
            self.module.eval()


@mutant(FaultKind.STATE, modes_target("training flag of * after save", "evaluating"), origin=Origin.ORDERS)
class SaveResetsFlags(ResetsFlagsInEvaluation):
    """Saves in evaluation mode, and restores the flag of the model for all of its submodules."""

    def save(self, path: Path) -> None:
        self.right.save(path)
        self.reset_flags()


@mutant(FaultKind.STATE, modes_target("training flag of * after load", "evaluating"), origin=Origin.ORDERS)
class LoadResetsFlags(ResetsFlagsInEvaluation):
    """Loads in evaluation mode, and restores the flag of the model for all of its submodules."""

    def load(self, path: Path) -> None:
        self.right.load(path)
        self.reset_flags()
