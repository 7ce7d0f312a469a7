"""Find the features that an engine has to claim before it can run a program."""

from __future__ import annotations

from zharness.engines.options import find_exclusion
from zharness.engines.protocol import AccumulationOwner, Capabilities, Feature, Reduction
from zharness.errors import UsageError
from zharness.law_kit.setting import OWNER_FEATURES
from zharness.workload.programs import GRAPH_ACTS, Act, LayerKind, Mark, Program, is_accumulating, iter_verbs

# Features that layers, acts and marks require; everything else is part of every training.
LAYER_FEATURES = {
    LayerKind.READ: Feature.OUTSIDE_FORWARD,
    LayerKind.UNUSED: Feature.PARAMETERS,
    LayerKind.SOMETIMES: Feature.PARAMETERS,
    LayerKind.CHECKPOINT: Feature.RECOMPUTATION,
    LayerKind.REENTRANT: Feature.RECOMPUTATION,
}

ACT_FEATURES = {
    Act.NO_SYNC: Feature.NO_SYNC,
    Act.SAVE: Feature.CHECKPOINT,
    Act.LOAD: Feature.CHECKPOINT,
    Act.INPUT_GRAD: Feature.AUTOGRAD,
    Act.FAILED_FORWARD: Feature.AUTOGRAD,
    Act.FAILED_BACKWARD: Feature.AUTOGRAD,
    Act.TRANSFORM: Feature.TRANSFORMS,
    Act.IDLE: Feature.NO_GRADIENT,
    Act.EDIT: Feature.EDITS,
}

MARK_FEATURES = {
    Mark.TENSOR: Feature.TENSOR_BACKWARD,
    Mark.SCALE: Feature.SCALE_BACKWARD,
    Mark.RETAIN: Feature.RETAIN_GRAPH,
}


def claims_for_program(program: Program, capabilities: Capabilities) -> Capabilities:
    """Return the capabilities of an engine under the options and on the mesh of ``program``."""
    return capabilities.with_options(program.options).on_mesh(program.mesh)


def explain_unsupported(program: Program, capabilities: Capabilities) -> str:
    """Return the reason why an engine with these capabilities cannot run ``program``, or an empty string if it can."""
    if program.dtype not in capabilities.dtypes or program.stage not in capabilities.stages:
        return f"the engine does not support stage {program.stage} with dtype {program.dtype}"
    unclaimed = [axis for axis in program.mesh.axes if axis not in capabilities.mesh_axes]
    if unclaimed:
        return f"the engine does not claim the axis {unclaimed[0]} at stage {program.stage}"
    unusable = explain_unusable_options(program, capabilities.on_mesh(program.mesh))
    if unusable:
        return unusable
    capabilities = claims_for_program(program, capabilities)
    if program.stage in capabilities.own_kernels:
        return (
            f"the engine's local gradients are not those of torch's kernels: {capabilities.own_kernels[program.stage]}"
        )
    for verb in program.verbs:
        if program.dtype == "fp16" and Mark.TENSOR in verb.marks:
            return "fp16 needs a loss scale, which loss.backward() does not apply"
    for feature in find_required_features(program):
        reason = capabilities.refusal(feature)
        if reason is not None:
            return f"{feature.value}: {reason}"
    return ""


def explain_unusable_options(program: Program, capabilities: Capabilities) -> str:
    """Return the reason why the options of ``program`` cannot be set together here, or '' if they can.

    Raises UsageError for an option that the engine does not have at this stage.
    """
    options = capabilities.engine_options
    for name in program.options:
        if name not in options:
            raise UsageError.unknown_name("option of the engine at this stage", name, sorted(options))
        refusal = options[name].explain_cell_limit(program.world_size, program.dtype, program.mesh)
        if refusal:
            return f"the option {name}: {refusal}"
    return find_exclusion({name: options[name] for name in program.options})


def find_required_features(program: Program) -> list[Feature]:
    """Return the features that ``program`` requires in addition to plain training."""
    used = [LAYER_FEATURES.get(layer.kind) for layer in program.walk()]
    used += [ACT_FEATURES.get(verb.act) for verb in program.verbs]
    used += [MARK_FEATURES.get(mark) for verb in program.verbs for mark in verb.marks]
    # An engine that prepares its reduction in a forward may not reduce a backward of an older forward, or a second
    # backward of one forward.
    used += [
        Feature.RETAIN_GRAPH
        for _, verb, caller in iter_verbs(program)
        if verb.act in (*GRAPH_ACTS, Act.INPUT_GRAD) and caller.outputs
    ]
    used += [Feature.CALLER_ACCUMULATION for _, verb, caller in iter_verbs(program) if is_accumulating(caller, verb)]
    used += [Feature.CLIP] * (program.clip is not None)
    used += [OWNER_FEATURES[AccumulationOwner(program.window_owner)]] * (program.window > 1)
    used += [Feature.SUM] * (program.reduction == Reduction.SUM.value)
    return list(dict.fromkeys(feature for feature in used if feature is not None))
