"""List the features that DeepSpeed claims and refuses at each stage, with quotes from its documentation."""

from __future__ import annotations

from dataclasses import replace

from zharness.engines.capabilities import SentDtype
from zharness.engines.deepspeed_options import options_at
from zharness.engines.deepspeed_releases import restrict_to_release
from zharness.engines.deepspeed_tensor_parallel import LAYER_SPECS, REFUSES_ON_TP
from zharness.engines.protocol import Capabilities, Feature
from zharness.mesh import CONTEXT, EXPERT, TENSOR

_DOCUMENTATION = "https://deepspeed.readthedocs.io/en/latest"
_NO_TENSOR_BACKWARD = (
    "direct calls to tensor.backward() are not supported at ZeRO stage 0 (engine.py, _backward_prologue)"
)
_NO_SYNC_INCOMPATIBLE = (
    "no_sync is incompatible with ZeRO stage 2/3, which rely on reduction for partitioning (its docstring)"
)
_NO_ACCESS_AT_STAGE_0 = (
    "its functions for partitioned states return None for a parameter that no ZeRO optimizer manages "
    f"({_DOCUMENTATION}/zero3.html#debugging)"
)
NO_IN_PLACE_EDITS = (
    "a step starts from DeepSpeed's fp32 copies and undoes an edit of the parameter itself; to edit the copies it has "
    f"'routines for modifying the fp32 master parameters' ({_DOCUMENTATION}/zero3.html#modifying-partitioned-states)"
)
_NO_SHARD_ACCESS = (
    "'This API is only defined for ZeRO-3 partitioned parameters' (tensor_fragment.py, safe_get_local_grad)"
)
_REFUSED_AT_EVERY_STAGE: dict[Feature, str] = {
    **dict.fromkeys(
        (Feature.RESHARD, Feature.WORLD_RESHARD, Feature.MESH_RESHARD),
        "a checkpoint loads only at its own stage, world size and mesh; others need a universal checkpoint "
        "(https://www.deepspeed.ai/tutorials/universal-checkpointing/)",
    ),
    Feature.CHECKSUMS: "load_checkpoint reads files with torch.load, which compares no checksums",
    Feature.UNIVERSAL_CHECKPOINT: "it loads only what ds_to_universal wrote, which includes the model's weights; "
    "the files of this law have none",
    Feature.DEFERRED: "a model is built whole or inside deepspeed.zero.Init; initialize does not materialize models of "
    f"the meta device ({_DOCUMENTATION}/zero3.html#constructing-massive-models)",
    Feature.INITIAL_BUFFERS: "initialize broadcasts parameters, and no buffers (engine.py, _broadcast_model)",
    Feature.LOSS_SCALER: "the CPU accelerator refuses the fp16 section: 'Type fp16 is not supported on your device.' "
    "(engine.py, _do_sanity_check)",
    Feature.REDUCE_DTYPES: "its comms_logger counts calls and bytes of each collective, but not by dtype "
    "(https://www.deepspeed.ai/tutorials/comms-logging/)",
    Feature.NO_GRADIENT: "missing gradients are filled with zeros for the flat partition; parameters.branch still "
    "requires None, and is an expected failure",
    Feature.SPARSE_GRADIENTS: "'deepspeed/runtime/zero/ contains no sparse handling at all' "
    "(https://github.com/deepspeedai/DeepSpeed/pull/8504)",
    Feature.WRITE_IN_FORWARD: "its 'routines for modifying the fp32 master parameters' do not change the model's own "
    f"weights, which the next step does ({_DOCUMENTATION}/zero3.html#modifying-partitioned-states)",
    Feature.STEP_READ_OUT: "safe_get_full_optimizer_state 'assembles' states of the shape of the parameter from their "
    "fragments, and a step count has none (tensor_fragment.py)",
    Feature.REDUCED_WEIGHT_GRADIENTS: "its hooks reduce gradients outside the autograd graph",
    Feature.RESOURCES: "it does not count its memory by parameters, gradients and optimizer state",
    Feature.TRAFFIC: "it does not count gathered bytes, nor does its comms_logger count the bytes that a rank sends",
}
_TRANSFORMS = (Feature.TORCH_FUNC, Feature.TRANSFORMS)
REFUSES_ON_EP: dict[Feature, str] = {
    **dict.fromkeys(
        (Feature.EDITS, Feature.READ_OUT, Feature.WRITE_IN, Feature.SHARD_ACCESS),
        "a rank has only its own experts, and no parameters with the names of other ranks' experts",
    ),
    Feature.INITIAL_WEIGHTS: "a rank has its own experts, and rank 0 does not have their weights",
    **dict.fromkeys(
        _TRANSFORMS,
        "the autograd.Function of its all-to-all (moe/sharded_moe.py, _AllToAll) has no setup_context, without which "
        "torch.func raises",
    ),
}
REFUSES_ON_CP: dict[Feature, str] = {
    **dict.fromkeys(
        _TRANSFORMS,
        "the autograd.Function of its all-to-all (sequence/layer.py, _SeqAllToAll) has no setup_context, without which "
        "torch.func raises",
    ),
    **dict.fromkeys(
        (Feature.OUTSIDE_FORWARD, Feature.SUBMODULES),
        "gradients are summed over the ranks of a sequence, but if a loss computes something from weights directly, "
        "each of these ranks already has its whole gradient",
    ),
    Feature.WINDOW_READ_OUT: "inside a window each rank has the gradient of its own part of a sequence",
}
# Most cells of these models would only show again the factor that the models `context`, `random_context` and
# `similar_context` show. Most laws of `similar_context` read and write named tensors, and compare no gradient.
STAND_INS_ON_CP = tuple(
    f"{name}_context"
    for name in ("adapted", "blocks", "changing", "experts", "gated", "mixed", "mlp", "odd", "odd_one")
)
_REFUSED_ON_CP_AT_STAGE_3 = dict.fromkeys(
    STAND_INS_ON_CP,
    "stage 3 divides every gradient by the ranks of a sequence too, as the models context and similar_context show",
)
_REFUSED_AT_STAGE: dict[int, dict[Feature, str]] = {
    0: {
        Feature.READ_OUT: _NO_ACCESS_AT_STAGE_0,
        Feature.WRITE_IN: _NO_ACCESS_AT_STAGE_0,
        Feature.SHARD_ACCESS: _NO_SHARD_ACCESS,
        Feature.TENSOR_BACKWARD: _NO_TENSOR_BACKWARD,
        Feature.SCALE_BACKWARD: _NO_TENSOR_BACKWARD,
        Feature.MASTERS: "gradients stay in the model's dtype, and another grad_accum_dtype is 'unsupported mix' "
        "(engine.py, _do_optimizer_sanity_check)",
    },
    1: {Feature.IN_PLACE_EDITS: NO_IN_PLACE_EDITS, Feature.SHARD_ACCESS: _NO_SHARD_ACCESS},
    2: {
        Feature.NO_SYNC: _NO_SYNC_INCOMPATIBLE,
        Feature.IN_PLACE_EDITS: NO_IN_PLACE_EDITS,
        Feature.SHARD_ACCESS: _NO_SHARD_ACCESS,
    },
    3: {
        Feature.IN_PLACE_EDITS: NO_IN_PLACE_EDITS,
        Feature.NO_SYNC: _NO_SYNC_INCOMPATIBLE,
        Feature.SUM: "gradient_allreduce_op='sum' is not supported with ZeRO stage 3",
        Feature.TRANSFORMS: "torch.func is supported on the engine at stages 0 to 2, not yet at 3 "
        "(https://github.com/deepspeedai/DeepSpeed/pull/8026)",
        Feature.OUTSIDE_FORWARD: "the caller has to gather or register a parameter that is read outside its module's "
        f"forward ({_DOCUMENTATION}/zero3.html#registering-external-parameters)",
    },
}

