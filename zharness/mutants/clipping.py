"""Mutants that clip gradients to a wrong norm or at a wrong time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    Reduction,
    ddp,
    fsdp2,
    zero1,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(FaultKind.CLIPPING, Target("training.clip_and_norm", Part.OPTIMIZER), origin=Origin.SHARDS)
class ClipsToHalf(EngineWrapper):
    """Clips gradients to half the configured norm."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=config.clip and config.clip / 2))


@mutant(FaultKind.CLIPPING, Target("training.clip_and_norm", Part.OPTIMIZER), origin=Origin.SHARDS)
class NeverClips(EngineWrapper):
    """Reports the gradient norm but does not clip gradients."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, clip=config.clip and 1e30))


@mutant(FaultKind.CLIPPING, Target("training.clip_and_norm", parameter="norm"), origin=Origin.SHARDS)
class ClipsEachParameterAlone(EngineWrapper):
    """Clips each parameter's gradient by that gradient's own norm."""

    def step(self) -> None:
        if self.config.clip is not None:
            for grad in seams.reduce_pending(self.base).values():
                grad.mul_(min(1.0, self.config.clip / (float(grad.norm()) + 1e-6)))
        self.base.step()


@mutant(
    FaultKind.CLIPPING,
    Target("training.accumulation", Part.LOCAL_GRADIENT, variant="engine"),
    origin=Origin.CIRCUMSTANCES,
)
class ClipsEachMicroBatch(EngineWrapper):
    """Clips the accumulated gradients after every micro-batch, instead of once at the accumulation boundary."""

    def step(self) -> None:
        if self.config.clip is not None and self.config.accumulation_steps > 1:
            nn.utils.clip_grad_norm_(list(self.parameters_with_grad()), self.config.clip)
        self.base.step()


@mutant(FaultKind.CLIPPING, Target("training.any_order", Part.OPTIMIZER, variant="sums"), origin=Origin.ORDERS)
class ClipsTheSumAsAMean(EngineWrapper):
    """Under reduction by sum, multiplies the clipping limit by the world size, as if the limit applied to the mean."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        if config.clip is not None and config.reduction is Reduction.SUM:
            seams_engines.set_clip_limit(self.base, config.clip * dist.get_world_size())


@mutant(FaultKind.CLIPPING, Target("training.any_order", Part.OPTIMIZER, variant="steps"), origin=Origin.ORDERS)
class ClipsAsTheNewestEngine(EngineWrapper):
    """Uses one clipping norm for all engines of the process: that of the engine that was built last."""

    wraps = "ddp"
    limit: float | None = None

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        type(self).limit = config.clip

    def step(self) -> None:
        seams_engines.set_clip_limit(self.base, type(self).limit)
        self.base.step()


