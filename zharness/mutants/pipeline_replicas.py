"""Define mutants of a pipeline in which ranks with copies of one weight, in one or two stages, diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.torch_access import local_tensor
from zharness.mesh import DATA_SHARD, PIPELINE, TENSOR
from zharness.mutants import seams_engines
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.pipeline import Loss, MicroBatches, PipelineWrapper, on_pipeline
from zharness.parity import Part

TIED = "blocks.0.linear.weight"
FIRST_BIAS, ROW_WISE_BIAS = "blocks.0.linear.bias", "blocks.1.linear.bias"


def on_replicas(
    part: Part, parameter: str, model: str = "chain", variant: str = "gpipe", world_size: int = 4
) -> Target:
    """Return a target of the law pipeline.replicas."""
    return on_pipeline(part, model, parameter, law="pipeline.replicas", variant=variant, world_size=world_size)


class SpoilsOneRank(PipelineWrapper):
    """The base class of mutants of a pipeline that are wrong on the rank at ``place`` alone."""

    place: ClassVar[Mapping[str, int]] = {PIPELINE: 1, DATA_SHARD: 1}

    @property
    def is_spoiled(self) -> bool:
        """Whether this rank is the wrong one."""
        at = self.config.mesh.coordinates(dist.get_rank(), dist.get_world_size())
        return all(at[axis] == coordinate for axis, coordinate in self.place.items())

    def own_params(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters of this rank's stages by name, or none if this rank is right."""
        return seams_engines.stage_params(self.base) if self.is_spoiled else {}


class StepsByItsOwnTerms(SpoilsOneRank):
    """The base class of mutants in which one rank steps with the unreduced gradients of its own backwards."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.terms: dict[str, list[Tensor]] = {name: [] for name in self.own_params() if self.steps_alone(name)}
        for name, found in self.terms.items():
            self.own_params()[name].register_hook(found.append)  # type: ignore[no-untyped-call]

    def steps_alone(self, name: str) -> bool:
        """Return whether the parameter is stepped with the rank's own gradient."""
        return True

    def step(self) -> None:
        for name, found in self.terms.items():
            if found:
                self.own_params()[name].grad = torch.stack(found).sum(dim=0) / len(found)
            found.clear()
        self.base.step()


@mutant(FaultKind.RANKS, on_replicas(Part.OPTIMIZER, "blocks.*"), origin=Origin.MESH)
class OneReplicaStepsByItsOwnData(StepsByItsOwnTerms):
    """Steps one replica of the last stage with the gradient of its own data, although all gradients were reduced."""


@mutant(
    FaultKind.PARAMETERS,
    on_replicas(Part.OPTIMIZER, TIED, "tied_chain", world_size=2),
    on_replicas(Part.OPTIMIZER, TIED, "tied_chain", "1f1b"),
    origin=Origin.MESH,
)
class OneTiedCopyStepsByItsOwnUse(StepsByItsOwnTerms):
    """Steps a tied weight in the last stage with the gradient of its own use, and in the first stage with the sum."""

    place: ClassVar[Mapping[str, int]] = {PIPELINE: 1}

    def steps_alone(self, name: str) -> bool:
        return name == TIED


class ChangesATensor(SpoilsOneRank):
    """The base class of mutants in which one rank has one wrong number in one tensor."""

    def add_one(self, tensor: Tensor) -> None:
        """Add 1 to the first element of this rank's part of a tensor."""
        with torch.no_grad():
            local_tensor(tensor).view(-1)[0] += 1


@mutant(FaultKind.RANKS, on_replicas(Part.REDUCTION, FIRST_BIAS), origin=Origin.MESH)
class AddsToAReducedGradient(ChangesATensor):
    """Adds 1 to an element of the first bias's reduced gradient on one replica of the first stage."""

    place: ClassVar[Mapping[str, int]] = {PIPELINE: 0, DATA_SHARD: 1}

    def train_batch(self, micro_batches: MicroBatches, loss: Loss) -> Sequence[Tensor]:
        losses = super().train_batch(micro_batches, loss)
        param = self.own_params().get(FIRST_BIAS)
        if param is not None and param.grad is not None:
            self.add_one(param.grad)
        return losses


@mutant(
    FaultKind.STATE,
    on_replicas(Part.OPTIMIZER, f"{TIED}/momentum_buffer", "tied_chain", "interleaved", world_size=2),
    origin=Origin.MESH,
)
class OneTiedCopyHasAnotherMomentum(ChangesATensor):
    """Adds 1 to an element of a tied weight's momentum on the last rank after each step."""

    place: ClassVar[Mapping[str, int]] = {PIPELINE: 1}

    def step(self) -> None:
        self.base.step()
        if TIED in self.own_params():
            self.add_one(self.optimizer.state[self.own_params()[TIED]]["momentum_buffer"])


@mutant(FaultKind.CLIPPING, on_replicas(Part.REDUCTION, "norm", variant="1f1b"), origin=Origin.MESH)
class OneReplicaReportsAnotherNorm(SpoilsOneRank):
    """Reports twice the norm on one replica of the last stage, although this replica clips correctly."""

    def grad_norm(self) -> float | None:
        norm: float | None = self.base.grad_norm()
        return 2 * norm if norm is not None and self.is_spoiled else norm


@mutant(
    FaultKind.RANKS,
    Target(
        "pipeline.replicas", Part.OPTIMIZER, "chain", "gpipe", parameter=ROW_WISE_BIAS, world_size=4, mesh="pp2.tp2"
    ),
    origin=Origin.MESH,
)
class OneTensorRankHasAnotherBias(ChangesATensor):
    """Adds 1 to an element of a bias that tp does not split on the second rank of tp after each step."""

    place: ClassVar[Mapping[str, int]] = {PIPELINE: 0, TENSOR: 1}

    def step(self) -> None:
        self.base.step()
        if ROW_WISE_BIAS in self.own_params():
            self.add_one(self.own_params()[ROW_WISE_BIAS])
