"""Define laws about windows and frozen weights in bf16, where an engine may keep gradients of two dtypes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zharness.engines.protocol import Feature
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario, WindowScript
from zharness.laws.circumstances.common import ALL_EXPERTS, make_accumulated, sum_loss, train_route, train_whole_model

# One window of small integers, which bf16 holds exactly; more steps would need more bits than bf16 has.
BF16 = ("bf16",)


def make_partial_script(is_used: Callable[[int], bool]) -> WindowScript:
    """Return a script whose micro-batch with the number ``micro`` uses the last expert if ``is_used(micro)``."""

    def train(participant: Participant, window: int, micro: int) -> None:
        """Train one micro-batch with every expert, or with every expert but the last."""
        train_route(participant, micro, ALL_EXPERTS if is_used(micro) else ALL_EXPERTS[:-1])

    return train


def train_after_frozen_forward(participant: Participant, window: int, micro: int) -> None:
    """Run a forward of the frozen model, and train a micro-batch after all of its weights are unfrozen."""
    frozen = [parameter for parameter in participant.module.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    with torch.no_grad():
        participant.call(participant.get_batch(0).inputs)
    for parameter in frozen:
        parameter.requires_grad_(True)
    train_whole_model(participant, window, micro)


def train_gated(participant: Participant, window: int, micro: int) -> None:
    """Train a micro-batch; every micro-batch except the first uses the gate of the layer."""
    batch = participant.get_batch(micro)
    participant.backward(sum_loss(participant.call(batch.inputs, gated=micro > 0), batch.target))


FIRST = WindowScenario(make_partial_script(lambda micro: micro == 0), windows=1)
LATER = WindowScenario(make_partial_script(lambda micro: micro > 0), windows=1)
FROZEN_FORWARD = WindowScenario(train_after_frozen_forward, windows=1)
GATED = make_accumulated(WindowScenario(train_gated, windows=1, in_no_sync=True), "2_by_caller")
OWNERS = ("2_by_engine", "2_by_caller")
PARTIAL = {
    f"{name}_{owner}": make_accumulated(scenario, owner)
    for name, scenario in (("first", FIRST), ("later", LATER))
    for owner in OWNERS
}

LAWS = (
    window_law(
        "window.partly_used_low_precision",
        PARTIAL,
        "in bf16, a weight that only some micro-batches of a window use is updated by the sum of their gradients",
        dtypes=BF16,
        kept_because="the only law of partly used weights in which gradients may be of two dtypes",
    ),
    window_law(
        "window.partly_used_layer",
        {"": GATED},
        "in bf16 under no_sync, a parameter used by the last micro-batch alone gets its gradient, like its whole layer",
        model="gated",
        dtypes=BF16,
        kept_because="the only law in which micro-batches use a part of a layer, so that its gradients differ in dtype",
    ),
    window_law(
        "idle.frozen_forward",
        {"": FROZEN_FORWARD},
        "in bf16, a model that is frozen in its first forward trains as in plain PyTorch once it is unfrozen",
        features=(Feature.UNFREEZING,),
        dtypes=BF16,
        kept_because="the only law in which no weight is trained when the engine sees the model for the first time",
    ),
)
