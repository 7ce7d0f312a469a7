"""List the features and options that older releases of DeepSpeed lack, with the first release that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from zharness.engines.option_keys import find_reason
from zharness.engines.protocol import Capabilities, EngineOption, Feature
from zharness.mesh import CONTEXT, TENSOR

_PULL_REQUESTS = "https://github.com/deepspeedai/DeepSpeed/pull"


@dataclass(frozen=True)
class Addition:
    """Features and options that DeepSpeed has since ``first_release``, with the pull request that added them, if known.

    ``option_keys`` are the options that older releases do not know; most of these releases ignore them silently. The
    key of a section's entry is written ``section.entry``. ``mesh_axes`` and ``plan_words`` are the axes of a mesh and
    the words of a ``tp_plan`` that older releases lack. ``stages`` are the stages at which older releases lack the
    addition.
    """

    summary: str
    first_release: str
    pull_request: int | None = None
    features: tuple[Feature, ...] = ()
    option_keys: tuple[str, ...] = ()
    mesh_axes: tuple[str, ...] = ()
    plan_words: tuple[str, ...] = ()
    stages: tuple[int, ...] = (0, 1, 2, 3)

    def is_missing(self, release: Version, stage: int) -> bool:
        """Return whether ``release`` lacks the addition at ``stage``."""
        return stage in self.stages and release < Version(self.first_release)

    def describe_absence(self, release: Version) -> str:
        """Return a sentence that says that ``release`` lacks the addition, and which release has it."""
        source = f" ({_PULL_REQUESTS}/{self.pull_request})" if self.pull_request else ""
        return f"DeepSpeed {release} has no {self.summary}; {self.first_release} added it{source}"


# A first release is the first one whose wheel has the code; this is not always the tag that follows the pull request.
ADDITIONS: tuple[Addition, ...] = (
    Addition(
        summary="section torch_autocast",
        first_release="0.17.2",
        pull_request=6993,
        features=(Feature.AUTOCAST, Feature.AUTOCAST_SCALER),
        option_keys=("torch_autocast",),
    ),
    Addition(
        summary="zero_optimization.enable_sanity_checks",
        first_release="0.17.6",
        pull_request=7525,
        option_keys=("zero_optimization.enable_sanity_checks",),
    ),
    Addition(
        summary="offload_states() at stages 1 and 2",
        first_release="0.18.0",
        pull_request=7421,
        option_keys=("offload_states",),
        stages=(1, 2),
    ),
    Addition(
        summary="offload_states() at stage 3 without DeepSpeed's FusedAdam",
        first_release="0.19.0",
        option_keys=("offload_states",),
        stages=(3,),
    ),
    Addition(
        summary="loss scale of torch_autocast at stage 0",
        first_release="0.18.0",
        pull_request=7619,
        features=(Feature.AUTOCAST_SCALER,),
        stages=(0,),
    ),
    Addition(
        summary="backward but engine.backward(loss)",
        first_release="0.18.3",
        pull_request=7665,
        features=(Feature.TENSOR_BACKWARD, Feature.SCALE_BACKWARD),
        stages=(1, 2, 3),
    ),
    Addition(
        summary="optimizer Muon",
        first_release="0.17.6",
        pull_request=7509,
        features=(Feature.MUON,),
    ),
    Addition(
        summary="Muon at stage 3",
        first_release="0.18.9",
        pull_request=7919,
        features=(Feature.MUON,),
        stages=(3,),
    ),
    Addition(
        summary="choice of the dtypes of master weights and optimizer state, which it ignores",
        first_release="0.18.3",
        pull_request=7700,
        features=(Feature.MASTERS,),
        option_keys=("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
        stages=(1, 2, 3),
    ),
    Addition(
        summary="zero_optimization.stage3_allgather_sequential",
        first_release="0.18.5",
        pull_request=7661,
        option_keys=("zero_optimization.stage3_allgather_sequential",),
    ),
    Addition(
        summary="runtime.sequence_parallel.parallel_state_sp, the groups of Ulysses without Megatron's",
        first_release="0.17.0",
        pull_request=7268,
        mesh_axes=(CONTEXT,),
    ),
    Addition(
        summary="tensor_parallel.partition_config, by which a plan splits a model",
        first_release="0.18.6",
        pull_request=7806,
        mesh_axes=(TENSOR,),
    ),
    Addition(
        summary="gather_output in the layer_specs of tensor_parallel",
        first_release="0.19.4",
        pull_request=8146,
        plan_words=("colwise_gather_output",),
    ),
    Addition(
        summary="coalesce_grad_reduction()",
        first_release="0.19.1",
        pull_request=7992,
        option_keys=("coalesce_grad_reduction",),
    ),
    Addition(
        summary="gradient_allreduce_op, and always averages",
        first_release="0.19.6",
        pull_request=8232,
        features=(Feature.SUM,),
        option_keys=("gradient_allreduce_op",),
        stages=(0, 1, 2),
    ),
    Addition(
        summary="managed_gradient_accumulation",
        first_release="0.19.4",
        pull_request=8184,
        option_keys=("managed_gradient_accumulation",),
    ),
    Addition(
        summary="zero_optimization.parameter_alignment and compute_grad_norm",
        first_release="0.19.7",
        option_keys=("zero_optimization.parameter_alignment", "zero_optimization.compute_grad_norm"),
    ),
)


def restrict_to_release(capabilities: Capabilities, release: str, stage: int) -> Capabilities:
    """Return ``capabilities`` without the features, options, axes and plan words that ``release`` lacks at ``stage``.

    If ``release`` is not a version, as for a checkout, nothing is restricted.
    """
    try:
        version = Version(Version(release).base_version)
    except InvalidVersion:
        return capabilities
    missing = [addition for addition in ADDITIONS if addition.is_missing(version, stage)]
    reasons = {addition: addition.describe_absence(version) for addition in missing}
    refuses = {feature: reasons[addition] for addition in missing for feature in addition.features}
    unknown = {key: reasons[addition] for addition in missing for key in addition.option_keys}
    return replace(
        capabilities,
        refuses={**refuses, **capabilities.refuses},
        unknown_options=unknown,
        mesh_axes=capabilities.mesh_axes.difference(*(addition.mesh_axes for addition in missing)),
        plan_words=capabilities.plan_words.difference(*(addition.plan_words for addition in missing)),
        variants={
            name: restrict_option(option, unknown) if unknown else capabilities.variants[name]
            for name, option in capabilities.engine_options.items()
        },
    )


def restrict_option(option: EngineOption, unknown_options: Mapping[str, str]) -> EngineOption:
    """Return ``option``, marked as absent if it sets a key of ``unknown_options``, which maps keys to reasons."""
    reason = find_reason(option.options, unknown_options)
    return replace(option, absent=reason) if reason else option