CAPABILITIES = Capabilities(
    stages=frozenset({0, 1, 2, 3}),
    dtypes=frozenset({"fp32", "bf16"}),
    refuses=_REFUSED_AT_EVERY_STAGE,
    own_kernels={3: "stage 3 replaces torch.nn.functional.linear by its own autograd function"},
    mesh_axes=frozenset({TENSOR, EXPERT, CONTEXT}),
    separate_axes={
        CONTEXT: "its sequences, AutoTP and experts are each split over neighbouring ranks, so that two of them would "
        "have the same groups, and AutoTP replaces the mpu of sequences by its own"
    },
    refuses_on={TENSOR: REFUSES_ON_TP, EXPERT: REFUSES_ON_EP, CONTEXT: REFUSES_ON_CP},
    # _configure_moe_settings asserts reduce_scatter, and contiguous gradients at stage 2.
    options_not_on={
        EXPERT: frozenset(
            {"scattered_gradients", "all_reduce", "predivide_by_2", "predivide_by_4", "prescale_gradients"}
        )
    },
    # 'Default value is fp32' (constants.py); engine.py, under sequence_parallel_size > 1, reads it in place of
    # communication_data_type, which has no effect on cp.
    sent_dtype_on_cp=SentDtype("seq_parallel_communication_data_type", "fp32"),
    plan_words=frozenset(LAYER_SPECS),
    whole_plan_words=frozenset(word for word, spec in LAYER_SPECS.items() if spec["partition_type"] == "skip"),
)


def capabilities_at(stage: int) -> Capabilities:
    """Return CAPABILITIES with the features that the newest DeepSpeed refuses at ``stage``, and its options there."""
    refuses = {**_REFUSED_AT_EVERY_STAGE, **_REFUSED_AT_STAGE.get(stage, {})}
    axes = CAPABILITIES.mesh_axes - ({EXPERT} if stage == 3 else set())  # 'Native DeepSpeed MoE is not supported' there
    refused = _REFUSED_ON_CP_AT_STAGE_3 if stage == 3 else {}
    return replace(
        CAPABILITIES,
        refuses=refuses,
        variants=options_at(stage),
        mesh_axes=axes,
        refuses_models=refused,
    )


def capabilities_of_release(stage: int, release: str) -> Capabilities:
    """Return the capabilities of DeepSpeed ``release`` at ``stage``."""
    return restrict_to_release(capabilities_at(stage), release, stage)
