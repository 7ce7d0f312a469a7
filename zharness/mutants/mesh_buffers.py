"""Define mutants of FSDP2 with tensor parallelism or copies in which a buffer that forwards change is wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zharness.mesh import REPLICATE, TENSOR
from zharness.mutants.mesh import REP2, MeshWrapper, on_mesh
from zharness.mutants.mutant import FaultKind, Origin, mutant
from zharness.parity import Part


@mutant(
    FaultKind.STALE,
    on_mesh("mesh.buffers", Part.FORWARD, "heads", parameter="seen_sum"),
    on_mesh("training.buffers", Part.FORWARD, "stateful_exact", parameter="norm.running*"),
    on_mesh("training.modes", Part.FORWARD, "stateful_exact", parameter="norm.running*"),
    origin=Origin.MESH,
)
class BuffersStandStillOnTheSecondTensorRank(MeshWrapper):
    """On the second rank of tp, restores the buffers after each forward, so that they keep their first values."""

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output = super().__call__(*inputs, **named_inputs)
        if self.coordinates.get(TENSOR):
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    buffer.copy_(before[name])
        return output


@mutant(
    FaultKind.RANKS, on_mesh("mesh.buffers", Part.FORWARD, "heads", parameter="seen_sum", mesh=REP2), origin=Origin.MESH
)
class BuffersAreAveragedOverCopies(MeshWrapper):
    """Averages floating-point buffers over all ranks after each forward, which plain PyTorch never does."""

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        output = super().__call__(*inputs, **named_inputs)
        for buffer in self.module.buffers() if self.config.mesh.size(REPLICATE) > 1 else ():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())
        return output
