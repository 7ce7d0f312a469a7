"""Mutants whose ``no_sync`` loses gradients, keeps them too long, or stays in effect after an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
    ddp,
    fsdp2,
)
from zharness.engines.reference import ReferenceEngine
from zharness.engines.torch_engine import TorchEngine, do_nothing
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper
from zharness.parity import Part


@mutant(FaultKind.CONTRIBUTION, Target("training.no_sync", Part.ACCUMULATION), origin=Origin.CONTRIBUTIONS)
class ForgetsTheUnsynced(EngineWrapper):
    """Drops, at the end of a ``no_sync`` block, the gradients that were accumulated inside the block."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.base.no_sync():
            yield
        self.base.zero_grad()


@mutant(
    FaultKind.CONTRIBUTION,
    Target("window.partly_used", Part.OPTIMIZER, model="experts", variant="first_2_in_no_sync"),
    origin=Origin.CONTRIBUTIONS,
)
class DropsWhatTheNextBackwardLeaves(EngineWrapper):
    """Drops a gradient that was pending at the end of ``no_sync`` if the next backward does not use the weight."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.pending: set[nn.Parameter] = set()
        self.used_parameters: set[nn.Parameter] = set()
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self.add, parameter))  # type: ignore[no-untyped-call]

    def add(self, parameter: nn.Parameter, _grad: Tensor) -> None:
        """Record that the running backward uses ``parameter``."""
        self.used_parameters.add(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.base.no_sync():
            yield
        self.pending = set(self.parameters_with_grad())

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.used_parameters = set()
        self.base.backward(loss, retain_graph=retain_graph)
        for parameter in self.pending - self.used_parameters:
            parameter.grad = None
        self.pending = set()


class _SecondBlockAnew(ReferenceEngine):
    blocks = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            if self.blocks:
                for param in seams.model_params(self).values():
                    param.parameter.grad = None
            self.blocks += 1
            yield

    def step(self) -> None:
        super().step()
        self.blocks *= bool(seams.micro_batches(self))

    def zero_grad(self) -> None:
        super().zero_grad()
        self.blocks = 0


@mutant_factory(
    FaultKind.CONTRIBUTION, Target("training.no_sync"), wraps="reference", stages=(0, 1), origin=Origin.BLIND_1
)
def second_no_sync_begins_anew(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 0 and 1, clears the local gradients at the start of the second ``no_sync`` block of a step.

    The gradients of the first block, and of backwards between the two blocks, are lost.
    """
    return seams.build(model, config, _SecondBlockAnew)


def _without_finally(engine: TorchEngine) -> TorchEngine:
    """Replace DDP's ``no_sync`` by a version that does not enable the reduction again if its block raises."""
    wrapper = seams_engines.ddp_wrapper(engine)

    @contextmanager
    def no_sync() -> Iterator[None]:
        before, wrapper.require_backward_grad_sync = wrapper.require_backward_grad_sync, False
        yield
        wrapper.require_backward_grad_sync = before

    seams_engines.replace_no_sync(engine, no_sync)
    return engine


