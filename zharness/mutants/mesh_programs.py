"""Define mutants of a mesh that are wrong only on one coordinate, in one state of the engine, in one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.engines.torch_engine import TorchEngine
from zharness.mesh import DATA_SHARD, REPLICATE, TENSOR
from zharness.mutants import seams_engines
from zharness.mutants.mesh import REP2, MeshWrapper, on_mesh
from zharness.mutants.mesh_context import UlyssesWrapper, find_attention, on_context
from zharness.mutants.mesh_dropout import on_dropout
from zharness.mutants.mesh_experts import ExpertsWrapper
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import CountsMicroBatches
from zharness.parity import Part


@mutant(
    FaultKind.CONTRIBUTION,
    on_context(Part.FORWARD, "mesh.evaluation", "output", model="stepped_context"),
    on_context(Part.FORWARD, "mesh.evaluation", "output", 4, "stepped_context"),
    Target("mesh.any_order", Part.FORWARD, "stepped_context", "steps", mesh="cp2"),
    origin=Origin.MESH,
)
class AttendsWithinEachPartInEvaluation(UlyssesWrapper):
    """In evaluation mode under no_grad, exchanges nothing in attention: each rank attends to its own part alone."""

    def spoil(self) -> None:
        for attention in find_attention(self.module):
            attention.register_forward_hook(self.stay_within)

    def stay_within(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        """Return, in an evaluation, the output of attention within this rank's part of the sequence."""
        if module.training or torch.is_grad_enabled():
            return output
        within: Tensor = module.attention.local_attn(*inputs)
        return within


@mutant(FaultKind.RANKS, on_dropout("dropped_heads", parameter="masks of drop_*", variant="masks"), origin=Origin.MESH)
class DrawsTheNumbersOfTheFirstDataRank(MeshWrapper):
    """In a forward in training mode, draws the random numbers of the first data rank on all data ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.mesh.sizes and self.module.training:
            own = torch.get_rng_state()
            states = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(states, own)
            first = self.config.mesh.rank_at_start(DATA_SHARD, dist.get_rank(), dist.get_world_size())
            torch.set_rng_state(states[first])
        return self.base(*args, **kwargs)


@mutant(
    FaultKind.CONTRIBUTION,
    Target("mesh.any_order", Part.LOCAL_GRADIENT, "stepped_heads", "accumulated", world_size=4, mesh=REP2),
    origin=Origin.MESH,
)
class ForgetsUnreducedInForwardsOfTheSecondCopy(MeshWrapper):
    """In a forward without gradients, zeroes the second copy's gradients that no_sync blocks left unreduced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        if self.coordinates[REPLICATE] == 1 and not torch.is_grad_enabled():
            seams_engines.zero_unreduced(self.module)
        return output


@mutant(
    FaultKind.CLIPPING,
    on_mesh("mesh.any_order_clipped", Part.OPTIMIZER, "stepped_sequence"),
    origin=Origin.MESH,
)
class ClipsTighterAfterNoSyncOnTheSecondTensorRank(MeshWrapper):
    """On the second rank of tp, clips to half of the configured norm in a step after a no_sync block."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.blocks = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.blocks += 1
        with self.base.no_sync():
            yield

    def step(self) -> None:
        limit = self.config.clip
        if limit is not None and self.blocks and self.coordinates[TENSOR] == 1:
            seams_engines.set_clip_limit(self.base, limit / 2)
        self.base.step()
        seams_engines.set_clip_limit(self.base, limit)
        self.blocks = 0


@mutant(
    FaultKind.OPTIMIZER,
    Target("mesh.any_order", Part.OPTIMIZER, "stepped_heads", "windows", mesh="tp2"),
    origin=Origin.MESH,
)
class SchedulesMicroBatchesOnTheSecondTensorRank(CountsMicroBatches):
    """On the second rank of tp, advances the learning-rate schedule at each micro-batch of a window."""

    wraps = "deepspeed"
    stages = (0, 1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.place = config.mesh.coordinates(dist.get_rank(), dist.get_world_size()).get(TENSOR, 0)

    def step(self) -> None:
        self.base.step()
        self.count_step()
        if self.micro and self.place == 1:
            seams_engines.step_deepspeed_schedule(self.base)


@mutant(
    FaultKind.CLIPPING,
    Target("mesh.clip", Part.OPTIMIZER, "routed", parameter="moe.experts.*", mesh="ep2"),
    Target("mesh.any_order", Part.OPTIMIZER, "routed", "windows", parameter="moe.experts.*", mesh="ep2"),
    origin=Origin.MESH,
)
class ClipsNoExpert(ExpertsWrapper):
    """Computes the norm of all gradients, but clips only the gradients of layers that are not experts."""

    stages = (1, 2)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        limit = config.clip
        if self.size > 1 and limit is not None:
            seams_engines.wrap_global_norm(self.base, lambda original: lambda: self.enlarge_experts(original(), limit))

    def enlarge_experts(self, norm: Tensor, limit: float) -> Tensor:
        """Multiply the gradients of experts by the divisor of clipping to ``limit``, and return the norm."""
        factor = (norm + 1e-6) / limit
        seams_engines.scale_expert_gradients(self.base, factor.clamp(min=1.0))
        return norm


@mutant(
    FaultKind.CONTRIBUTION,
    Target("mesh.evaluation", Part.FORWARD, "routed", parameter="output", mesh="ep2"),
    origin=Origin.MESH,
)
class DropsTokensOverTheCapacityInEvaluation(ExpertsWrapper):
    """In an evaluation, drops the tokens of an expert above the expert's capacity, which is at least 4."""

    def spoil(self, layer: Any) -> None:
        layer.gate.register_forward_pre_hook(self.drop_in_evaluation)

    def drop_in_evaluation(self, gate: Any, _inputs: Any) -> None:
        """Make the gate drop tokens in its next forward if this forward is an evaluation."""
        gate.drop_tokens = not gate.training


@mutant(
    FaultKind.STALE,
    Target("training.sgd_step", Part.OPTIMIZER, "mlp", world_size=4, mesh="tp2", dtype="bf16"),
    origin=Origin.MESH,
)
class RoundsSplitMastersAfterAStep(MeshWrapper):
    """In bf16, overwrites the fp32 weights of split layers with their bf16 copies in a step."""

    @torch.no_grad()
    def step(self) -> None:
        self.base.step()
        for name, parameter in seams_engines.params(cast(TorchEngine, self.base)).items():
            if self.config.dtype == "bf16" and name.rpartition(".")[0] in self.config.tp_plan:
                local = cast(Any, parameter).to_local()
                local.copy_(local.bfloat16())
