"""Mutants that lose the gradient of a weight that is read more than once, or outside the forward (stage 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import EngineConfig
from zharness.mutants import seams_stage3
from zharness.mutants.mutant import FaultKind, Origin, Target, mutant
from zharness.mutants.wrapper import CountsMicroBatches, EngineWrapper
from zharness.parity import Part


def read_target(variant: str) -> Target:
    """Return the target in window.further_reads, whose expert 1 is read more than once."""
    return Target("window.further_reads", Part.OPTIMIZER, "experts", variant, parameter="experts.1.*")


@mutant(FaultKind.CONTRIBUTION, read_target("outside_2_by_engine"), origin=Origin.BLIND_10)
class DetachesReadsInsideAWindow(CountsMicroBatches):
    """Detaches a weight that is read outside the forward after the first micro-batch of an engine's window."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)

        def wrap(unshard: seams_stage3.Unshard) -> seams_stage3.Unshard:
            def unshard_or_detach(value: Any) -> Any:
                is_outside = seams_stage3.running_forward(self.base) is None
                full = unshard(value)
                return full.detach() if is_outside and self.micro and isinstance(full, Tensor) else full

            return unshard_or_detach

        seams_stage3.wrap_unshard(self.base, wrap)

    def step(self) -> None:
        self.count_step()
        self.base.step()


@mutant(FaultKind.CONTRIBUTION, read_target("no_grad_first"), origin=Origin.BLIND_10)
class ReusesReadsWithoutGradients(EngineWrapper):
    """If a forward reads a weight under no_grad, returns the same detached tensor for later reads of that forward."""

    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.kept: dict[nn.Parameter, Tensor] = {}

        def wrap(unshard: seams_stage3.Unshard) -> seams_stage3.Unshard:
            def unshard_or_reuse(value: Any) -> Any:
                if not isinstance(value, nn.Parameter):
                    return unshard(value)
                if value not in self.kept:
                    full = unshard(value)
                    if torch.is_grad_enabled():
                        return full
                    self.kept[value] = full.detach()
                return self.kept[value]

            return unshard_or_reuse

        seams_stage3.wrap_unshard(self.base, wrap)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.kept.clear()
        output = self.base(*args, **kwargs)
        self.kept.clear()
        return output
