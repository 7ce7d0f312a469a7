"""Contributions to a gradient that are lost, doubled or late: of a rank, of a micro-batch, of a second backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import AccumulationOwner, EngineConfig
from zharness.mutants.around import Around, in_backward
from zharness.mutants.mutant import Kind, Mutant, Target, deepspeed, pytorch
from zharness.parity import Part


class NeverReduces(Around):
    """Each rank keeps the gradient of its own micro-batch."""

    over = "ddp"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.right.no_sync():
            return self.right(*args, **kwargs)


class ForgetsAParameter(Around):
    """Reduces all gradients but that of the first parameter."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        first = next(name for name, _ in model.named_parameters())
        # Where DistributedDataParallel looks for what it is told to leave alone.
        model._ddp_params_and_buffers_to_ignore = [first]  # type: ignore[assignment]
        super().__init__(model, config)


class ReducesNoSecondBackward(Around):
    """DDP as it is: the second backward on a retained graph is not reduced."""

    over = "ddp"


class ReducesNothingAtStage3(Around):
    """At stage 3 each rank keeps its own shard of its own gradient, divided."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        wire = self.right.engine._gradients._wire
        divisor = wire.divisor

        def alone(original: Any, full: Tensor) -> Tensor:
            layout, rank = original.layout, dist.get_rank()
            start, stop = layout.bounds(rank)
            shard = full.new_zeros(layout.length)
            shard[: stop - start] = full.reshape(-1)[start:stop] / divisor
            return shard

        wire.channel.mean = alone
        wire.channel.means = lambda originals, fulls: list(map(alone, originals, fulls))


class HookedParameters(Around):
    """Changes every parameter's local gradient, whichever backward makes it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.changed)  # type: ignore[no-untyped-call]

    def changed(self, grad: Tensor) -> Tensor:
        """What the gradient becomes."""
        return 2 * grad


class DoublesEveryGradient(HookedParameters):
    """Counts every contribution twice."""


class AddsMinusZero(HookedParameters):
    """Adds minus zero to every gradient."""

    def changed(self, grad: Tensor) -> Tensor:
        # torch adds no dense tensor to a sparse one.
        return grad if grad.is_sparse else grad + torch.tensor(-0.0, dtype=grad.dtype)


class LeavesOutTheLastRank(HookedParameters):
    """The last rank's gradients are zero."""

    stages = (2,)

    def changed(self, grad: Tensor) -> Tensor:
        return grad * float(dist.get_rank() < dist.get_world_size() - 1)


class OnlyTheFirstBackwardCounts(HookedParameters):
    """Counts what the first backward of a step makes, and not what a later one, or one within it, does."""

    first = -1

    def changed(self, grad: Tensor) -> Tensor:
        self.first = in_backward() if self.first == -1 else self.first
        return grad if in_backward() == self.first else torch.zeros_like(grad)

    def zero_grad(self) -> None:
        self.first = -1
        self.right.zero_grad()


class LosesAMicroBatch(Around):
    """Forgets what was accumulated before the last backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.zero_grad()
        self.right.backward(loss, retain_graph=retain_graph)


class CountsTheLastMicroBatchTwice(Around):
    """Where it owns accumulation, the last micro-batch before a step counts twice."""

    seen = 0

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        steps = self.config.accumulation_steps
        owned = self.config.accumulation_owner is AccumulationOwner.ENGINE
        self.seen = self.seen % steps + 1
        twice = owned and steps > 1 and self.seen == steps
        self.right.backward(2 * loss if twice else loss, retain_graph=retain_graph)


class ForgetsTheUnsynced(Around):
    """What was accumulated inside no_sync is gone when it ends."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.right.no_sync():
            yield
        self.right.zero_grad()


class RemembersForwards(Around):
    """Divides each loss by the number of forwards since the last backward."""

    forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return self.right(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss / max(self.forwards, 1), retain_graph=retain_graph)
        self.forwards = 0


class ZeroGradForgetsNothing(Around):
    """Its zero_grad forgets nothing."""

    def zero_grad(self) -> None:
        pass


class StepsOnTheFirstLoss(Around):
    """After a retained backward reports the second loss's gradient, and steps on the first's."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[str, Tensor] = {}

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        if retain_graph:
            self.kept = {name: grad.clone() for name, grad in self.right.full_grads().items()}

    def step(self) -> None:
        reduced = self.right.engine._gradients.reduced() if self.kept else {}
        for name, grad in self.kept.items():
            reduced[name].copy_(grad)
        self.kept = {}
        self.right.step()


class LosesTheSecondManualBackward(Around):
    """Of several losses that ``scale`` gives out before a step, only the first one's backward counts."""

    scaled = 0

    def scale(self, loss: Tensor) -> Tensor:
        self.scaled += 1
        ready: Tensor = self.right.scale(loss)
        return ready * float(self.scaled == 1)

    def step(self) -> None:
        self.scaled = 0
        self.right.step()


