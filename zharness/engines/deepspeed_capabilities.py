"""What DeepSpeed claims, stage by stage, and in its own words what it does not."""

from __future__ import annotations

from dataclasses import replace

from zharness.engines.json_variants import JSON_VARIANTS
from zharness.engines.protocol import Capabilities, Feature

_DOCUMENTATION = "https://deepspeed.readthedocs.io/en/latest"
_NO_TENSOR_BACKWARD = (
    "direct calls to tensor.backward() are not supported at ZeRO stage 0 (engine.py, _backward_prologue)"
)
_NO_SYNC_INCOMPATIBLE = (
    "no_sync is incompatible with ZeRO stage 2/3, which rely on reduction for partitioning (its docstring)"
)
_REFUSED_AT_EVERY_STAGE: dict[Feature, str] = {
    Feature.RESHARD: "a checkpoint is loaded at its own stage and number of ranks; others take a universal one "
    "(https://www.deepspeed.ai/tutorials/universal-checkpointing/)",
    Feature.UNIVERSAL_CHECKPOINT: "load_universal reads what ds_to_universal wrote, the model's weights among it, "
    "which the files of this law lack",
    Feature.DEFERRED: "a model is built whole or inside deepspeed.zero.Init; initialize makes none of the meta device "
    f"real ({_DOCUMENTATION}/zero3.html#constructing-massive-models)",
    Feature.LOSS_SCALER: "the CPU accelerator refuses the fp16 section: 'Type fp16 is not supported on your device.' "
    "(engine.py, _do_sanity_check)",
    Feature.WIRES: "its comms_logger counts calls and bytes of each collective, and no dtypes "
    "(https://www.deepspeed.ai/tutorials/comms-logging/)",
    Feature.NO_GRADIENT: "missing gradients are filled with zeros for the flat partition; parameters.branch asks for "
    "none all the same, and is excused",
    Feature.SPARSE_GRADIENTS: "'deepspeed/runtime/zero/ contains no sparse handling at all' "
    "(https://github.com/deepspeedai/DeepSpeed/pull/8504)",
    Feature.REDUCED_WEIGHT_GRADIENTS: "its hooks reduce gradients beside autograd's graph, not in it",
    Feature.RESOURCES: "it does not count the bytes that it holds by what they are",
    Feature.TRAFFIC: "it does not count what it gathers, and its comms_logger no bytes that a rank has to send",
}
_REFUSED_AT_STAGE: dict[int, dict[Feature, str]] = {
    0: {
        Feature.TENSOR_BACKWARD: _NO_TENSOR_BACKWARD,
        Feature.SCALE_BACKWARD: _NO_TENSOR_BACKWARD,
        Feature.MASTERS: "gradients stay in the model's dtype, and another grad_accum_dtype is 'unsupported mix' "
        "(engine.py, _do_optimizer_sanity_check)",
    },
    2: {Feature.NO_SYNC: _NO_SYNC_INCOMPATIBLE},
    3: {
        Feature.NO_SYNC: _NO_SYNC_INCOMPATIBLE,
        Feature.SUM: "gradient_allreduce_op='sum' is not supported with ZeRO stage 3",
        Feature.TRANSFORMS: "torch.func is supported on the engine at stages 0 to 2, not yet at 3 "
        "(https://github.com/deepspeedai/DeepSpeed/pull/8026)",
        Feature.OUTSIDE_FORWARD: "a parameter that is read outside its module's forward has to be gathered by the "
        f"caller, or registered ({_DOCUMENTATION}/zero3.html#registering-external-parameters)",
    },
}

CAPABILITIES = Capabilities(
    stages=frozenset({0, 1, 2, 3}),
    dtypes=frozenset({"fp32", "bf16"}),
    refuses=_REFUSED_AT_EVERY_STAGE,
    own_kernels={3: "stage 3 replaces torch.nn.functional.linear by its own autograd function"},
    variants=JSON_VARIANTS,
)


def capabilities_at(stage: int) -> Capabilities:
    """What DeepSpeed claims at one stage: CAPABILITIES and the stage's own refusals."""
    return replace(CAPABILITIES, refuses={**_REFUSED_AT_EVERY_STAGE, **_REFUSED_AT_STAGE.get(stage, {})})
