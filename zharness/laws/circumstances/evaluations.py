"""Define the law window.evaluated: forwards without gradients inside an accumulation window do not count."""

from __future__ import annotations

import torch

from zharness.law_kit.scenarios import NamedTensors, Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.laws.circumstances.common import ACCUMULATIONS, make_accumulated, train_whole_model

EVALUATION_BATCH = 16  # no window trains this micro-batch


def train_and_evaluate(participant: Participant, window: int, micro: int) -> NamedTensors:
    """Train one micro-batch, evaluate another in training and in evaluation mode, and return both outputs."""
    train_whole_model(participant, window, micro)
    inputs = participant.get_batch(EVALUATION_BATCH).inputs
    with torch.no_grad():
        output = participant.call(inputs)
        participant.module.eval()
        evaluated = participant.call(inputs)
        participant.module.train()
    return {"output": output, "output in evaluation mode": evaluated}


EVALUATED = WindowScenario(train_and_evaluate, windows=2)

LAWS = (
    window_law(
        "window.evaluated",
        {"": EVALUATED, **{name: make_accumulated(EVALUATED, name) for name in ACCUMULATIONS}},
        "forwards under no_grad after each micro-batch of a window have the weights of the window, and do not count",
        kept_because="the only evaluations between the micro-batches of a window that the engine counts",
    ),
)
