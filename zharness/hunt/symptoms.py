"""List the symptoms of recorded bugs in programs, for bugs whose scripts or cells fail with another message."""

from __future__ import annotations

from dataclasses import dataclass

from zharness.law_kit.clipping import NO_GRADIENT_HINT
from zharness.law_kit.hints import OLD_GRADIENT_ADDED_HINT
from zharness.law_kit.program_judge import OLD_GRADIENT_HINT
from zharness.law_kit.program_suspects import (
    FAILED_GRADS_ALONE_HINT,
    FAILED_GRADS_KEPT_HINT,
    LAST_FAILED_GRADS_KEPT_HINT,
    SUCCEEDED_GRADS_KEPT_HINT,
    ZEROED_GRADS_ALONE_HINT,
    ZEROED_GRADS_KEPT_HINT,
)
from zharness.law_kit.record_comparisons import ROUNDED_WEIGHT_HINT
from zharness.run.program_runner import ProgramOutcome
from zharness.workload.programs import Act, LayerKind, Mark, Program

SHARDED = (1, 2, 3)


@dataclass(frozen=True)
class Symptom:
    """A failure of programs that the reproduction with the id ``repro`` explains.

    ``text`` occurs in the cause. The program has a stage of ``stages``, a dtype of ``dtypes``, all of ``needs``, and
    one of ``options`` unless that is empty; it may have further options. It has no mesh, because no reproduction here
    needs a mesh: a smallest program that has a mesh fails for another reason.
    """

    engine: str
    repro: str
    text: str
    stages: tuple[int, ...]
    needs: frozenset[Act | LayerKind | Mark] = frozenset()
    options: frozenset[str] = frozenset()
    min_world_size: int = 1
    dtypes: tuple[str, ...] = ("fp32", "bf16")

    def matches(
        self, engine: str, program: Program, names: set[Act | LayerKind | Mark], outcome: ProgramOutcome
    ) -> bool:
        """Return whether ``program``, which has ``names``, failed on ``engine`` in this way."""
        has_setting = (
            program.stage in self.stages and program.world_size >= self.min_world_size and program.dtype in self.dtypes
        )
        has_setting = has_setting and not program.mesh.sizes
        has_option = not self.options or bool(self.options & set(program.options))
        return (
            self.engine == engine and has_setting and has_option and self.needs <= names and self.text in outcome.cause
        )


OFFLOAD = frozenset({"offload_optimizer", "offload_unpinned"})
LEAF = frozenset({"leaf_modules"})
FAILED_BACKWARD = frozenset({Act.FAILED_BACKWARD})
NOT_IDLE = "expected to be in states [<TrainingState.IDLE: 1>]"
KEPT_GRADS_HINTS = (
    SUCCEEDED_GRADS_KEPT_HINT,
    FAILED_GRADS_KEPT_HINT,
    LAST_FAILED_GRADS_KEPT_HINT,
    FAILED_GRADS_ALONE_HINT,
    ZEROED_GRADS_KEPT_HINT,
    ZEROED_GRADS_ALONE_HINT,
)
NO_SYNC_SOMETIMES: frozenset[Act | LayerKind | Mark] = frozenset({Act.NO_SYNC, LayerKind.SOMETIMES})
TWO_REGIONS = frozenset({LayerKind.TWICE, LayerKind.REENTRANT})
INPUT_GRAD = frozenset({Act.INPUT_GRAD})

