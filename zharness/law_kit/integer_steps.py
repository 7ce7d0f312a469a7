"""Define an optimizer whose first step keeps the weights of an exact model integers."""

from __future__ import annotations

from zharness.engines.protocol import GroupSpec, OptimizerSpec

# Rprop moves each element by its step size in the direction of its gradient: the first step moves biases by 1, 0 or
# -1, and nothing else, so that a model of integers stays one, and exact. Adagrad would too, but loses its groups on
# DeepSpeed.
INTEGER_STEPS = OptimizerSpec(
    name="rprop", args={"lr": 0.0, "step_sizes": (0.0, 1.0)}, groups=(GroupSpec("*.bias", {"lr": 1.0}),)
)
