"""Mutants that compute or report a wrong gradient norm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    Reduction,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    ALL_STAGES,
    SHARDED_STAGES,
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper


def compute_norm(grads: Mapping[str, Tensor]) -> float:
    """Return the 2-norm of all tensors in ``grads`` together."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


@mutant(FaultKind.CLIPPING, Target("training.clip_and_norm", parameter="norm"), origin=Origin.SHARDS)
class NormOfItsOwnShard(EngineWrapper):
    """Clips by the norm of the gradients that this rank owns, instead of the global norm."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        seams.wrap_grad_norm(self.base, lambda _: lambda: compute_norm(seams.reduced_grads(self.base)))


@mutant(FaultKind.CLIPPING, Target("parameters.unfrozen", model="odd", parameter="norm"), origin=Origin.ORDERS)
class NormLeavesOutUnfrozenWeights(EngineWrapper):
    """Leaves the weights that were frozen at construction out of the norm, even after these weights are unfrozen."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

        def wrap(norm: Callable[[], float]) -> Callable[[], float]:
            def norm_of_trained() -> float:
                grads = seams.reduced_grads(self.base)
                with seams.with_reduced_grads(self.base, {name: grads[name] for name in trained if name in grads}):
                    return norm()

            return norm_of_trained

        seams.wrap_grad_norm(self.base, wrap)


