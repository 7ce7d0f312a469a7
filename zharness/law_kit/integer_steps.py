"""Define an optimizer whose steps keep the weights of an exact model integers."""

from __future__ import annotations

from zharness.engines.protocol import GroupSpec, OptimizerSpec

# Its first two steps move biases by 1, 0 or -1 and nothing else, so that a model of integers stays one, and exact.
INTEGER_STEPS = OptimizerSpec(
    name="rprop", args={"lr": 0.0, "step_sizes": (0.0, 1.0)}, groups=(GroupSpec("*.bias", {"lr": 1.0}),)
)
