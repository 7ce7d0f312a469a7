"""Define mutants that break one axis of a mesh: a collective of tp, a reduction over the data, a replica, a norm.

The mutants wrap FSDP2 on a mesh with tensor parallelism or with copies of the weights. Most of them are right on the
default mesh, which has one axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig, Piece
from zharness.mesh import DATA_SHARD, REPLICATE, TENSOR
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import FSDP2Wrapper
from zharness.parity import Part

TP2, REP2 = "tp2", "rep2"
COUNTS_EACH_RANK = " counts what 2 ranks of tp have in common 2 times"
OF_ONE_COORDINATE = " is the norm of what the ranks of tp "


def on_mesh(
    law: str = "mesh.training",
    part: Part | None = Part.REDUCTION,
    model: str = "exact",
    mesh: str = TP2,
    parameter: str = "*",
    variant: str = "",
    cause: str = "",
) -> Target:
    """Return a target on four ranks, which the axis of ``mesh`` splits in two."""
    return Target(law, part, model, variant, parameter=parameter, cause=cause, world_size=4, mesh=mesh)


class MeshWrapper(FSDP2Wrapper):
    """The base class of mutants around FSDP2 on a mesh, at stage 2, which keeps weights unsharded until backward."""

    stages: ClassVar[tuple[int, ...]] = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.coordinates = config.mesh.coordinates(dist.get_rank(), dist.get_world_size())
        self.tensor_size = config.mesh.size(TENSOR)
        if config.mesh.sizes:
            self.spoil_modules()

    def spoil_modules(self) -> None:
        """Register hooks on modules; subclasses that break a forward override this method."""

    def hook_output(self, name: str) -> None:
        """Pass the output of the module ``name`` through ``changed_output``."""
        self.module.get_submodule(name).register_forward_hook(self.changed_output)

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        """Return the output that replaces ``output``."""
        return output

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        self.spoil_gradients()

    def spoil_gradients(self) -> None:
        """Change the reduced gradients; subclasses that break a reduction override this method."""

    def params(self) -> Iterator[tuple[str, Any]]:
        """Return an iterator over the parameters, which are DTensors, by name."""
        yield from seams_engines.params(self.base).items()

    def split_params(self) -> Iterator[Any]:
        """Return an iterator over the parameters that tp splits."""
        return (param for _, param in self.params() if is_split(param))

    def replicated_params(self) -> Iterator[Any]:
        """Return an iterator over the parameters of which each rank of tp has a copy."""
        return (param for _, param in self.params() if self.tensor_size > 1 and not is_split(param))

    def tensor_group(self) -> Any:
        """Return the process group of this rank's tp axis."""
        return next(self.split_params()).device_mesh.get_group(TENSOR)


def is_split(param: Any) -> bool:
    """Return whether tp splits a parameter."""
    names = param.device_mesh.mesh_dim_names or ()
    return TENSOR in names and param.placements[names.index(TENSOR)].is_shard()


def local_grad(param: Any) -> Tensor:
    """Return this rank's part of a gradient, which shares memory with the gradient."""
    local: Tensor = param.grad.to_local()
    return local


def sum_of_squares(params: Iterator[Any]) -> Tensor:
    """Return the sum of squares of this rank's parts of the gradients."""
    return torch.stack([local_grad(param).double().square().sum() for param in params]).sum()


