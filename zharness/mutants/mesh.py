"""Define mutants that break one axis of a mesh: a collective of tp, a reduction over the data, a replica, a norm.

They are FSDP2 on a mesh of tensor parallelism, or of replicas of the data, and are right where there is one axis.
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
    """The base class of mutants of a mesh, at the stage that keeps weights gathered from forward to backward."""

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
    """Each rank of tp adds the bias of a row-wise layer before the outputs are summed."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output("last" if hasattr(self.module, "last") else "down")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return output + (self.tensor_size - 1) * module.bias.to_local()


@mutant(FaultKind.CONTRIBUTION, on_mesh(part=Part.FORWARD, model="heads"), origin=Origin.MESH)
class SumsPartialOutputsTwice(MeshWrapper):
    """The outputs of a row-wise layer are all-reduced over tp twice."""

    def spoil_modules(self) -> None:
        self.hook_output("last" if hasattr(self.module, "last") else "out")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.tensor_size


@mutant(FaultKind.CONTRIBUTION, on_mesh(part=Part.FORWARD), origin=Origin.MESH)
class LeavesOutTheSumOfPartialOutputs(MeshWrapper):
    """The outputs of a row-wise layer are not all-reduced over tp."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output("last" if hasattr(self.module, "last") else "down")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return nn.functional.linear(inputs[0].to_local(), module.weight.to_local(), module.bias.to_local())


@mutant(FaultKind.REDUCE_DTYPE, on_mesh("mesh.mean_gradient", model="mlp"), origin=Origin.MESH)
class RoundsSumsOfPartialOutputs(MeshWrapper):
    """The outputs of a row-wise layer are rounded to bf16 after they are summed over tp."""

    def spoil_modules(self) -> None:
        if self.tensor_size > 1:
            self.hook_output(next(name for name, word in self.config.tp_plan.items() if word.startswith("rowwise")))

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return output.bfloat16().float()


@mutant(FaultKind.SHARDS, on_mesh(part=Part.FORWARD), origin=Origin.MESH)
class GathersOutputsInReversedOrder(MeshWrapper):
    """The parts of a column-wise layer's output are gathered from the last rank of tp to the first."""

    def spoil_modules(self) -> None:
        self.hook_output("first" if hasattr(self.module, "first") else "head")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        return torch.cat(output.chunk(self.tensor_size, dim=-1)[::-1], dim=-1)


