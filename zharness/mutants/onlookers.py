"""What shows when somebody looks on: at gradients twice, at modes and buffers, at memory and hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target
from zharness.parity import Part


class LooksAgainDoubled(Around):
    """The second look at the gradients of a step gives twice the gradients."""

    over = "ddp"
    looks = 0

    def full_grads(self) -> dict[str, Tensor]:
        self.looks += 1
        grads: dict[str, Tensor] = self.right.full_grads()
        return {name: self.looks * grad for name, grad in grads.items()}

    def zero_grad(self) -> None:
        self.looks = 0
        self.right.zero_grad()


class LookingHalvesGradients(Around):
    """Whoever asks for the weights between backward and step trains with half of the gradients."""

    over = "ddp"

    def full_params(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.right.full_params()
        for parameter in self.trained():
            parameter.grad = parameter.grad / 2 if parameter.grad is not None else None
        return found


class TrainsInEvaluation(Around):
    """Puts the model into training before every forward."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module.train()
        return self.right(*args, **kwargs)


class SharesStatistics(Around):
    """Gives every rank the mean of all ranks' buffers after each backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        for buffer in self.module.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()


class ForwardsOnACopyOfBuffers(Around):
    """Its forward computes on copies of the buffers, so that running statistics stay what they were."""

    over = "fsdp2"
    stages = (2, 3)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output = self.right(*args, **kwargs)
        for name, buffer in self.module.named_buffers():
            buffer.data = kept[name]
        return output


class StaysGatheredUntilBackward(Around):
    """At stage 3 weights stay gathered from forward to backward, as at stage 2."""

    over = "fsdp2"
    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in model.modules():
            switch: Any = getattr(module, "set_reshard_after_forward", None)
            if switch is not None:
                switch(False, recurse=False)


class WatchesEveryForwardAnew(Around):
    """Each forward puts hooks on all parameters, and no one takes them off again."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.module.parameters():
            if parameter.requires_grad and torch.is_grad_enabled():
                parameter.register_hook(unchanged)  # type: ignore[no-untyped-call]
        return self.right(*args, **kwargs)


def unchanged(grad: Tensor) -> Tensor:
    """A hook that changes nothing."""
    return grad


class SkipsTheModelsHooks(Around):
    """Calls the model's ``forward``, past the hooks that a user has put on the model."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = self.module._forward_hooks
        kept = dict(hooks)
        hooks.clear()
        try:
            return self.right(*args, **kwargs)
        finally:
            hooks.update(kept)


class AlwaysRetains(Around):
    """Retains the graph of every backward, whose activations so live until the next one."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=True)


class ScaleDivides(Around):
    """``scale`` divides the loss by the length of a window, by which gradients are divided once more."""

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.right.scale(loss)
        return scaled / self.config.accumulation_steps


class LeavesItsHooks(Around):
    """``close`` leaves the hooks on parameters that reduce gradients as they come."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(averaged)  # type: ignore[no-untyped-call]


def averaged(grad: Tensor) -> Tensor:
    """The mean over ranks, of which DDP's own is the same."""
    mean = grad.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


MUTANTS = (
    Mutant(
        LooksAgainDoubled,
        Kind.SCALE,
        (Target("training.looked_at", Part.REDUCTION),),
    ),
    Mutant(
        LookingHalvesGradients,
        Kind.SCALE,
        (Target("training.looked_at", Part.REDUCTION),),
    ),
    Mutant(
        TrainsInEvaluation,
        Kind.AUTOCAST,
        (Target("training.modes", Part.FORWARD, "stateful", parameter="mode of *"),),
    ),
    Mutant(
        SharesStatistics,
        Kind.RANKS,
        (Target("training.modes", Part.FORWARD, "stateful", parameter="norm.running*"),),
    ),
    Mutant(
        ForwardsOnACopyOfBuffers,
        Kind.STALE,
        (Target("training.modes", Part.FORWARD, "stateful", parameter="norm.running*"),),
    ),
    Mutant(
        StaysGatheredUntilBackward,
        Kind.RESOURCES,
        (Target("resources.memory_per_rank", Part.GATHER, parameter="parameters behind a forward"),),
    ),
    Mutant(
        WatchesEveryForwardAnew,
        Kind.RESOURCES,
        (Target("resources.hook_count", Part.REDUCTION, parameter="trained"),),
    ),
    Mutant(
        SkipsTheModelsHooks,
        Kind.GRAPH,
        (Target("precision.autocast_policy", None, "mixed", words="dtypes has the wrong names"),),
    ),
    Mutant(
        AlwaysRetains,
        Kind.RESOURCES,
        (Target("backward.engine_backward", Part.LOCAL_GRADIENT, "blocks", parameter="refused"),),
    ),
    Mutant(
        ScaleDivides,
        Kind.SCALE,
        (Target("training.accumulation", Part.REDUCTION, variant="engine"),),
    ),
    Mutant(
        LeavesItsHooks,
        Kind.RESOURCES,
        (Target("resources.close", Part.LOCAL_GRADIENT, "exact"),),
    ),
)
