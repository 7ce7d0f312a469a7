"""Define the laws of the group ``parameters``: every kind of parameter trains as in plain PyTorch.

Some laws change the parameters after the engine was built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward

from zharness.engines.protocol import AccumulationOwner, Engine, Feature, Reduction
from zharness.law_kit.clipping import NEVER_CLIPS, judge_clip_factor
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Law, Variant
from zharness.law_kit.law_steps import LawSteps
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_initial_weights, compare_record_of_ranks
from zharness.law_kit.scenario_baseline import collect_grads
from zharness.law_kit.scenario_law import scenario_law
from zharness.law_kit.scenarios import Participant, Scenario, ScenarioScript, UnusedGrads
from zharness.law_kit.setting import SettingSupport
from zharness.law_kit.split_sums import compare_split_grads, splits_sums
from zharness.parity import Comparison, Part, Tier, compare_bitwise
from zharness.workload.exact_blocks import ODD_PARAMETERS
from zharness.workload.gpu_models import draw_on_compute_device


def every_kind(participant: Participant) -> None:
    """Train a model with tied, frozen, unused, empty, tiny, transposed and shared parameters of three dtypes."""
    participant.tensor_backward(participant.training_loss())


def branch(participant: Participant) -> None:
    """Use a branch of the model in the first forward, zero the gradients, and run a second forward without it."""
    participant.tensor_backward(participant.loss(participant.call(participant.inputs(), branch=True)))
    participant.zero_grad()
    participant.tensor_backward(participant.loss(participant.call(participant.inputs(2), branch=False), 2))


def frozen_and_unfrozen(participant: Participant) -> None:
    """Freeze and unfreeze parameters after the engine was built, and do so again between two backwards."""
    participant.module.frozen.requires_grad_(True)
    participant.module.twice.requires_grad_(False)
    participant.tensor_backward(participant.training_loss())
    participant.module.twice.requires_grad_(True)
    participant.module.tied.requires_grad_(False)
    participant.tensor_backward(participant.training_loss(2))
    participant.module.tied.requires_grad_(True)


def outside_its_module(participant: Participant) -> None:
    """Run backward of losses that read a weight by attribute, outside any forward.

    The first loss also contains the ordinary training loss.
    """
    weight = participant.module.first.weight
    participant.tensor_backward(
        nn.functional.linear(participant.inputs(), weight).sum() + weight.sum() + participant.training_loss()
    )
    participant.tensor_backward(participant.module.by_attribute.weight.sum())


FIRST_WEIGHT = "first.weight"


def edited(participant: Participant) -> None:
    """Edit trained, tied and frozen full weights between two micro-batches. Only rank 0's edits are kept.

    If the engine yields the module's own weights instead of copies, one weight is edited as the module's attribute.
    """
    participant.tensor_backward(participant.training_loss())
    names = [FIRST_WEIGHT, "by_attribute.weight", "twice.bias", "frozen.bias"]
    with participant.gather_weights(names) as weights, torch.no_grad():
        weights["by_attribute.weight"].mul_(-1 if participant.keeps_edits else 0)
        weights["twice.bias"].fill_(2 if participant.keeps_edits else 7)
        weights["frozen.bias"].fill_(3 if participant.keeps_edits else 7)
        weight = participant.module.first.weight
        (weight if shares_memory(weight, weights[FIRST_WEIGHT]) else weights[FIRST_WEIGHT])[0].zero_()
    participant.tensor_backward(participant.training_loss(2))


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two ordinary tensors of one shape begin at the same address."""
    return tensor.shape == other.shape and tensor.data_ptr() == other.data_ptr()


def late_submodule(participant: Participant) -> None:
    """Add a submodule that uses a parameter of the model after the engine was built, and remove it after backward."""
    late = nn.Linear(participant.module.first.in_features, participant.module.first.out_features, bias=False)
    late.weight = dict(participant.module.named_parameters())["first.weight"]
    participant.module.late = nn.Sequential(late, nn.ReLU())
    participant.tensor_backward(participant.module.late(participant.inputs()).sum() + participant.training_loss())
    del participant.module.late


