"""Define the law window.mixed_calls: the micro-batches of one window may call backward in different ways."""

from __future__ import annotations

from zharness.engines.protocol import Feature
from zharness.law_kit.scenarios import Participant
from zharness.law_kit.window_law import window_law
from zharness.law_kit.window_scenarios import WindowScenario
from zharness.laws.circumstances.common import ALL_EXPERTS, make_accumulated, sum_loss


def train_with_calls_in_turn(participant: Participant, window: int, micro: int) -> None:
    """Train one micro-batch with ``engine.backward(loss)`` or ``loss.backward()``, in turn; windows alternate too."""
    batch = participant.get_batch(2 * window + micro)
    loss = sum_loss(participant.call(batch.inputs, route=ALL_EXPERTS), batch.target)
    backward = participant.tensor_backward if (window + micro) % 2 else participant.backward
    backward(loss)


IN_TURN = WindowScenario(
    train_with_calls_in_turn, windows=2, features=(Feature.TENSOR_BACKWARD, Feature.TENSOR_BACKWARD_IN_WINDOW)
)

LAWS = (
    window_law(
        "window.mixed_calls",
        {name: make_accumulated(IN_TURN, name) for name in ("2_by_engine", "4_by_engine")},
        "if micro-batches of a window call engine.backward and loss.backward in turn, the step uses their mean",
        kept_because="the only windows in which backward is called in two ways",
    ),
)
