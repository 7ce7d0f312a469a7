"""Define functions and constants that several laws about unusual training use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from zharness.engines.protocol import AccumulationOwner
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.workload.exact_blocks import EXPERTS

ALL_EXPERTS = tuple(range(EXPERTS))

# Maps an accumulation's name in a law variant to the number of micro-batches and the owner that divides their sum.
ACCUMULATIONS = {
    "1": (1, AccumulationOwner.CALLER),
    "2_by_engine": (2, AccumulationOwner.ENGINE),
    "2_by_caller": (2, AccumulationOwner.CALLER),
    "4_by_engine": (4, AccumulationOwner.ENGINE),
    "4_by_caller": (4, AccumulationOwner.CALLER),
}


def make_accumulated(scenario: WindowScenario, accumulation: str) -> WindowScenario:
    """Return ``scenario`` with the accumulation that has the name ``accumulation`` in ACCUMULATIONS."""
    micro_batches, owner = ACCUMULATIONS[accumulation]
    return replace(scenario, micro_batches=micro_batches, owner=owner)


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of ``output`` times ``target``, an integer whose gradients are integers."""
    return (output * target).sum()


def train_route(participant: Participant, batch_number: int, route: Sequence[int]) -> None:
    """Run forward and backward of one micro-batch through the experts of ``route``."""
    batch = participant.get_batch(batch_number)
    participant.backward(sum_loss(participant.call(batch.inputs, route=route), batch.target))


def train_whole_model(participant: Participant, window: int, micro: int) -> None:
    """Run forward and backward of one micro-batch through every expert. The micro-batches of a window all differ."""
    train_route(participant, 2 * window + micro, ALL_EXPERTS)
