"""Define mutants that send a wrong dtype or a wrong number of elements along one axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.mesh import DATA_SHARD
from zharness.mutants.mesh import REP2, MeshWrapper, local_grad, on_mesh
from zharness.mutants.mesh_copies import CopiesWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.parity import Part


def on_wire(parameter: str, model: str = "sequence", mesh: str = "tp2") -> Target:
    """Return a target of the law mesh.wire."""
    return on_mesh("mesh.wire", Part.REDUCTION, model, mesh, parameter)


@mutant(
    FaultKind.REDUCE_DTYPE,
    on_wire("gradients along tp"),
    origin=Origin.MESH,
    imitates="https://github.com/pytorch/pytorch/issues/190626",
)
class ReducesOverTensorRanksInBf16(MeshWrapper):
    """Reduces the gradients of layers on a part of the sequence over tp once more, in bfloat16."""

    def spoil_gradients(self) -> None:
        for param in self.replicated_params():
            sent = local_grad(param).bfloat16()
            dist.all_reduce(sent, op=dist.ReduceOp.AVG, group=self.tensor_group())
            local_grad(param).copy_(sent)


@mutant(FaultKind.RESOURCES, on_wire("elements of gradients along tp"), origin=Origin.MESH)
class ReducesReplicatedGradientsAgain(MeshWrapper):
    """Averages over tp the gradients of weights that tp does not split, although these gradients are equal already."""

    def spoil_gradients(self) -> None:
        for param in self.replicated_params():
            dist.all_reduce(local_grad(param), op=dist.ReduceOp.AVG, group=self.tensor_group())


@mutant(FaultKind.RESOURCES, on_wire("elements of gradients along dp_shard", "heads"), origin=Origin.MESH)
class ReducesWholeGradientsOverTheData(MeshWrapper):
    """In each backward, also all-reduces buffers of whole gradients over the data, and discards the results."""

    def spoil_gradients(self) -> None:
        for _, param in self.params() if self.config.mesh.sizes else ():
            dist.all_reduce(torch.zeros(param.shape), group=param.device_mesh.get_group(DATA_SHARD))


@mutant(FaultKind.REDUCE_DTYPE, on_wire("gradients along dp_replicate", "heads", REP2), origin=Origin.MESH)
class SumsCopiesInFloat64(CopiesWrapper):
    """Adds up shards of gradients over the copies in float64, which takes twice the bytes."""

    def spoil(self) -> None:
        def add_wide(shard: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
            return original(shard.double()).to(shard.dtype)

        self.change_sum_over_copies(add_wide)


@mutant(FaultKind.RESOURCES, on_wire("elements of gradients along dp_replicate", "heads", REP2), origin=Origin.MESH)
class SumsEachCopyAgain(CopiesWrapper):
    """Computes the sum over copies twice, and discards the first sum."""

    def spoil(self) -> None:
        def add_again(shard: Tensor, original: Callable[[Tensor], Tensor]) -> Tensor:
            original(shard.clone())
            return original(shard)

        self.change_sum_over_copies(add_again)


@mutant(FaultKind.RESOURCES, on_wire("elements of weights along tp", "heads"), origin=Origin.MESH)
class GathersSplitWeightsOverTensorRanks(MeshWrapper):
    """In each forward, gathers over tp the weights that tp splits, and discards the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for param in self.split_params():
            local = param.to_local().detach()
            dist.all_gather(
                [torch.empty_like(local) for _ in range(self.tensor_size)], local, group=self.tensor_group()
            )
        return self.base(*args, **kwargs)


@mutant(FaultKind.RESOURCES, on_wire("elements of gradients along tp", "heads"), origin=Origin.MESH)
class ReducesInEvaluations(MeshWrapper):
    """In a forward without gradients, all-reduces buffers of gradients over tp, and discards the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for param in () if torch.is_grad_enabled() else self.split_params():
            dist.all_reduce(torch.zeros_like(param.to_local()), group=self.tensor_group())
        return self.base(*args, **kwargs)


@mutant(FaultKind.RESOURCES, on_wire("elements of gradients along dp_shard,tp", "heads"), origin=Origin.MESH)
class ReducesGradientsOverAllAxesAtOnce(MeshWrapper):
    """In each backward, also all-reduces gradient buffers over all ranks, along two axes at once, and discards them."""

    def spoil_gradients(self) -> None:
        for _, param in self.params() if self.config.mesh.sizes else ():
            dist.all_reduce(torch.zeros(param.shape))


@mutant(FaultKind.RESOURCES, on_wire("elements of weights along tp", "heads"), origin=Origin.MESH)
class GathersSplitWeightsInOneCall(MeshWrapper):
    """In each forward, gathers all weights that tp splits in one coalesced call, and discards the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts = [param.to_local().detach() for param in self.split_params()]
        if parts:
            gathered = [[torch.empty_like(part) for part in parts] for _ in range(self.tensor_size)]
            dist.all_gather_coalesced(gathered, parts, group=self.tensor_group())
        return self.base(*args, **kwargs)


@mutant(FaultKind.RESOURCES, on_wire("elements of activations along tp", "heads"), origin=Origin.MESH)
class ReducesActivationsAgain(MeshWrapper):
    """All-reduces a buffer like the output of a row-wise layer over tp once more, and discards the result."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output("out" if hasattr(self.module, "out") else "last")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        dist.all_reduce(torch.zeros_like(output), group=self.tensor_group())
        return output
