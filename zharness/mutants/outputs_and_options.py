"""Mutants that are wrong next to another engine, or for some outputs, modes, buffers or optimizer arguments."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.circumstances import expert_target
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper, SpoiledLoad
from zharness.parity import Part


@mutant(
    FaultKind.SCALE,
    expert_target("engines.one_closed", "before_any_step"),
    expert_target("engines.one_closed", "between_steps"),
    expert_target("engines.one_closed", "before_backward"),
    origin=Origin.CIRCUMSTANCES,
)
class DividesByLiveEngines(EngineWrapper):
    """Multiplies losses by the number of engines alive now, divided by the number when this engine was built."""

    alive: ClassVar[WeakSet[DividesByLiveEngines]] = WeakSet()

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.alive.add(self)
        self.count = len(self.alive)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss * (len(self.alive) / self.count), retain_graph=retain_graph)

    def close(self) -> None:
        self.alive.discard(self)
        self.base.close()


@mutant(
    FaultKind.GRAPH,
    Target("backward.shared_grad_fn", model="blocks", variant="chunk"),
    Target("backward.shared_grad_fn", None, model="blocks", variant="one_of_unbind", cause="does not require grad"),
    origin=Origin.CIRCUMSTANCES,
)
class KeepsOneOutputOfANode(EngineWrapper):
    """Detaches every output that comes from the same autograd node as an earlier output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.base(*args, **kwargs)
        if not isinstance(outputs, (tuple, list)):
            return outputs
        nodes: list[Any] = []
        kept = []
        for output in outputs:
            kept.append(output.detach() if output.grad_fn in nodes else output)
            nodes.append(output.grad_fn)
        return kept


@mutant(
    FaultKind.GRAPH,
    Target("backward.outputs", None, model="blocks", variant="dataclass", cause="does not require grad"),
    origin=Origin.CIRCUMSTANCES,
)
class DetachesDataclasses(EngineWrapper):
    """Detaches the tensors of an output that is a dataclass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if not is_dataclass(output) or isinstance(output, type):
            return output
        detached = {name: value.detach() for name, value in vars(output).items() if isinstance(value, Tensor)}
        return replace(output, **detached)


BASIC_ARGUMENTS = ("lr", "momentum", "betas", "weight_decay")


@mutant(
    FaultKind.OPTIMIZER,
    *(
        Target("training.optimizer_options", Part.OPTIMIZER, variant=variant)
        for variant in ("sgd_maximize", "adamw_amsgrad", "adam_decoupled", "rmsprop_centered", "adagrad_eps")
    ),
    origin=Origin.CIRCUMSTANCES,
)
class DropsOptimizerOptions(EngineWrapper):
    """Builds the optimizer with only its lr, momentum, betas and weight_decay, and drops all other arguments."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        basic = {name: value for name, value in config.optimizer.args.items() if name in BASIC_ARGUMENTS}
        super().__init__(model, replace(config, optimizer=replace(config.optimizer, args=basic)))


@mutant(
    FaultKind.STALE,
    Target("training.caller_modes", Part.FORWARD, parameter="training flag of 'first' after load"),
    origin=Origin.CIRCUMSTANCES,
)
class TrainsAfterLoad(SpoiledLoad):
    """Puts every module into training mode after a load."""

    def spoil(self) -> None:
        self.module.train()


@mutant(
    FaultKind.STALE,
    Target("training.caller_modes", Part.FORWARD, variant="no_grad", parameter="gradient mode after step"),
    origin=Origin.CIRCUMSTANCES,
)
class RecordsGradientsAfterAStep(EngineWrapper):
    """Enables gradient mode at the end of a step, even if the caller has disabled it."""

    def step(self) -> None:
        self.base.step()
        torch.set_grad_enabled(True)


@mutant(
    FaultKind.STALE,
    Target("training.caller_modes", Part.FORWARD, variant="float64", parameter="default dtype after save"),
    origin=Origin.CIRCUMSTANCES,
)
class SavesInFloat32(EngineWrapper):
    """Makes float32 the default dtype during a save, and does not restore the previous default dtype."""

    def save(self, path: Path) -> None:
        torch.set_default_dtype(torch.float32)
        self.base.save(path)


@mutant(
    FaultKind.STATE,
    Target("state.buffer_kinds", Part.GATHER, variant="float64", parameter="values of the buffer, loaded"),
    Target("state.buffer_kinds", Part.GATHER, variant="int64", parameter="values of the buffer, loaded"),
    origin=Origin.CIRCUMSTANCES,
)
class LoadsBuffersInFloat32(SpoiledLoad):
    """Rounds every buffer to float32 when it is loaded."""

    def spoil(self) -> None:
        for buffer in self.module.buffers():
            buffer.copy_(buffer.float())


@mutant(
    FaultKind.GRAPH,
    Target(
        "precision.output_containers",
        None,
        variant="named_tuple",
        dtype="bf16",
        cause="and the engine's forward a tuple",
    ),
    origin=Origin.BLIND_11,
)
class ReturnsPlainTuplesInLowPrecision(EngineWrapper):
    """In low precision, returns a plain tuple if the model returns a named tuple."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return tuple(output) if isinstance(output, tuple) and self.config.dtype != "fp32" else output
