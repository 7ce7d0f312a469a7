"""What is held, sent, gathered and counted too often, and what is left behind."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants.around import Around, in_backward
from zharness.mutants.mutant import Kind, Mutant, Target, deepspeed
from zharness.parity import Part


class HoldsTheStateTwice(Around):
    """A second copy of every moment of the optimizer."""

    def step(self) -> None:
        self.right.step()
        for state in self.optimizer.state.values():
            if "exp_avg" in state:
                state["spare"] = state["exp_avg"].clone()


class HoldsGradientsWhole(Around):
    """At stage 2 keeps every gradient whole, beside this rank's part of it."""

    stages = (2,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        gradients = self.right.engine._gradients
        held = gradients.held
        gradients.held = lambda: [*held(), *(torch.zeros_like(parameter) for parameter in model.parameters())]


class SendsTwice(Around):
    """Reduces one more full set of parameters in each backward."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        for parameter in self.module.parameters():
            self.right.engine.comm.all_reduce(torch.zeros_like(parameter))


class StaysGathered(Around):
    """Keeps a gathered copy of one parameter."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept = next(iter(model.parameters())).detach().clone()
        self.right.engine._ledger.add(self.kept)


class GathersUntilBackward(Around):
    """What a forward gathered stays until its backward is over."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: list[Any] = []
        reader = self.right.engine._parameters._reader
        read = reader.read

        def keep(value: Any) -> Any:
            self.kept.append(read(value))
            return self.kept[-1]

        reader.read = keep

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        self.kept.clear()


class LeavesTensorsBehind(Around):
    """Keeps a tensor of every engine that ever was."""

    behind: ClassVar[list[Tensor]] = []

    def close(self) -> None:
        self.behind.append(torch.zeros(()))
        self.right.close()


class LooksAtAllForEach(Around):
    """Looks at every parameter for every parameter that it has."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.right.backward(loss, retain_graph=retain_graph)
        parameters = list(self.module.parameters())
        for _ in parameters:
            for other in parameters:
                other.numel()


class LooksAtAllWhenItRecomputes(Around):
    """Looks at every layer for each layer that a backward computes anew."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for module in self.module.modules():
            module.register_forward_pre_hook(self.look)

    def look(self, *_: Any) -> None:
        """Ask each of them, where a backward runs."""
        if in_backward() != -1:
            for module in self.module.modules():
                module.extra_repr()


def held(check: str, part: Part = Part.GATHER, parameter: str = "*") -> Target:
    """A target among the laws of resources."""
    return Target(f"resources.{check}", part, parameter=parameter)


MUTANTS = (
    Mutant(HoldsTheStateTwice, Kind.RESOURCES, (held("memory_per_rank", parameter="optimizer_state"),)),
    Mutant(HoldsGradientsWhole, Kind.RESOURCES, (held("memory_per_rank", parameter="gradients"),)),
    Mutant(SendsTwice, Kind.RESOURCES, (held("comm_volume", Part.REDUCTION, "sent"),)),
    Mutant(StaysGathered, Kind.RESOURCES, (held("gathered_bytes", parameter="rest"),)),
    Mutant(GathersUntilBackward, Kind.RESOURCES, (held("gathered_bytes", parameter="peak"),)),
    Mutant(LeavesTensorsBehind, Kind.RESOURCES, (held("no_leak"),)),
    Mutant(LooksAtAllForEach, Kind.RESOURCES, (held("hook_count", Part.REDUCTION, "calls"),), deepspeed(7882)),
    Mutant(LooksAtAllWhenItRecomputes, Kind.RESOURCES, (held("hook_count", Part.REDUCTION, "recomputed"),)),
)
