"""Define optimizers whose steps keep the weights of an exact model integers."""

from __future__ import annotations

from zharness.engines.protocol import GroupSpec, OptimizerSpec

# With betas of 0 Adam divides a gradient by its absolute value, so that a step moves an element by the learning rate,
# an integer, or by 0. The learning rate of all other parameters is 0. Their moments decay, and show how many steps were
# made.
_STILL = {"lr": 0.0, "betas": (0.5, 0.75), "weight_decay": 0.5}
_SIGNS = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e-30, "weight_decay": 0.0}

# Rprop and Adagrad would also keep integers. But DTensor has no rule for Rprop, and Adagrad loses its groups on
# DeepSpeed.
BIAS_SIGNS = OptimizerSpec(name="adam", args=_STILL, groups=(GroupSpec("*.bias", _SIGNS),))

# The parameters that move. In a model of heads, they are the biases behind attention and the last two matrices, of
# which tp splits the first; in a model of experts, they are the last layer and the experts. All parameters before them
# stay constant, so that float32 holds the sums of several steps, and tokens keep their experts. DeepSpeed puts groups
# of experts behind all other groups.
MOVED_BY_SIGNS = ("out.bias", "up.bias", "down.bias", "down.weight", "head.weight", "last.*", "moe.experts.*")

SIGN_STEPS = OptimizerSpec(
    name="adam",
    args=_STILL,
    groups=tuple(GroupSpec(pattern, _SIGNS) for pattern in MOVED_BY_SIGNS),
    schedule=(1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0),
)

# A step moves every element by 1, or by 0 where its gradient is 0, even if gradients were clipped.
UNIT_SIGN_STEPS = OptimizerSpec(name="adam", args={"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e-30})