@mutant(FaultKind.CLIPPING, Target("training.clip_and_norm", parameter="norm"), origin=Origin.SHARDS)
class NormCountsEveryRank(EngineWrapper):
    """Sums the squares over ranks although every rank has all gradients, so the norm is too large."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        factor = math.sqrt(dist.get_world_size())
        seams.wrap_grad_norm(self.base, lambda _: lambda: compute_norm(seams.reduced_grads(self.base)) * factor)


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", parameter="norm"),
    wraps="reference",
    stages=SHARDED_STAGES,
    origin=Origin.BLIND_1,
)
def norm_misses_the_tail(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """On the last rank, leaves out shards from the global norm if the world size does not divide the parameter's size.

    ``grad_norm`` is too small and the clipped step is too long; under fp16, an infinity in these shards is not
    detected.
    """
    engine, is_last = seams.build(model, config), dist.get_rank() == dist.get_world_size() - 1

    def wrap(norm: Callable[[], float]) -> Callable[[], float]:
        def norm_of_even_shards() -> float:
            layouts = {name: param.layout for name, param in seams.model_params(engine).items()}
            even = {
                name: grad
                for name, grad in seams.reduced_grads(engine).items()
                if not (is_last and layouts[name].numel % layouts[name].world_size)
            }
            with seams.with_reduced_grads(engine, even):
                return norm()

        return norm_of_even_shards

    if config.stage > 0:
        seams.wrap_grad_norm(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", model="transformer", dtype="bf16", parameter="norm"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_3,
)
def tied_twice_in_norm(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Counts a tied weight in the global norm once for each of its names.

    ``grad_norm`` is too large, and clipping shrinks the gradients too much.
    """
    engine = seams.build(model, config)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    counts = {name: uses[id(param.parameter)] for name, param in seams.model_params(engine).items()}
    repeats = {name: count - 1 for name, count in counts.items() if count > 1}

    def wrap(norm: Callable[[], float]) -> Callable[[], float]:
        def norm_by_name() -> float:
            again, grads = torch.zeros((), dtype=torch.float64), seams.reduced_grads(engine)
            for name in repeats.keys() & grads.keys():
                again += repeats[name] * torch.linalg.vector_norm(grads[name], dtype=torch.float64).square()
            if seams.optimizer_is_sharded(engine):
                dist.all_reduce(again)
            return math.sqrt(norm() ** 2 + again.item())

        return norm_by_name

    if repeats:
        seams.wrap_grad_norm(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", model="transformer", parameter="norm"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_6,
)
def tied_counted_twice_in_the_norm(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Sums the global norm over every name of a parameter, so that a tied parameter counts once for each name.

    ``grad_norm`` is too large, and clipping shrinks the gradients too much.
    """
    engine = seams.build(model, config)
    names = {param.parameter: name for name, param in seams.model_params(engine).items()}
    times = Counter(names[parameter] for _, parameter in model.named_parameters(remove_duplicate=False))

    def wrap(norm: Callable[[], float]) -> Callable[[], float]:
        def norm_by_name() -> float:
            once = seams.reduced_grads(engine)
            repeated = {n: grad * math.sqrt(times[n]) if times[n] > 1 else grad for n, grad in once.items()}
            with seams.with_reduced_grads(engine, repeated):
                return norm()

        return norm_by_name

    seams.wrap_grad_norm(engine, wrap)
    return engine


class _ClipsOwnShards(TorchEngine):
    """A TorchEngine that clips by the norm of this rank's shards."""

    @torch.no_grad()
    def step(self) -> None:
        limit = seams_engines.clip_limit(self)
        if limit is not None:
            local = _local_grads(self)
            norm = torch.nn.utils.get_total_norm(local)
            factor = float((limit / (norm + 1e-6)).clamp(max=1.0))
            for grad in local:
                grad.mul_(factor)
            seams_engines.set_grad_norm(self, float(norm))
        with seams_engines.without_clipping(self):
            super().step()


def _local_grads(engine: TorchEngine) -> list[Tensor]:
    """Return this rank's shards of the gradients of ``engine``, which is FSDP2."""
    grads = [param.grad for param in seams_engines.params(engine).values() if param.grad is not None]
    return [cast(Any, grad).to_local() if hasattr(grad, "to_local") else grad for grad in grads]


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", parameter="norm"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_2,
)
def fsdp2_clips_by_local_norm(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Clips by the norm of this rank's FSDP2 shards instead of the global norm.

    Each rank scales its gradients by a different factor, and ``grad_norm`` differs between ranks.
    """
    engine = fsdp2.factory(model, config)
    engine.__class__ = _ClipsOwnShards
    return engine


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", parameter="norm"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_4,
)
def fsdp2_norm_of_own_shards(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Reports the norm of this rank's FSDP2 shards as ``grad_norm``, so that the norm differs between ranks.

    Clipping is right, but callers who log ``grad_norm`` or base decisions on it do not get the global norm.
    """

    class Reports(TorchEngine):
        def step(self) -> None:
            own = math.sqrt(sum(float(shard.square().sum()) for shard in _local_grads(self)))
            super().step()
            if seams_engines.clip_limit(self) is not None:
                seams_engines.set_grad_norm(self, own)

    engine = fsdp2.factory(model, config)
    engine.__class__ = Reports
    return engine


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", parameter="norm"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_6,
)
def clips_by_the_shards_norm(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Clips on each FSDP2 rank by the norm of that rank's own shards.

    The norm is too small and differs between ranks, and parts of one parameter are scaled by different factors.
    """

    class Local(TorchEngine):
        def step(self) -> None:
            limit = seams_engines.clip_limit(self)
            if limit is not None:
                local = _local_grads(self)
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in local]))
                for grad in local:
                    grad.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
                seams_engines.set_grad_norm(self, float(norm))
            with seams_engines.without_clipping(self):
                super().step()

    engine = fsdp2.factory(model, config)
    engine.__class__ = Local
    return engine


@mutant(FaultKind.CLIPPING, Target("training.clip_and_norm", variant="sum", parameter="norm"), origin=Origin.BLIND_9)
class NormOfTheMeanOfASum(EngineWrapper):
    """Under reduction by sum, divides the norm by the world size, as if the gradients were averaged."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if config.reduction is Reduction.SUM:
            seams.wrap_grad_norm(self.base, lambda norm: lambda: norm() / dist.get_world_size())
