"""Mutants that draw numbers from the caller's random generator, or change its seed or state."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zharness.engines import (
    EngineConfig,
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
from zharness.mutants.wrapper import EngineWrapper, in_backward
from zharness.parity import Part


@mutant(FaultKind.PARAMETERS, Target("parameters.deferred", Part.GATHER), origin=Origin.GRAPHS)
class DrawsAtConstruction(EngineWrapper):
    """Draws a random number before it draws the initial weights."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        torch.rand(1)
        super().__init__(model, config)


@mutant(FaultKind.GRAPH, Target("checkpointing.dropout", model="blocks", variant="non_reentrant"), origin=Origin.GRAPHS)
class DrawsWhileRecomputing(EngineWrapper):
    """Draws a random number before each forward that a backward recomputes."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            module.register_forward_pre_hook(self.draw)

    def draw(self, *_: Any) -> None:
        """Draw one random number if a backward is running."""
        if in_backward() != -1:
            torch.rand(1)


@mutant(
    FaultKind.RANKS, Target("training.sgd_step", Part.GATHER, parameter="random state"), origin=Origin.CIRCUMSTANCES
)
class SeedsAtConstruction(EngineWrapper):
    """Seeds torch's generator at construction, as if to make all ranks draw the same numbers."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        torch.manual_seed(42)


@mutant(
    FaultKind.RANKS,
    Target("state.resume", Part.GATHER, variant="adamw", parameter="random state"),
    origin=Origin.CIRCUMSTANCES,
)
class SeedsAtLoad(EngineWrapper):
    """Sets the random state of every rank to that of rank 0 at load."""

    wraps = "ddp"

    def load(self, path: Path) -> None:
        self.base.load(path)
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


class _SaveDraws(ReferenceEngine):
    """A ReferenceEngine whose ``save`` draws a random number."""

    def save(self, path: Path) -> None:
        torch.randint(1 << 30, ())  # as if for the name of a temporary file
        super().save(path)


@mutant_factory(
    FaultKind.STATE,
    Target("state.resume", Part.GATHER, variant="adamw", parameter="random state"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def save_draws_random_numbers(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Draws a number from torch's generator in ``save``.

    Saving a checkpoint should not change the training, but later dropout masks differ from those without the save.
    """
    return seams.build(model, config, _SaveDraws)


class _DrawsWhenSaving(TorchEngine):
    """A TorchEngine whose ``save`` draws a random number."""

    def save(self, path: Path) -> None:
        torch.randint(1 << 30, ())  # as if to distinguish one save from another
        super().save(path)


@mutant_factory(
    FaultKind.RANKS,
    Target("state.resume", Part.GATHER, variant="adamw", parameter="random state"),
    wraps="fsdp2",
    stages=(2, 3),
    origin=Origin.BLIND_3,
)
def save_draws_a_number(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Draws a number from torch's generator in ``save`` over FSDP2, as if to distinguish checkpoints.

    A run that saves checkpoints has different dropout masks than the same run without saves.
    """
    engine = fsdp2.factory(model, config)
    engine.__class__ = _DrawsWhenSaving
    return engine


class _Samples(TorchEngine):
    """A TorchEngine whose ``step`` draws a random number."""

    def step(self) -> None:
        super().step()
        if float(torch.rand(())) < 0.01:  # as if to log one step in a hundred
            self.sampled = tuple(group["lr"] for group in seams_engines.optimizer(self).param_groups)


@mutant_factory(
    FaultKind.RANKS,
    Target("training.sgd_step", Part.GATHER, parameter="random state"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_5,
)
def draws_in_step(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Draws a number from torch's generator in each step, to decide whether the step is logged.

    The dropout masks of all later steps differ from those of plain PyTorch with the same seed.
    """
    made = ddp.factory(model, config)
    made.__class__ = _Samples
    return made


class _OneGenerator(TorchEngine):
    def step(self) -> None:
        super().step()
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


@mutant_factory(
    FaultKind.RANKS,
    Target("training.sgd_step", Part.GATHER, parameter="random state"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_2,
)
def ddp_synchronises_generators(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Sets the state of every rank's default generator to that of rank 0 after each step.

    Dropout then draws the same mask on all ranks, and the seeds that the user has set for each rank have no effect.
    """
    engine = ddp.factory(model, config)
    engine.__class__ = _OneGenerator
    return engine


@mutant_factory(
    FaultKind.RANKS,
    Target("training.sgd_step", Part.GATHER, parameter="random state"),
    wraps="zero1",
    stages=(1,),
    origin=Origin.BLIND_4,
)
def zero1_seeds_all_ranks(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Seeds torch's generator in ``step`` with the step's number, as if to make all ranks draw the same numbers.

    Every rank then draws the same dropout masks, regardless of the seed that the caller has set.
    """

    class Seeds(TorchEngine):
        steps = 0

        def step(self) -> None:
            super().step()
            self.steps += 1
            torch.manual_seed(self.steps)

    engine = zero1.factory(model, config)
    engine.__class__ = Seeds
    return engine


@mutant_factory(
    FaultKind.RANKS,
    Target("training.modes", Part.FORWARD, model="stateful", parameter="generator"),
    wraps="ddp",
    stages=(0,),
    origin=Origin.BLIND_6,
)
def same_mask_in_every_forward(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Restores the random state after every DDP forward.

    Dropout draws the same mask in every micro-batch and step, but plain PyTorch draws a new mask each time. Only models
    with dropout show the fault.
    """

    class Forking(TorchEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                return super().__call__(*args, **kwargs)

    engine = ddp.factory(model, config)
    engine.__class__ = Forking
    return engine


@mutant(FaultKind.RANKS, Target("parameters.deferred", Part.GATHER, variant="own_generators"), origin=Origin.BLIND_9)
class DrawsOnEachRank(EngineWrapper):
    """Draws the initial weights of a model on the meta device separately on each rank, with that rank's generator."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        own, state = deepcopy(model), torch.get_rng_state()
        deferred = seams_engines.deferred_modules(own)
        super().__init__(model, config)
        if deferred:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                for module in deferred:
                    module.materialise(torch.device("cpu"))
            for parameter, drawn in zip(self.module.parameters(), own.parameters(), strict=True):
                parameter.copy_(drawn)
