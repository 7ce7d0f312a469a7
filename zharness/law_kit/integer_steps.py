"""Define optimizers whose steps keep the weights of an exact model integers: the first step, or all of them."""

from __future__ import annotations

from zharness.engines.protocol import GroupSpec, OptimizerSpec

# Rprop moves each element by its step size in the direction of its gradient: the first step moves biases by 1, 0 or
# -1, and nothing else, so that a model of integers stays one, and exact. Adagrad would too, but loses its groups on
# DeepSpeed.
INTEGER_STEPS = OptimizerSpec(
    name="rprop", args={"lr": 0.0, "step_sizes": (0.0, 1.0)}, groups=(GroupSpec("*.bias", {"lr": 1.0}),)
)

# These move: in a model of heads the biases behind attention, and the last two matrices, of which tp splits the first;
# in a model of experts the last layer and the experts. All in front of them stand still, so that float32 holds the sums
# of several steps, and tokens stay with their experts. DeepSpeed puts groups of experts behind all others.
MOVED_BY_SIGNS = ("out.bias", "up.bias", "down.bias", "down.weight", "head.weight", "last.*", "moe.experts.*")

# Without memory Adam divides a gradient by its absolute value, so that a step moves an element by the learning rate, an
# integer, or by 0. The other parameters stand still and have a memory of gradients with a decay, by which the number of
# steps can be told.
SIGN_STEPS = OptimizerSpec(
    name="adam",
    args={"lr": 0.0, "betas": (0.5, 0.75), "weight_decay": 0.5},
    groups=tuple(
        GroupSpec(pattern, {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e-30, "weight_decay": 0.0})
        for pattern in MOVED_BY_SIGNS
    ),
    schedule=(1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0),
)

# Moves every element by 1, or by 0 where its gradient is 0, also if gradients were clipped.
UNIT_SIGN_STEPS = OptimizerSpec(name="adam", args={"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e-30})
