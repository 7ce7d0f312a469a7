"""Define an optimizer whose first step keeps the weights of an exact model integers."""

from __future__ import annotations

from zharness.engines.protocol import GroupSpec, OptimizerSpec

# Adagrad divides the first gradient by the root of its square: the step moves biases by 1, 0 or -1, and nothing else,
# so that a model of integers stays one, and exact.
INTEGER_STEPS = OptimizerSpec(name="adagrad", args={"lr": 0.0}, groups=(GroupSpec("*.bias", {"lr": 1.0}),))