def late_module(participant: Participant) -> None:
    """Add a submodule without parameters after the engine was built, and remove it after backward."""
    participant.module.late = nn.Sequential(nn.ReLU())
    participant.tensor_backward(participant.training_loss())
    del participant.module.late


OTHER_RANKS = "others"


def used_on_some_ranks(participant: Participant) -> None:
    """Use a branch of the model only on rank 0, or only on all other ranks; then use it on no rank."""
    with participant.allow_uneven_use():
        participant.tensor_backward(
            participant.loss(
                participant.call(
                    participant.inputs(), branch=(participant.rank == 0) != (participant.variant == OTHER_RANKS)
                )
            )
        )
        participant.tensor_backward(participant.loss(participant.call(participant.inputs(2), branch=False), 2))


def sparse(participant: Participant) -> None:
    """Train an embedding in two micro-batches that use some rows several times, and other rows not at all."""
    participant.tensor_backward(participant.training_loss())
    participant.tensor_backward(participant.training_loss(2))


IDLE_VARIANT, WINDOW_VARIANT = "idle", "2_by_engine"

# Whether each step uses the branch; None stands for a step without a backward.
BRANCH_USE_BY_VARIANT: dict[str, tuple[bool | None, ...]] = {
    "": (True, False, True),
    IDLE_VARIANT: (True, None, True),
    WINDOW_VARIANT: (True, False, True),
}


def observe_stay_put(ctx: RankContext) -> None:
    """Train steps that use a branch of the model, and one step in between that does not use it.

    In one law variant, the step in between has no backward at all. In another law variant, each step is an accumulation
    window of two equal micro-batches.
    """
    micro_batches = 2 if ctx.variant == WINDOW_VARIANT else 1
    owner = AccumulationOwner.ENGINE if ctx.variant == WINDOW_VARIANT else AccumulationOwner.CALLER
    engine = ctx.build_engine(optimizer=ADAMW, accumulation_steps=micro_batches, accumulation_owner=owner)
    train_with_branches(ctx, engine, micro_batches)


def observe_unfrozen(ctx: RankContext) -> None:
    """Unfreeze a module after the engine was built, then train steps with and without a branch of the model.

    If the engine claims clipping, the engine computes the norm in every step, with a limit that never clips.
    """
    clips = ctx.capabilities.refusal(Feature.CLIP) is None
    engine = ctx.build_engine(optimizer=ADAMW, clip=NEVER_CLIPS if clips else None)
    for parameter in engine.module.frozen.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(True)
    train_with_branches(ctx, engine)


def train_with_branches(ctx: RankContext, engine: Engine, micro_batches: int = 1) -> None:
    """Train steps with and without a branch of the model, and record everything that ``judge_stay_put`` compares.

    The engine owns the accumulation window if a step has several micro-batches.
    """
    for step, branch in enumerate(BRANCH_USE_BY_VARIANT[ctx.variant]):
        ctx.record_training_state(engine, step)
        batch = ctx.batch(step)
        for micro in range(0 if branch is None else micro_batches):
            engine.backward(ctx.spec.loss(engine(batch.inputs, branch=branch), batch.target))
            if micro + 1 < micro_batches:
                engine.step()
        ctx.record("grads", engine.full_grads(), step)
        engine.step()
        norm = engine.grad_norm()
        if norm is not None:
            ctx.record("norm", {"norm": scalar(norm)}, step)
        if micro_batches == 1:  # an engine that owns accumulation starts the next window itself
            engine.zero_grad()
    ctx.record_training_state(engine, len(BRANCH_USE_BY_VARIANT[ctx.variant]))
    engine.close()


