"""Define laws of evaluation mode in an accumulation window, where only forwards with a backward count."""

from __future__ import annotations

import torch

from zharness.law_kit.scenarios import NamedTensors, Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.laws.circumstances.common import ACCUMULATIONS, make_accumulated, train_whole_model

EVALUATION_BATCH = 16  # no window trains this micro-batch


def train_and_evaluate(participant: Participant, window: int, micro: int) -> NamedTensors:
    """Train one micro-batch, run another under no_grad in training and evaluation mode, and return both outputs."""
    train_whole_model(participant, window, micro)
    inputs = participant.get_batch(EVALUATION_BATCH).inputs
    with torch.no_grad():
        output = participant.call(inputs)
        participant.module.eval()
        evaluated = participant.call(inputs)
        participant.module.train()
    return {"output": output, "output in evaluation mode": evaluated}


def train_in_evaluation_mode(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch while the model is in evaluation mode, as users do to freeze batch statistics."""
    participant.module.eval()
    train_whole_model(participant, window, micro)
    participant.module.train()


EVALUATED = WindowScenario(train_and_evaluate, windows=2)
IN_EVALUATION_MODE = WindowScenario(train_in_evaluation_mode, windows=2)

LAWS = (
    window_law(
        "window.evaluated",
        {"": EVALUATED, **{name: make_accumulated(EVALUATED, name) for name in ACCUMULATIONS}},
        "forwards under no_grad inside a window use the window's weights, and do not count as micro-batches",
        kept_because="the only evaluations between the micro-batches of a window that the engine counts",
    ),
    window_law(
        "window.evaluation_mode",
        {name: make_accumulated(IN_EVALUATION_MODE, name) for name in ("2_by_engine", "2_by_caller")},
        "a loss computed in evaluation mode counts in its window like a loss computed in training mode",
        kept_because="the only losses that are computed in evaluation mode",
    ),
)