class _ClipsEveryName(TorchEngine):
    """A TorchEngine that clips the gradient of a tied weight once for each of the weight's names."""

    def step(self) -> None:
        limit = seams_engines.clip_limit(self)
        if limit is not None:
            named = [param for _, param in self.module.named_parameters(remove_duplicate=False)]
            seams_engines.set_grad_norm(self, float(torch.nn.utils.clip_grad_norm_(named, limit)))
        with seams_engines.without_clipping(self):
            super().step()


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", model="transformer", parameter="norm"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_2,
)
def ddp_clips_tied_twice(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Counts a tied weight in the norm, and clips its gradient, once for each of the weight's names.

    The reported norm is not the norm of the gradients, and the tied weight learns more slowly than other weights.
    """
    engine = ddp.factory(model, config)
    engine.__class__ = _ClipsEveryName
    return engine


class _ModuleByModule(TorchEngine):
    def step(self) -> None:
        limit = seams_engines.clip_limit(self)
        if limit is None:
            super().step()
            return
        listed = [param for module in self.module.modules() for param in module.parameters(recurse=False)]
        seams_engines.set_grad_norm(self, float(torch.nn.utils.clip_grad_norm_(listed, limit)))
        seams_engines.optimizer(self).step()
        seams_engines.schedule(self).step()
        seams_engines.reset_window(self)


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", model="transformer", parameter="norm"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_5,
)
def tied_clipped_twice(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Lists the parameters module by module for clipping, so that a tied weight is listed once for each of its modules.

    The norm contains a tied weight twice, and the weight's gradient is multiplied by the clipping factor twice.
    """
    engine = zero1.factory(model, config)
    engine.__class__ = _ModuleByModule
    return engine


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.optimizers", Part.OPTIMIZER, variant="long"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_4,
)
def ddp_clips_each_group(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Clips each parameter group by that group's own norm, although ``clip`` limits the global norm.

    The reported norm is the global norm, and the gradients are right if there is only one group.
    """

    class Clips(TorchEngine):
        def step(self) -> None:
            limit, norms = seams_engines.clip_limit(self), list[float]()
            if limit is not None:
                groups = [group["params"] for group in seams_engines.optimizer(self).param_groups]
                norms = [float(nn.utils.clip_grad_norm_(group, limit)) for group in groups]
            with seams_engines.without_clipping(self):
                super().step()
            if limit is not None:
                seams_engines.set_grad_norm(self, math.sqrt(sum(norm**2 for norm in norms)))

    engine = ddp.factory(model, config)
    engine.__class__ = Clips
    return engine


class _ClipsByGroup(TorchEngine):
    """A TorchEngine that clips each parameter group by that group's own norm."""

    def step(self) -> None:
        limit = seams_engines.clip_limit(self)
        if limit is None:
            super().step()
            return
        groups = [group["params"] for group in seams_engines.optimizer(self).param_groups]
        norms = [nn.utils.clip_grad_norm_(group, limit) for group in groups]
        full_norms = [float(seams_engines.full_tensor(self, norm)) for norm in norms]
        with seams_engines.without_clipping(self):
            super().step()
        seams_engines.set_grad_norm(self, math.hypot(*full_norms))


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.optimizers", Part.OPTIMIZER, variant="long"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_1,
)
def fsdp2_clips_by_group(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Clips each FSDP2 parameter group by that group's own norm, but reports the right global norm as ``grad_norm``.

    If there are several groups, the direction of the gradient changes; clipping by the global norm does not change it.
    """
    engine = fsdp2.factory(model, config)
    engine.__class__ = _ClipsByGroup
    return engine


@mutant_factory(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", Part.OPTIMIZER, dtype="fp16"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_5,
)
def clips_before_unscaling(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Computes the clipping factor from the norm of the scaled gradients, but reports the right norm.

    With a loss scale, gradients far below the clipping norm are clipped, by a factor up to the loss scale.
    """
    engine = seams.build(model, config)
    scaler, limit = seams.loss_scaler(engine), seams.settings(engine).max_grad_norm

    def unscale_and_clip(reduced: Mapping[str, Tensor]) -> bool:
        scale, norm = scaler.value, None
        if limit is not None or seams.skips_on_overflow(engine) or scaler.is_needed():
            norm = seams.grad_norm(engine) / scale
        seams.set_grad_norm(engine, norm)
        finite = seams.grads_are_finite(engine) if norm is None else math.isfinite(norm)
        factor = 1.0 / scale
        if limit is not None and norm is not None:
            factor *= min(1.0, limit / (norm * scale + 1e-6))
        if finite and factor != 1.0:
            for grad in reduced.values():
                grad.mul_(factor)
        return finite

    seams.wrap_unscale_and_clip(engine, lambda _: unscale_and_clip)
    return engine


@mutant(
    FaultKind.CLIPPING,
    Target("training.clip_and_norm", Part.OPTIMIZER, setting="least_limits"),
    origin=Origin.BLIND_11,
)
class ClipsEachSubGroup(EngineWrapper):
    """At stage 3 with sub groups of one element, clips each weight's gradient by that gradient's own norm."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        is_split = config.options.get("zero_optimization", {}).get("sub_group_size") == 1
        super().__init__(model, replace(config, clip=None) if is_split else config)
        self.limit = config.clip if is_split else None
        self.norm: float | None = None

    def step(self) -> None:
        if self.limit is None:
            self.base.step()
            return
        self.norm = seams.grad_norm(self.base)
        grads = seams.reduce_pending(self.base)
        for name, grad in grads.items():
            with seams.with_reduced_grads(self.base, {name: grad}):
                norm = seams.grad_norm(self.base)
            grad.mul_(min(1.0, self.limit / (norm + 1e-6)))
        self.base.step()

    def grad_norm(self) -> float | None:
        norm: float | None = self.base.grad_norm() if self.limit is None else self.norm
        return norm