def judge_stay_put(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge each step with the gradients that the engine reports for the parameters that the plain model uses.

    The engine may report zeros for the other parameters, but the step must not change them. Other laws judge the
    gradients.
    """
    yield from judge_branch_steps(ctx, ctx.baseline.build_module())


def judge_unfrozen(ctx: JudgeContext) -> Iterator[Comparison]:
    """Judge each step and its norm, and check that the parameters of the unfrozen module had gradients."""
    module: Any = ctx.baseline.build_module()
    module.frozen.requires_grad_(True)
    yield from judge_branch_steps(ctx, module)
    for step in range(len(BRANCH_USE_BY_VARIANT[ctx.variant])):
        yield from judge_clip_factor(ctx, "norm", step, ctx.rank_records("grads", step)[0], NEVER_CLIPS)
    moved = any(name.startswith("frozen.") for name in ctx.rank_records("grads")[0])
    yield compare_bitwise(ctx.location("frozen", Part.LOCAL_GRADIENT), torch.tensor(1.0), torch.tensor(float(moved)))


def judge_branch_steps(ctx: JudgeContext, module: nn.Module) -> Iterator[Comparison]:
    """Compare each step with AdamW's formula for the parameters that some rank used. Other parameters must not change.

    The expected step count of a parameter is the number of steps that used it.
    """
    yield from compare_initial_weights(ctx)
    idle_steps = dict.fromkeys(ctx.baseline.parameter_names, 0)
    for step, branch in enumerate(BRANCH_USE_BY_VARIANT[ctx.variant]):
        used = set() if branch is None else find_used_parameters(ctx, module, step, branch)
        grads = {name: grad for name, grad in ctx.rank_records("grads", step)[0].items() if name in used}
        yield from judge_step(ctx, ADAMW, grads, RecordedStep(step, "masters", idle_steps=idle_steps))
        yield from compare_ranks_after_step(ctx, RecordedStep(step + 1))
        idle_steps = {name: count + (name not in used) for name, count in idle_steps.items()}


def find_used_parameters(ctx: JudgeContext, module: nn.Module, step: int, branch: bool) -> set[str]:
    """Return the names of the plain model's parameters that get a gradient on some rank, even if it is zero."""
    module.zero_grad()
    for rank in range(ctx.data_size):
        batch = ctx.baseline.batch(rank, step)
        backward(ctx.baseline.spec.loss(module(batch.inputs, branch=branch), batch.target))
    return set(collect_grads(module))


OWN_GENERATORS = "own_generators"


def observe_deferred(ctx: RankContext) -> None:
    """Build the engine around a model on the meta device, and record its initial weights and gradients.

    Rank 0 draws the same numbers as for the eager model, because torch's generator has the same seed. In one law
    variant the generators of other ranks have other seeds.
    """
    with torch.device("meta"):
        model = ctx.spec.build()
    if ctx.variant == OWN_GENERATORS and ctx.rank > 0:
        torch.manual_seed(ctx.seed + ctx.rank)
    engine = ctx.build_engine_around(model)
    ctx.record("params", engine.full_params())
    ctx.train(engine, step=0)
    ctx.record("grads", engine.full_grads())
    engine.close()


def judge_deferred(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the initial weights, losses and gradients with those of the same model built on a real device."""
    ctx = replace(ctx, baseline=replace(ctx.baseline, spec=draw_on_compute_device(ctx.baseline.spec)))
    yield from compare_initial_weights(ctx)
    yield from compare_record_of_ranks(ctx, "params", 0, 0)
    if splits_sums(ctx):
        yield from compare_split_grads(ctx, "grads")
        return
    local = ctx.compute_local_grads(step=0)
    yield from ctx.compare_losses(0, local)
    yield from ctx.compare_reduced_grads("grads", [local])


def parameter_law(
    script: ScenarioScript,
    statement: str,
    *features: Feature,
    kept_because: str,
    unused_grads: UnusedGrads = UnusedGrads.NONE_IF_CLAIMED,
    models: tuple[str, ...] = ("changing",),
    variants: tuple[str, ...] = ("",),
) -> Law:
    """Build the law of one scenario.

    Gradients are averaged over ranks if the mean is exact, because scenarios of other groups sum gradients.
    """
    return scenario_law(
        "parameters",
        Scenario(script, unused_grads=unused_grads, reduction=Reduction.MEAN),
        statement,
        kept_because=kept_because,
        features=(Feature.PARAMETERS, *features),
        models=models,
        variants=tuple(map(Variant, variants)),
    )


LAWS = (
    parameter_law(
        every_kind,
        "tied, frozen, empty, tiny, uneven, transposed, shared and mixed-dtype parameters train as in plain PyTorch",
        models=("odd", *(f"odd_{kind}" for kind in ODD_PARAMETERS), "empty_last"),
        kept_because="all kinds of parameters in one model, as in real models, and each kind in a separate model",
    ),
    parameter_law(
        branch,
        "a parameter that a step does not use has no gradient in that step, even if the previous step used it",
        unused_grads=UnusedGrads.ALWAYS_NONE,
        kept_because="the only law that distinguishes no gradient from a gradient of zeros",
    ),
    parameter_law(
        frozen_and_unfrozen,
        "gradients are plain PyTorch's after parameters are frozen and unfrozen after construction",
        Feature.UNFREEZING,
        kept_because="the only law that sets requires_grad to False and to True",
    ),
    parameter_law(
        outside_its_module,
        "a weight that is read outside its module's forward also gets the gradient of this use",
        Feature.OUTSIDE_FORWARD,
        kept_because="reads a weight where no hook of its module runs",
    ),
    parameter_law(
        used_on_some_ranks,
        "if only some ranks use a parameter, its gradient counts as zero on the other ranks",
        variants=("", OTHER_RANKS),
        kept_because="the only law in which ranks take different branches",
    ),
    parameter_law(
        sparse,
        "the sparse gradient of an embedding row that was looked up several times is the sum over the look-ups",
        Feature.SPARSE_GRADIENTS,
        models=("lookup",),
        kept_because="the only sparse gradients",
    ),
    parameter_law(
        late_submodule,
        "gradients are right if a submodule attached after construction uses the model's parameters",
        Feature.OUTSIDE_FORWARD,
        kept_because="the only law whose modules change after construction",
    ),
    parameter_law(
        late_module,
        "attaching a submodule without parameters after construction changes no gradient",
        kept_because="adds a module that the engine has not seen at construction, and that reads no weight",
    ),
    parameter_law(
        edited,
        "after full weights are edited between steps, every rank trains with the weights that rank 0 wrote",
        Feature.EDITS,
        kept_because="the only law that edits trained, tied and frozen weights between two micro-batches",
    ),
    Law(
        name="parameters.stay_put",
        statement="a parameter that a step does not use keeps its value and step count, though AdamW would decay it",
        tier=Tier.STAGED,
        models=("changing",),
        observe=observe_stay_put,
        judge=judge_stay_put,
        features=(Feature.PARAMETERS, Feature.PARAM_GROUPS),
        weights_stay_integers=False,
        variants=tuple(
            Variant(
                name,
                (Feature.ENGINE_ACCUMULATION,) if name == WINDOW_VARIANT else (),
                compares_engine_with_itself=True,
            )
            for name in BRANCH_USE_BY_VARIANT
        ),
        steps=LawSteps(observe_stay_put),
        dtypes=("fp32",),  # the model mixes dtypes: its frozen layer stays in fp32 in every dtype
        kept_because="decay and momentum can move a parameter without a gradient, which the law branch does not show",
    ),
    Law(
        name="parameters.unfrozen",
        statement="a parameter unfrozen after construction takes part in all following steps and norms",
        tier=Tier.STAGED,
        models=("odd",),
        observe=observe_unfrozen,
        judge=judge_unfrozen,
        features=(Feature.PARAMETERS, Feature.PARAM_GROUPS, Feature.UNFREEZING),
        weights_stay_integers=False,
        variants=(Variant(compares_engine_with_itself=True),),
        steps=LawSteps(observe_unfrozen),
        dtypes=("fp32",),  # the model mixes dtypes, like the model of stay_put
        kept_because="judges steps after unfreezing; other laws of unfreezing compare gradients",
    ),
    Law(
        name="parameters.deferred",
        statement="a model built on the meta device starts from rank 0's eager weights, and trains like an eager model",
        tier=Tier.STAGED,
        models=("mlp",),
        observe=observe_deferred,
        judge=judge_deferred,
        features=(Feature.DEFERRED,),
        judges_split_sums=True,
        variants=(Variant(), Variant(OWN_GENERATORS)),
        setting_support=SettingSupport.WINDOWS_AND_CALLS,
        kept_because="the only law that builds on the meta device",
    ),
)