@mutant(FaultKind.CONTRIBUTION, on_mesh(part=Part.FORWARD), origin=Origin.MESH)
class AddsTheBiasOnEveryTensorRank(MeshWrapper):
    """Adds the bias of a row-wise layer on each rank of tp before the outputs are summed."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output("last" if hasattr(self.module, "last") else "down")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return output + (self.tensor_size - 1) * module.bias.to_local()


@mutant(FaultKind.CONTRIBUTION, on_mesh(part=Part.FORWARD, model="heads"), origin=Origin.MESH)
class SumsPartialOutputsTwice(MeshWrapper):
    """All-reduces the outputs of a row-wise layer over tp twice."""

    def spoil_modules(self) -> None:
        self.hook_output("last" if hasattr(self.module, "last") else "out")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.tensor_size


@mutant(FaultKind.CONTRIBUTION, on_mesh(part=Part.FORWARD), origin=Origin.MESH)
class LeavesOutTheSumOfPartialOutputs(MeshWrapper):
    """Does not all-reduce the outputs of a row-wise layer over tp."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output("last" if hasattr(self.module, "last") else "down")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return nn.functional.linear(inputs[0].to_local(), module.weight.to_local(), module.bias.to_local())


@mutant(FaultKind.REDUCE_DTYPE, on_mesh("mesh.mean_gradient", model="mlp"), origin=Origin.MESH)
class RoundsSumsOfPartialOutputs(MeshWrapper):
    """Rounds the outputs of a row-wise layer to bf16 after they are summed over tp."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output(next(name for name, word in self.config.tp_plan.items() if word.startswith("rowwise")))

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return output.bfloat16().float()


@mutant(FaultKind.SHARDS, on_mesh(part=Part.FORWARD), origin=Origin.MESH)
class GathersOutputsInReversedOrder(MeshWrapper):
    """Gathers the parts of a column-wise layer's output from the last rank of tp to the first."""

    def spoil_modules(self) -> None:
        self.hook_output("first" if hasattr(self.module, "first") else "head")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return torch.cat(output.chunk(self.tensor_size, dim=-1)[::-1], dim=-1)