class LeaksAFlagAfterAnException(Around):
    """A flag that is set while backward runs and is not cleared by an exception doubles the next one's gradients."""

    running = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.right(*args, **kwargs)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self.entered)  # type: ignore[no-untyped-call]
        return output

    def entered(self, grad: Tensor) -> Tensor:
        """The flag goes up; it comes down at the end of the backward, if that has one."""
        leaked = self.running not in (-1, in_backward())
        self.running = in_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self.left)
        return 2 * grad if leaked else grad

    def left(self) -> None:
        self.running = -1


REDUCED, SUMMED = Part.REDUCTION, Part.ACCUMULATION
BLOCKS = "blocks"


def blocks(*checks: str, variant: str = "") -> tuple[Target, ...]:
    """Targets among the laws of backwards."""
    return tuple(Target(check, REDUCED, BLOCKS, variant) for check in checks)


MUTANTS = (
    Mutant(
        NeverReduces,
        Kind.CONTRIBUTION,
        (Target("training.grads", model="transformer"), Target("training.one_hot_rank", model="conv")),
        imitates=deepspeed(7665),
    ),
    Mutant(
        ForgetsAParameter,
        Kind.CONTRIBUTION,
        (Target("training.grads", parameter="first.weight"),),
    ),
    Mutant(
        ReducesNoSecondBackward,
        Kind.CONTRIBUTION,
        (Target("double_backward.retained_then_zero_grad"),),
        imitates=pytorch(47260),
    ),
    Mutant(ReducesNothingAtStage3, Kind.CONTRIBUTION, (Target("training.one_hot_rank"),)),
    Mutant(
        DoublesEveryGradient,
        Kind.CONTRIBUTION,
        (
            *blocks("backward.engine_backward", "backward.tensor_backward", "backward.non_scalar"),
            *blocks("backward.without_grad"),
            *blocks("checkpointing.block", "checkpointing.plain_inputs", variant="non_reentrant"),
            *blocks("checkpointing.whole_model", variant="reentrant"),
            Target("parameters.every_kind", REDUCED, "odd"),
            Target("parameters.late_submodule", REDUCED, "changing"),
        ),
    ),
    Mutant(LeavesOutTheLastRank, Kind.CONTRIBUTION, (Target("training.grads"),)),
    Mutant(
        OnlyTheFirstBackwardCounts,
        Kind.CONTRIBUTION,
        (
            *blocks("checkpointing.block", "checkpointing.nested", "checkpointing.two_regions", variant="reentrant"),
            *blocks("checkpointing.frozen", "checkpointing.non_scalar", variant="reentrant"),
            *blocks("checkpointing.accumulation", variant="non_reentrant"),
            *blocks("backward.outputs", "backward.two_outputs_two_backwards", "backward.backward_in_forward"),
            *blocks("backward.auxiliary_loss", "double_backward.retained_same_loss", "torch_func.inside_forward"),
            Target("parameters.used_on_some_ranks", REDUCED, "changing"),
            Target("parameters.outside_its_module", REDUCED, "changing"),
        ),
        imitates=deepspeed(7780),
    ),
    Mutant(
        LosesAMicroBatch,
        Kind.CONTRIBUTION,
        (
            Target("training.accumulation", SUMMED, variant="caller"),
            Target("training.accumulation", SUMMED, "exact", "caller"),
            Target("training.several_backwards", SUMMED),
        ),
        imitates=deepspeed(7718),
    ),
    Mutant(
        CountsTheLastMicroBatchTwice,
        Kind.CONTRIBUTION,
        (Target("training.accumulation", SUMMED, variant="engine"),),
    ),
    Mutant(ForgetsTheUnsynced, Kind.CONTRIBUTION, (Target("training.no_sync", SUMMED),)),
    Mutant(RemembersForwards, Kind.CONTRIBUTION, (Target("training.forward_alone", variant="no_grad"),)),
    Mutant(
        ZeroGradForgetsNothing,
        Kind.CONTRIBUTION,
        (
            Target("double_backward.retained_then_zero_grad"),
            Target("double_backward.retained_then_zero_grad", model="exact", variant="tensor"),
            *blocks("backward.abort_and_retry", "double_backward.retain_leaks_nothing"),
            *blocks("checkpointing.exception", variant="reentrant"),
            Target("parameters.branch", None, "changing", words="unknown ['branch.bias', 'branch.weight']"),
        ),
        imitates=deepspeed(8245),
    ),
    Mutant(
        StepsOnTheFirstLoss,
        Kind.CONTRIBUTION,
        (Target("double_backward.retained_then_zero_grad", Part.OPTIMIZER),),
        imitates=deepspeed(8045),
    ),
    Mutant(
        LosesTheSecondManualBackward,
        Kind.CONTRIBUTION,
        (Target("double_backward.retained_then_zero_grad", variant="scale"),),
        imitates=deepspeed(8045),
    ),
    Mutant(
        LeaksAFlagAfterAnException,
        Kind.CONTRIBUTION,
        blocks("backward.abort_and_retry"),
        imitates=deepspeed(8045),
    ),
    Mutant(AddsMinusZero, Kind.CONTRIBUTION, (), equivalent="x + (-0.0) is x, bit for bit, for every float x"),
)
