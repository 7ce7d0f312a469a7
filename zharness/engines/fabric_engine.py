"""Implement the engine class of Lightning Fabric: its calls around one model and one optimizer.

The calls are those of its documentation: ``setup_module``, ``setup_optimizers``, ``backward``, ``clip_gradients``,
``no_backward_sync``, ``step`` of the prepared optimizer, ``save`` and ``load``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.launch_variables import launch_variables
from zharness.engines.protocol import Capabilities, EngineConfig, Feature
from zharness.engines.torch_engine import EngineAdapter, TorchEngine
from zharness.engines.torch_gathers import gather_full_tensor
from zharness.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import Strategy

DOCUMENTATION = "https://lightning.ai/docs/fabric/stable/api/fabric_methods.html"
FILE_NAME = "checkpoint"
FABRIC_REFUSES = {
    Feature.WORLD_RESHARD: "it takes the number of processes from the launcher, so that a process cannot have two"
}
ERROR_IF_NONFINITE = "error_if_nonfinite"
FABRIC_OPTIONS = {ERROR_IF_NONFINITE: "false: clip_gradients does not raise if the norm is not finite; default true"}


def build_fabric(strategy: Strategy, device: torch.device) -> Fabric:
    """Return a launched Fabric over all ranks, on the device of the model's parameters. This is a collective."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    with launch_variables():
        fabric = Fabric(
            accelerator=device.type,
            devices=dist.get_world_size(),
            strategy=strategy,
            plugins=[TorchElasticEnvironment()],
        )
        fabric.launch()
    return fabric


def prepare_model(fabric: Fabric, model: nn.Module) -> Any:
    """Return the model as Fabric prepares it. This is a collective."""
    with launch_variables():
        return fabric.setup_module(model, move_to_device=False)


class FabricEngine(TorchEngine):
    """An engine whose backward, step, clipping and checkpoints are those of a ``Fabric``; see ``Engine``."""

    def __init__(
        self,
        model: nn.Module,
        capabilities: Capabilities,
        config: EngineConfig,
        adapter: EngineAdapter,
        fabric: Fabric,
        prepared_model: Any,
    ) -> None:
        super().__init__(model, capabilities, config, adapter)
        self._fabric, self._prepared_model = fabric, prepared_model
        self._raises_on_infinite_norm = bool(config.options.get(ERROR_IF_NONFINITE, True))
        with launch_variables():
            self._prepared = fabric.setup_optimizers(self._optimizer)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._fabric.backward(loss, retain_graph=retain_graph)

    def step(self) -> None:
        if self._clip is not None:
            norm = self._fabric.clip_gradients(
                self._prepared_model,
                self._prepared,
                max_norm=self._clip,
                error_if_nonfinite=self._raises_on_infinite_norm,
            )
            self._last_grad_norm = float(gather_full_tensor(norm))
        self._prepared.step()
        self._schedule.step()

    def save(self, path: Path) -> None:
        with launch_variables():
            path.mkdir(parents=True, exist_ok=True)
            self._fabric.save(path / FILE_NAME, self._state())

    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint.api import CheckpointException

        state = self._state()
        try:
            with launch_variables():
                self._fabric.load(path / FILE_NAME, state)
        except CheckpointException as error:  # a BaseException, which a caller's `except Exception` would not catch
            raise CheckpointError(f"load from {path}: {error}") from error
        self._schedule.load_state_dict(state["schedule"])

    def _state(self) -> dict[str, Any]:
        """Return a checkpoint's content; ``load`` fills model and optimizer, and replaces the schedule's state."""
        return {
            "model": self._prepared_model,
            "optimizer": self._prepared,
            "schedule": self._schedule.state_dict(),
        }
