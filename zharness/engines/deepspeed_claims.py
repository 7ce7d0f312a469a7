"""What DeepSpeed claims, stage by stage, and in its own words what it does not."""

from __future__ import annotations

from zharness.engines.common import NO_STATE_LAWS, NOT_JOINED
from zharness.engines.json_variants import JSON_VARIANTS
from zharness.engines.protocol import Capabilities, Feature

_COMMON: dict[Feature, str] = {
    Feature.CHECKPOINT: NO_STATE_LAWS,
    **NOT_JOINED,
}
# The reasons below are DeepSpeed's own: the RuntimeError that direct calls raise at stage 0 (engine.py,
# _backward_prologue) and the docstring of DeepSpeedEngine.no_sync.
_AT_STAGE: dict[int, dict[Feature, str]] = {
    0: {
        Feature.TENSOR_BACKWARD: "direct calls to tensor.backward() are not supported at ZeRO stage 0",
        Feature.SCALE_BACKWARD: "direct calls to tensor.backward() are not supported at ZeRO stage 0",
    },
    2: {Feature.NO_SYNC: "no_sync is incompatible with ZeRO stage 2/3, which rely on reduction for partitioning"},
    3: {
        Feature.SUM: "gradient_allreduce_op='sum' is not supported with ZeRO stage 3",
        Feature.NO_SYNC: "no_sync is incompatible with ZeRO stage 2/3, which rely on reduction for partitioning",
    },
}

CAPABILITIES = Capabilities(
    stages=frozenset({0, 1, 2, 3}),
    dtypes=frozenset({"fp32"}),
    refuses=_COMMON,
    own_kernels={3: "stage 3 replaces torch.nn.functional.linear by its own autograd function"},
    variants=JSON_VARIANTS,
)


def capabilities_at(stage: int) -> Capabilities:
    """What DeepSpeed claims at one stage: CAPABILITIES and the stage's own refusals."""
    return Capabilities(
        stages=CAPABILITIES.stages,
        dtypes=CAPABILITIES.dtypes,
        refuses={**_COMMON, **_AT_STAGE.get(stage, {})},
        own_kernels=CAPABILITIES.own_kernels,
        variants=CAPABILITIES.variants,
    )
