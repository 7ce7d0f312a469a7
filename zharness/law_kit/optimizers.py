"""Define the optimizers that several laws use."""

from __future__ import annotations

from zharness.engines.protocol import GroupSpec, OptimizerSpec

# A step changes only the momentum. The momentum shows how many steps were made, and with which gradients.
ZERO_LR_SGD = OptimizerSpec(name="sgd", args={"lr": 0.0, "momentum": 0.5})

SCHEDULED_SGD = OptimizerSpec(name="sgd", args={"lr": 0.05, "momentum": 0.5}, schedule=(1.0, 0.5))

UNIT_LR_SGD = OptimizerSpec(name="sgd", args={"lr": 1.0})

PLAIN_ADAMW = OptimizerSpec(name="adamw", args={"lr": 1e-2})

NO_DECAY_GROUP = GroupSpec("*bias", {"weight_decay": 0.0, "lr": 2e-2})

SCHEDULE = (1.0, 0.5, 0.25)

ADAMW = OptimizerSpec(
    name="adamw",
    args={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    groups=(NO_DECAY_GROUP,),
    schedule=SCHEDULE,
)

SGD = OptimizerSpec(
    name="sgd",
    args={"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.01},
    groups=(NO_DECAY_GROUP,),
    schedule=SCHEDULE,
)

TRAJECTORY_OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD}

FIRST_LAYER_GROUP = GroupSpec("first.*", {"lr": 3e-2, "maximize": True})

# Overrides every argument of Adam.
FIRST_LAYER_ADAM_GROUP = GroupSpec(
    "first.*", {**FIRST_LAYER_GROUP.overrides, "betas": (0.7, 0.9), "eps": 1e-4, "weight_decay": 0.2}
)

ADAM = OptimizerSpec(
    name="adam",
    args={"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True},
    groups=(FIRST_LAYER_ADAM_GROUP, NO_DECAY_GROUP),
)

NESTEROV = OptimizerSpec(
    name="sgd",
    args={"lr": 5e-2, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    groups=(FIRST_LAYER_GROUP, GroupSpec("*bias", {"nesterov": False, "dampening": 0.3, "momentum": 0.6})),
)