# The first symptom that matches counts, so symptoms with options precede symptoms without options.
SYMPTOMS = (
    Symptom("deepspeed", "offload-old-gradient", OLD_GRADIENT_HINT, SHARDED, options=OFFLOAD),
    Symptom(
        *("deepspeed", "offload-old-gradient", OLD_GRADIENT_ADDED_HINT, SHARDED, frozenset({LayerKind.SOMETIMES})),
        options=OFFLOAD,
    ),
    Symptom(
        *("deepspeed", "offload-lost-gradient", "it is the gradient of micro-batch", (2, 3)),
        *(frozenset({LayerKind.SOMETIMES}), OFFLOAD),
    ),
    Symptom(
        *("deepspeed", "overlap-partly-used", "alone, not reduced", (1,), frozenset({LayerKind.SOMETIMES})),
        options=frozenset({"overlap_comm"}),
    ),
    Symptom("deepspeed", "bypass-old-gradient", OLD_GRADIENT_HINT, (3,), frozenset({LayerKind.SOMETIMES})),
    Symptom("deepspeed", "bypass-old-gradient", OLD_GRADIENT_ADDED_HINT, (3,), frozenset({LayerKind.SOMETIMES})),
    Symptom("deepspeed", "8245-engine", "'NoneType' object has no attribute 'view'", (2,), FAILED_BACKWARD),
    Symptom("deepspeed", "leaf-module-inputs", "must match the size of tensor b", (3,), options=LEAF),
    Symptom("deepspeed", "leaf-module-inputs", "doesn't match the broadcast shape", (3,), options=LEAF),
    Symptom("deepspeed", "8026-autograd", "x the right value", SHARDED, INPUT_GRAD),
    Symptom("deepspeed", "input-grad-adds-old", OLD_GRADIENT_ADDED_HINT, (3,), INPUT_GRAD),
    Symptom("deepspeed", "input-grad-adds-old", "optimizer: ", (3,), INPUT_GRAD | {Mark.UNSEEN}),
    Symptom("deepspeed", "8026-vjp", "Direct calls to tensor.backward() are not supported", (0,), INPUT_GRAD),
    Symptom("deepspeed", "gathered-in-flight", "Cannot partition a param in flight", (3,)),
    Symptom(
        "deepspeed", "inference-weights-kept", "Inference tensors cannot be saved for", (3,), frozenset({Act.INFERENCE})
    ),
    Symptom("deepspeed", "5812-frozen", ROUNDED_WEIGHT_HINT, (0, 1, 2, 3), frozenset({LayerKind.FROZEN})),
    Symptom("deepspeed", "458", "has already been reduced", (2,), frozenset({LayerKind.REENTRANT})),
    Symptom("deepspeed", "uneven-weight-edited", "start out of range", (3,), frozenset({Act.EDIT}), min_world_size=2),
    Symptom(
        "deepspeed", "uneven-weight-edited", "exceeds dimension size", (3,), frozenset({Act.EDIT}), min_world_size=2
    ),
    Symptom("fsdp1", "optimizer-states-aliased", "/exp_avg[", (2, 3), options=frozenset({"optimizer_state_offload"})),
    *(
        Symptom("fsdp1", "exception-adds-gradient", text, (0, 2, 3), FAILED_BACKWARD)
        for text in (
            *KEPT_GRADS_HINTS,
            "full_grads has the wrong names: missing",
            "Cannot manually unshard parameters during forward/backward",
            "KeyError: Parameter containing",
            NOT_IDLE,
        )
    ),
    Symptom("fsdp1", "exception-adds-gradient", "got nan", (0, 2, 3), FAILED_BACKWARD | {Mark.UNSEEN}),
    *(
        Symptom("fsdp1", "94857", text, (0, 2, 3), frozenset({act}), dtypes=("bf16",))
        for act in (Act.EVALUATION_GRAD, Act.FAILED_FORWARD, Act.FAILED_BACKWARD)
        for text in (
            "full_grads has the wrong names: missing",
            NO_GRADIENT_HINT,
            "the ranks report different gradients",
            "to a tensor with grad_dtype 'Float'",
            "it is the gradient of micro-batch",
        )
    ),
    *(
        Symptom("fsdp1", "exception-in-forward", text, (0, 2, 3), frozenset({Act.FAILED_FORWARD}))
        for text in (
            "full_grads has the wrong names: missing",
            "KeyError: Parameter containing",
            "Cannot manually unshard parameters during forward/backward",
            NOT_IDLE,
        )
    ),
    Symptom("fsdp2", "reset-keeps-gradients", "got nan", (2, 3), FAILED_BACKWARD | {Mark.UNSEEN}),
    Symptom("fsdp2", "reset-keeps-gradients", "reduction: norm ", (2, 3), FAILED_BACKWARD | {Mark.UNSEEN}),
    # A failed backward leaves its group in a state in which, with this option, an embedding is not gathered.
    Symptom(
        *("fsdp2", "reset-keeps-gradients", "aten.embedding.default got mixed torch.Tensor and DTensor", (2, 3)),
        *(FAILED_BACKWARD, frozenset({"embeddings_stay_sharded"})),
    ),
    # The kept gradients are added up in the dtype of the weights, regardless of the reduce dtype.
    Symptom(
        *("fsdp2", "reset-keeps-gradients", "local gradient: ", (2, 3)),
        *(FAILED_BACKWARD, frozenset({"iteration_reset"})),
    ),
    Symptom("fsdp2", "reentrant-two-regions", "local gradient: ", (2, 3), TWO_REGIONS),
    Symptom("fsdp2", "reentrant-two-regions", "reduction: ", (2, 3), TWO_REGIONS),
    Symptom("fsdp2", "164929", "optimizer: ", (2, 3), frozenset({Act.SAVE})),
    Symptom("fsdp2", "164929", "reports as state has the wrong names", (2, 3), frozenset({Act.SAVE, Act.LOAD})),
    Symptom("fsdp2", "164929", "reports as looked-state has the wrong names", (2, 3), frozenset({Act.SAVE, Act.LOOK})),
    # These match with any option: with an option such as two_replicas, which takes a shard from each rank, several
    # ranks show a bug that otherwise needs one rank.
    *(
        Symptom("fsdp2", "113203", text, (2, 3), frozenset({Act.INFERENCE}))
        for text in (
            "Inference tensors cannot be saved for backward",
            "Inplace update to inference tensor outside InferenceMode",
            "Inference tensors do not track version counter",
        )
    ),
    Symptom("fsdp2", "113203", "element 0 of tensors does not require grad", (2,), frozenset({Act.INFERENCE})),
    Symptom(
        *("fsdp2", "reset-before-forward", "has no attribute 'all_gather_state'", (2, 3)),
        options=frozenset({"iteration_reset"}),
    ),
    Symptom(
        *("fsdp2", "step-after-evaluation", "forward: output", (3,)), options=frozenset({"root_kept_after_forward"})
    ),
    *(
        Symptom("fsdp2", "torch-func-unreduced", text, (2, 3), frozenset({Act.NO_SYNC, Act.TRANSFORM}))
        for text in ("would mutate a captured Tensor", "Cannot access data pointer of Tensor")
    ),
    Symptom(
        *("fsdp2", "replicas-lose-gradient", "full_grads has the wrong names: missing", (2, 3)),
        *(NO_SYNC_SOMETIMES, frozenset({"all_reduce_last"})),
    ),
    Symptom(
        *("fsdp2", "torch-func-unused-zeros", "Cannot access data pointer of Tensor", (2, 3)),
        *(frozenset({Act.TRANSFORM}), frozenset({"zeros_for_unused"})),
    ),
)


def find_symptom(
    engine: str, program: Program, names: set[Act | LayerKind | Mark], outcome: ProgramOutcome
) -> Symptom | None:
    """Return the first symptom that the failure of ``program`` has, or None."""
    return next((symptom for symptom in SYMPTOMS if symptom.matches(engine, program, names, outcome)), None)