@mutant(FaultKind.RANKS, on_mesh(part=Part.FORWARD, model="heads"), origin=Origin.MESH)
class TensorRanksReadOtherSamples(MeshWrapper):
    """The second rank of a tp group reads the samples in another order than the first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tensor_size == 1:
            return self.base(*args, **kwargs)
        return self.base(args[0].roll(self.coordinates[TENSOR], 0), *args[1:], **kwargs)


@mutant(FaultKind.RANKS, on_mesh(part=Part.FORWARD), origin=Origin.MESH)
class OrdersRanksByDataFirst(MeshWrapper):
    """A rank reads the micro-batch of the rank at its mirrored place, as if tp were the outer axis."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tensor_size == 1:
            return self.base(*args, **kwargs)
        seen = [torch.empty_like(args[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(seen, args[0].contiguous())
        turned = torch.arange(len(seen)).view(-1, self.tensor_size).T.flatten().tolist()
        return self.base(seen[turned[dist.get_rank()]], *args[1:], **kwargs)


@mutant(FaultKind.SCALE, on_mesh(), on_mesh("mesh.mean_gradient", model="mlp"), origin=Origin.MESH)
class MultipliesTheLossByTheTensorSize(MeshWrapper):
    """Backward runs on the loss times the number of ranks of tp."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(self.tensor_size * loss, retain_graph=retain_graph)


@mutant(FaultKind.SCALE, on_mesh(model="sequence"), origin=Origin.MESH)
class DividesByTheWholeWorld(MeshWrapper):
    """The gradients are divided by the number of ranks, and not by the number of micro-batches."""

    def spoil_gradients(self) -> None:
        for _, param in self.params():
            local_grad(param).div_(self.tensor_size)


@mutant(FaultKind.CONTRIBUTION, on_mesh(model="heads"), origin=Origin.MESH)
class SumsReplicatedGradientsOverTensorRanks(MeshWrapper):
    """The gradients of parameters that tp does not split, which are whole on each rank of tp, are summed over tp."""

    def spoil_gradients(self) -> None:
        for param in self.replicated_params():
            local_grad(param).mul_(self.tensor_size)


@mutant(FaultKind.CONTRIBUTION, on_mesh(model="heads"), origin=Origin.MESH)
class AveragesSplitGradientsOverTensorRanks(MeshWrapper):
    """The gradients of weights that tp splits are averaged over all ranks, and not over the data alone."""

    def spoil_gradients(self) -> None:
        for param in self.split_params():
            dist.all_reduce(local_grad(param), op=dist.ReduceOp.AVG, group=self.tensor_group())


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas"), origin=Origin.MESH)
class LosesReplicatedGradientsOnOneTensorRank(MeshWrapper):
    """The second rank of tp has zeros for the gradients of parameters that tp does not split."""

    def spoil_gradients(self) -> None:
        for param in self.replicated_params() if self.coordinates[TENSOR] else ():
            local_grad(param).zero_()


@mutant(
    FaultKind.CONTRIBUTION,
    on_mesh(part=Part.LOCAL_GRADIENT, model="sequence", parameter="before_attention.*"),
    origin=Origin.MESH,
)
class LosesTheGradientOfOneSequencePart(MeshWrapper):
    """A layer under sequence parallelism gets no gradient from the second part of the sequence."""

    def spoil_modules(self) -> None:
        if self.coordinates[TENSOR] and hasattr(self.module, "before_attention"):
            self.hook_output("before_attention")

    def changed_output(self, module: Any, inputs: Any, output: Any) -> Any:
        weight, bias = (0 * param + param.detach() for param in (module.weight, module.bias))
        return inputs[0] * weight + bias


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.one_hot"), on_mesh("mesh.mean_gradient", model="mlp"), origin=Origin.MESH)
class TakesTheFirstDataCoordinateAlone(MeshWrapper):
    """The loss of the first data coordinate stands for those of all."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        size = dist.get_world_size() // self.tensor_size
        is_first = self.config.mesh.data_coordinate(dist.get_rank(), dist.get_world_size()) == 0
        self.base.backward(loss * float(size * is_first), retain_graph=retain_graph)


@mutant(FaultKind.CONTRIBUTION, on_mesh("mesh.one_hot"), origin=Origin.MESH)
class KeepsSplitGradientsOfTheStepBefore(MeshWrapper):
    """``zero_grad`` keeps the gradients of weights that tp splits."""

    def zero_grad(self) -> None:
        kept = [(param, param.grad) for param in self.split_params()]
        self.base.zero_grad()
        for param, grad in kept:
            param.grad = grad


@mutant(FaultKind.CLIPPING, on_mesh("mesh.norm", parameter="norm", cause=COUNTS_EACH_RANK), origin=Origin.MESH)
class NormCountsReplicas(MeshWrapper):
    """The norm adds the squares of all ranks, so that it counts what tp replicates once for each rank of tp."""

    def step(self) -> None:
        total = sum_of_squares(param for _, param in self.params())
        dist.all_reduce(total)
        self.base.step()
        seams_engines.set_grad_norm(self.base, float(total.sqrt()))


@mutant(FaultKind.CLIPPING, on_mesh("mesh.norm", parameter="norm", cause=OF_ONE_COORDINATE), origin=Origin.MESH)
class NormOfOneTensorRank(MeshWrapper):
    """The norm adds squares over the data and not over tp, so that each rank of tp has its own."""

    def step(self) -> None:
        split = list(self.split_params())
        total = sum_of_squares(param for _, param in self.params())
        dist.all_reduce(total, group=split[0].device_mesh.get_group(DATA_SHARD) if split else None)
        self.base.step()
        seams_engines.set_grad_norm(self.base, float(total.sqrt()))


@mutant(FaultKind.CLIPPING, on_mesh("mesh.norm", part=Part.OPTIMIZER), origin=Origin.MESH)
class ClipsSplitWeightsAlone(MeshWrapper):
    """Clipping scales the gradients of weights that tp splits, and no others."""

    def step(self) -> None:
        replicated = [(param, local_grad(param).clone()) for param in self.replicated_params()]
        self.base.step()
        with torch.no_grad():
            for param, grad in replicated:
                param.to_local().add_(local_grad(param) - grad)


@mutant(FaultKind.CLIPPING, on_mesh("mesh.clip", part=Part.OPTIMIZER, cause=OF_ONE_COORDINATE), origin=Origin.MESH)
class ClipsEachTensorRankByItsOwnNorm(MeshWrapper):
    """Each rank of tp clips by the norm of what it has, and no norm is reported."""

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
    """A step updates the weights that tp splits once for the data and once for tp."""

    def step(self) -> None:
        self.base.step()
        with torch.no_grad():
            for param in self.split_params():
                param.to_local().sub_(local_grad(param))


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", part=Part.OPTIMIZER), origin=Origin.MESH)
class StepsOneReplicaOfTensorRanks(MeshWrapper):
    """The second rank of tp does not update the weights that tp replicates."""

    def step(self) -> None:
        kept = [(param, param.to_local().clone()) for param in self.replicated_params()]
        self.base.step()
        with torch.no_grad():
            for param, weight in kept if self.coordinates[TENSOR] else ():
                param.to_local().copy_(weight)


@mutant(FaultKind.SHARDS, on_mesh("mesh.replicas", part=Part.GATHER), origin=Origin.MESH)
class LayoutReversesTheRanks(MeshWrapper):
    """``layout()`` numbers the ranks from the last to the first."""

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        last, original = dist.get_world_size() - 1, self.base.layout()
        return {
            name: tuple(Piece(last - piece.rank, piece.start, piece.stop) for piece in pieces)
            for name, pieces in original.items()
        }


@mutant(FaultKind.SHARDS, on_mesh(part=Part.OPTIMIZER, parameter="last.weight*"), origin=Origin.MESH)
class GathersStateInReversedOrder(MeshWrapper):
    """The parts of the optimizer state of a row-wise layer are gathered from the last rank of tp to the first."""

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state: dict[str, dict[str, Tensor]] = self.base.full_optimizer_state()
        for key, value in state.get("last.weight", {}).items():
            state["last.weight"][key] = torch.cat(value.chunk(self.tensor_size, dim=-1)[::-1], dim=-1)
        return state


@mutant(FaultKind.SCALE, on_mesh(mesh=REP2), origin=Origin.MESH)
class SumsGradientsOverReplicas(MeshWrapper):
    """The gradients are averaged over the ranks that share a copy of the weights, and summed over the copies."""

    def spoil_gradients(self) -> None:
        for _, param in self.params():
            local_grad(param).mul_(self.config.mesh.size(REPLICATE))


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", mesh=REP2), origin=Origin.MESH)
class LosesGradientsOfOneCopy(MeshWrapper):
    """The second copy of the weights has zeros for its gradients."""

    def spoil_gradients(self) -> None:
        for _, param in self.params() if self.coordinates[REPLICATE] else ():
            local_grad(param).zero_()


@mutant(FaultKind.RANKS, on_mesh("mesh.replicas", part=Part.OPTIMIZER, mesh=REP2), origin=Origin.MESH)
class StepsOneCopyTwice(MeshWrapper):
    """The second copy of the weights makes each step twice."""

    def step(self) -> None:
        self.base.step()
        with torch.no_grad():
            for _, param in self.params() if self.coordinates[REPLICATE] else ():
                param.to_local().sub_(local_grad(param))
