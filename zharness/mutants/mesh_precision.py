"""Define mutants of tensor parallelism that are wrong only in low precision: under autocast, with masters, in bf16."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from zharness.mesh import TENSOR
from zharness.mutants import seams_engines
from zharness.mutants.mesh import TP2, MeshWrapper, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(
    FaultKind.AUTOCAST,
    on_mesh("precision.autocast_policy", Part.LOCAL_GRADIENT, "mixed_exact", parameter="first"),
    origin=Origin.MESH,
)
class AddsTheBiasOutsideOfAutocast(MeshWrapper):
    """Under autocast, returns float32, the dtype of the bias, from a column-wise layer, like DeepSpeed's layer."""

    def spoil_modules(self) -> None:
        if "first" in self.config.tp_plan:
            self.hook_output("first")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return output.float()


@mutant(
    FaultKind.STALE,
    on_mesh("precision.autocast_policy", Part.FORWARD, "mixed_exact", parameter="loss"),
    origin=Origin.MESH,
)
class EvaluatesSplitLayersWithTheFirstWeights(MeshWrapper):
    """In a forward without gradients, uses the bias of the first forward instead of a split layer's current bias."""

    def spoil_modules(self) -> None:
        self.kept: Tensor | None = None
        if "last" in self.config.tp_plan:
            self.hook_output("last")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        bias = module.bias.to_local().detach()
        self.kept = bias.clone() if self.kept is None else self.kept
        return output if torch.is_grad_enabled() else output + (self.kept - bias).to(output.dtype)


@mutant(
    FaultKind.AUTOCAST,
    Target("precision.master_weights", Part.OPTIMIZER, "mixed_exact", "fp32", mesh=TP2),
    origin=Origin.MESH,
)
class RoundsMastersOverTensorRanks(EngineWrapper):
    """With AutoTP, overwrites the fp32 masters with the bf16 weights in a step."""

    wraps = "deepspeed"
    stages: ClassVar[tuple[int, ...]] = (2,)

    def step(self) -> None:
        self.base.step()
        if self.config.mesh.size(TENSOR) > 1 and "bf16" in self.config.options:
            seams_engines.round_masters(self.base)


@mutant(
    FaultKind.GRAPH,
    Target(
        "precision.output_containers",
        None,
        "mixed_exact",
        "named_tuple",
        dtype="bf16",
        world_size=4,
        mesh=TP2,
        cause="and the engine's forward a tuple",
    ),
    origin=Origin.MESH,
)
class ReturnsPlainTuplesOverTensorRanks(MeshWrapper):
    """In low precision on tp, returns a plain tuple where the model returns a named tuple."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        is_taken_apart = isinstance(output, tuple) and self.tensor_size > 1 and self.config.dtype != "fp32"
        return tuple(output) if is_taken_apart else output