@mutant(FaultKind.RANKS, on_mesh(part=Part.FORWARD, model="heads"), origin=Origin.MESH)
class TensorRanksReadOtherSamples(MeshWrapper):
    """On the second rank of a tp group, reads the samples in another order than the first rank does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tensor_size == 1:
            return self.base(*args, **kwargs)
        return self.base(args[0].roll(self.coordinates[TENSOR], 0), *args[1:], **kwargs)


@mutant(FaultKind.RANKS, on_mesh(part=Part.FORWARD), origin=Origin.MESH)
class OrdersRanksByDataFirst(MeshWrapper):
    """Gives each rank the micro-batch that the rank would have if tp were the outer axis of the mesh."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tensor_size == 1:
            return self.base(*args, **kwargs)
        seen = [torch.empty_like(args[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(seen, args[0].contiguous())
        turned = torch.arange(len(seen)).view(-1, self.tensor_size).T.flatten().tolist()
        return self.base(seen[turned[dist.get_rank()]], *args[1:], **kwargs)


@mutant(FaultKind.SCALE, on_mesh(), on_mesh("mesh.mean_gradient", model="mlp"), origin=Origin.MESH)
class MultipliesTheLossByTheTensorSize(MeshWrapper):
    """Runs backward on the loss times the number of ranks of tp."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(self.tensor_size * loss, retain_graph=retain_graph)


@mutant(FaultKind.SCALE, on_mesh(model="sequence"), origin=Origin.MESH)
class DividesByTheWholeWorld(MeshWrapper):
    """Divides the gradients by the number of ranks instead of the number of micro-batches."""

    def spoil_gradients(self) -> None:
        for _, param in self.params():
            local_grad(param).div_(self.tensor_size)


@mutant(FaultKind.CONTRIBUTION, on_mesh(model="heads"), origin=Origin.MESH)
class SumsReplicatedGradientsOverTensorRanks(MeshWrapper):
    """Sums over tp the gradients of parameters that tp does not split, although each rank of tp has them whole."""

    def spoil_gradients(self) -> None:
        for param in self.replicated_params():
            local_grad(param).mul_(self.tensor_size)


@mutant(FaultKind.CONTRIBUTION, on_mesh(model="heads"), origin=Origin.MESH)
class AveragesSplitGradientsOverTensorRanks(MeshWrapper):
    """Averages over all ranks, instead of over the data alone, the gradients of weights that tp splits."""

    def spoil_gradients(self) -> None:
        for param in self.split_params():
            dist.all_reduce(local_grad(param), op=dist.ReduceOp.AVG, group=self.tensor_group())


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas"), origin=Origin.MESH)
class LosesReplicatedGradientsOnOneTensorRank(MeshWrapper):
    """On the second rank of tp, zeroes the gradients of parameters that tp does not split."""

    def spoil_gradients(self) -> None:
        for param in self.replicated_params() if self.coordinates[TENSOR] else ():
            local_grad(param).zero_()


@mutant(
    FaultKind.CONTRIBUTION,
    on_mesh(part=Part.LOCAL_GRADIENT, model="sequence", parameter="before_attention.*"),
    origin=Origin.MESH,
)
class LosesTheGradientOfOneSequencePart(MeshWrapper):
    """Drops the gradient that a layer under sequence parallelism gets from the second part of the sequence."""

    def spoil_modules(self) -> None:
        if self.coordinates[TENSOR] and hasattr(self.module, "before_attention"):
            self.hook_output("before_attention")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        weight, bias = (0 * param + param.detach() for param in (module.weight, module.bias))
        return inputs[0] * weight + bias


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.one_hot"), on_mesh("mesh.mean_gradient", model="mlp"), origin=Origin.MESH)
class TakesTheFirstDataCoordinateAlone(MeshWrapper):
    """Uses only the loss of the first data coordinate, multiplied by the number of data coordinates."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        size = dist.get_world_size() // self.tensor_size
        is_first = self.config.mesh.data_coordinate(dist.get_rank(), dist.get_world_size()) == 0
        self.base.backward(loss * float(size * is_first), retain_graph=retain_graph)


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.one_hot"), origin=Origin.MESH)
class KeepsSplitGradientsOfTheStepBefore(MeshWrapper):
    """In ``zero_grad``, keeps the gradients of weights that tp splits."""

    def zero_grad(self) -> None:
        kept = [(param, param.grad) for param in self.split_params()]
        self.base.zero_grad()
        for param, grad in kept:
            param.grad = grad


@mutant(FaultKind.CLIPPING, on_mesh("mesh.norm", parameter="norm", cause=COUNTS_EACH_RANK), origin=Origin.MESH)
class NormCountsReplicas(MeshWrapper):
    """Adds the squares of all ranks in the norm, so that weights that tp replicates count once for each rank of tp."""

    def step(self) -> None:
        total = sum_of_squares(param for _, param in self.params())
        dist.all_reduce(total)
        self.base.step()
        seams_engines.set_grad_norm(self.base, float(total.sqrt()))


@mutant(FaultKind.CLIPPING, on_mesh("mesh.norm", parameter="norm", cause=OF_ONE_COORDINATE), origin=Origin.MESH)
class NormOfOneTensorRank(MeshWrapper):
    """Adds the squares in the norm over the data but not over tp, so that each rank of tp has a norm of its own."""

    def step(self) -> None:
        split = list(self.split_params())
        total = sum_of_squares(param for _, param in self.params())
        dist.all_reduce(total, group=split[0].device_mesh.get_group(DATA_SHARD) if split else None)
        self.base.step()
        seams_engines.set_grad_norm(self.base, float(total.sqrt()))


@mutant(FaultKind.CLIPPING, on_mesh("mesh.norm", part=Part.OPTIMIZER), origin=Origin.MESH)
class ClipsSplitWeightsAlone(MeshWrapper):
    """Clips only the gradients of weights that tp splits, and no other gradients."""

    def step(self) -> None:
        replicated = [(param, local_grad(param).clone()) for param in self.replicated_params()]
        self.base.step()
        with torch.no_grad():
            for param, grad in replicated:
                param.to_local().add_(local_grad(param) - grad)


@mutant(FaultKind.CLIPPING, on_mesh("mesh.clip", part=Part.OPTIMIZER, cause=OF_ONE_COORDINATE), origin=Origin.MESH)
class ClipsEachTensorRankByItsOwnNorm(MeshWrapper):
    """Clips on each rank of tp by the norm of that rank's own gradients, and reports no norm."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.limit = config.clip
        super().__init__(model, replace(config, clip=None))

    def step(self) -> None:
        params = [param for _, param in self.params()]
        total = sum_of_squares(iter(params))
        dist.all_reduce(total, group=next(self.split_params()).device_mesh.get_group(DATA_SHARD))
        factor = 1.0 if self.limit is None else min(1.0, self.limit / float(total.sqrt()))
        for param in params:
            local_grad(param).mul_(factor)
        self.base.step()

    def grad_norm(self) -> None:
        """Return no norm."""


@mutant(FaultKind.OPTIMIZER, on_mesh(part=Part.OPTIMIZER), origin=Origin.MESH)
class StepsSplitWeightsTwice(MeshWrapper):
    """Updates the weights that tp splits twice in a step, once for the data and once for tp."""

    def step(self) -> None:
        self.base.step()
        with torch.no_grad():
            for param in self.split_params():
                param.to_local().sub_(local_grad(param))


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", part=Part.OPTIMIZER), origin=Origin.MESH)
class StepsOneReplicaOfTensorRanks(MeshWrapper):
    """On the second rank of tp, does not update the weights that tp replicates."""

    def step(self) -> None:
        kept = [(param, param.to_local().clone()) for param in self.replicated_params()]
        self.base.step()
        with torch.no_grad():
            for param, weight in kept if self.coordinates[TENSOR] else ():
                param.to_local().copy_(weight)


@mutant(FaultKind.SHARDS, on_mesh("mesh.replicas", part=Part.GATHER), origin=Origin.MESH)
class LayoutReversesTheRanks(MeshWrapper):
    """Numbers the ranks from the last to the first in ``layout()``."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        last, original = dist.get_world_size() - 1, self.base.layout()
        return {
            name: tuple(Piece(last - piece.rank, piece.start, piece.stop) for piece in pieces)
            for name, pieces in original.items()
        }


@mutant(FaultKind.SHARDS, on_mesh(part=Part.OPTIMIZER, parameter="last.weight*"), origin=Origin.MESH)
class GathersStateInReversedOrder(MeshWrapper):
    """Gathers the parts of a row-wise layer's optimizer state from the last rank of tp to the first."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state: dict[str, dict[str, Tensor]] = self.base.full_optimizer_state()
        for key, value in state.get("last.weight", {}).items():
            state["last.weight"][key] = torch.cat(value.chunk(self.tensor_size, dim=-1)[::-1], dim=-1)
        return state


@mutant(FaultKind.SCALE, on_mesh(mesh=REP2), origin=Origin.MESH)
class SumsGradientsOverReplicas(MeshWrapper):
    """Averages the gradients over the ranks that share a copy of the weights, but sums them over the copies."""

    def spoil_gradients(self) -> None:
        for _, param in self.params():
            local_grad(param).mul_(self.config.mesh.size(REPLICATE))


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", mesh=REP2), origin=Origin.MESH)
class LosesGradientsOfOneCopy(MeshWrapper):
    """Zeroes the gradients of the second copy of the weights."""

    def spoil_gradients(self) -> None:
        for _, param in self.params() if self.coordinates[REPLICATE] else ():
            local_grad(param).zero_()


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", part=Part.OPTIMIZER, mesh=REP2), origin=Origin.MESH)
class StepsOneCopyTwice(MeshWrapper):
    """Makes each step twice on the second copy of the weights."""

    def step(self) -> None:
        self.base.step()
        with torch.no_grad():
            for _, param in self.params() if self.coordinates[REPLICATE] else ():
                param.to_local().sub_(local_grad(param))