@mutant_factory(FaultKind.CONTRIBUTION, Target("training.no_sync"), wraps="ddp", stages=(0,), origin=Origin.BLIND_1)
def ddp_no_sync_leaks(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Leaves DDP's reduction disabled if a ``no_sync`` block raises.

    If the caller catches the exception and goes on, gradients are not reduced, and the ranks diverge.
    """
    return _without_finally(ddp.factory(model, config))


@mutant_factory(FaultKind.CONTRIBUTION, Target("training.no_sync"), wraps="ddp", stages=(0,), origin=Origin.BLIND_2)
def ddp_no_sync_is_left_on(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Has no ``try`` and ``finally`` in ``no_sync`` over DDP, so an exception leaves the reduction disabled.

    If the caller catches the exception (for an odd batch, or out of memory) and goes on, each rank trains on its own
    gradients.
    """
    return _without_finally(ddp.factory(model, config))


@mutant_factory(FaultKind.CONTRIBUTION, Target("training.no_sync"), wraps="ddp", stages=(0,), origin=Origin.BLIND_3)
def failed_no_sync_stays_off(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Enables the reduction again after a ``no_sync`` block over DDP, but not in a ``finally``.

    After an exception inside the block that the caller caught, no backward is reduced, and the ranks diverge.
    """
    return _without_finally(ddp.factory(model, config))


@mutant_factory(FaultKind.CONTRIBUTION, Target("training.no_sync"), wraps="ddp", stages=(0,), origin=Origin.BLIND_4)
def ddp_no_sync_left_by_exception(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Has no ``finally`` in ``no_sync`` over DDP, so no backward is reduced after an exception inside the block.

    If the caller drops the bad micro-batch, calls ``zero_grad`` and goes on, every rank trains alone, without an error.
    """
    return _without_finally(ddp.factory(model, config))


@mutant_factory(FaultKind.CONTRIBUTION, Target("training.no_sync"), wraps="ddp", stages=(0,), origin=Origin.BLIND_5)
def no_sync_left_by_exception(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Enables DDP's reduction again after a ``no_sync`` block only if the block ends without an exception.

    After an exception that the caller handles, gradients are not reduced, and no error is raised.
    """
    return _without_finally(ddp.factory(model, config))


@mutant_factory(FaultKind.CONTRIBUTION, Target("training.no_sync"), wraps="fsdp2", stages=(2, 3), origin=Origin.BLIND_1)
def fsdp2_forgets_once(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Drops FSDP2's unreduced gradients only in the first ``zero_grad`` after ``no_sync``; later calls keep them.

    The next reduced backward adds the gradients of an accumulation window that the caller had dropped.
    """
    engine = fsdp2.factory(model, config)
    spent = False

    def wrap(drop_gradients: Callable[[], None]) -> Callable[[], None]:
        def drop_once() -> None:
            nonlocal spent
            if seams_engines.has_unreduced(sync) and not spent:
                spent = True
                drop_gradients()

        return drop_once

    sync = seams_engines.fsdp2_sync(engine)
    seams_engines.wrap_drop_gradients(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.no_sync", Part.LOCAL_GRADIENT),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_3,
)
def zero_grad_misses_no_sync(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Drops the reduced shards in ``zero_grad`` over FSDP2, but not the gradients that ``no_sync`` accumulated.

    The accumulated gradients belong to the unsharded weights. The next reduced backward adds the micro-batches that
    should have been dropped.
    """
    engine = fsdp2.factory(model, config)
    seams_engines.wrap_drop_gradients(engine, seams_engines.fsdp2_reset_reduced)
    return engine


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.no_sync", Part.LOCAL_GRADIENT),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_4,
)
def fsdp2_keeps_unreduced(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Drops only the gradients of the shards in ``zero_grad`` over FSDP2, and keeps gradients of ``no_sync`` blocks.

    The protocol requires ``zero_grad`` to drop all gradients, including those of unsharded weights; the next reduced
    backward adds the gradients that were kept.
    """
    engine = fsdp2.factory(model, config)
    seams_engines.wrap_drop_gradients(engine, seams_engines.fsdp2_reset_reduced)
    return engine


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.no_sync", Part.LOCAL_GRADIENT),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_5,
)
def unreduced_survive_zero_grad(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Drops only the gradients of the shards in ``zero_grad`` over FSDP2, not the gradients of ``no_sync`` blocks.

    The next backward adds gradients that the caller had dropped.
    """
    engine = fsdp2.factory(model, config)
    seams_engines.wrap_drop_gradients(engine, lambda _: do_nothing)
    return engine


@mutant_factory(
    FaultKind.CONTRIBUTION,
    Target("training.no_sync", None, cause="full_grads has the wrong names"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_6,
)
def no_sync_outlives_an_exception(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Has no ``finally`` in ``no_sync`` over FSDP2, so an exception inside the block leaves the reduction disabled.

    If the caller skips a bad micro-batch (a forward that raises), training uses unreduced gradients without an error.
    """
    engine = fsdp2.factory(model, config)
    sync = seams_engines.fsdp2_sync(engine)

    @contextmanager
    def no_sync() -> Iterator[None]:
        seams_engines.set_gradient_sync(sync, enabled=False)
        yield
        seams_engines.set_gradient_sync(sync, enabled=True)

    seams_engines.replace_no_sync(engine, no_sync)
    return engine
