"""Define the laws of state across meshes: every mesh loads exactly the state that another mesh saved.

Every rank trains the micro-batch of the first data coordinate, so the mean gradient is the same on all meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from zharness.engines.protocol import Engine, Feature, GroupSpec, OptimizerSpec, require_full_state_dict
from zharness.law_kit.dtypes import DTYPES
from zharness.law_kit.hints import add_hint, explain_nothing, hint_factor
from zharness.law_kit.integer_steps import SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.law import Variant
from zharness.law_kit.optimizer_step import RecordedStep, compare_ranks_after_step, judge_step
from zharness.law_kit.rank_actions import shared_folder
from zharness.law_kit.rank_context import RankContext, scalar
from zharness.law_kit.record_comparisons import compare_records
from zharness.laws.mesh import mesh_law
from zharness.mesh import CONTEXT, EXPERT, PIPELINE, TENSOR, Mesh
from zharness.parity import Comparison, Mismatch, Part, compare_bitwise
from zharness.parity.certificate import certify_exactness
from zharness.parity.compare import check_names, is_bitwise_equal
from zharness.workload import ModelSpec
from zharness.workload.model_lookup import explain_uneven_parts

# A step moves only last.bias or down.bias, and by integers, so that the model stays exact: their gradients are small
# multiples of 1/4, because a micro-batch has four samples. Every parameter has a momentum.
LAST_BIAS_STEPS = OptimizerSpec("sgd", {"lr": 0.0, "momentum": 0.5}, groups=(GroupSpec("[dl]*.bias", {"lr": 4.0}),))
MESHES = tuple(map(Mesh.parse, ("", "tp2", "tp4", "rep2", "rep2,tp2", "cp2", "ep1", "ep2", "ep4")))
# Variants of SGD load on fewer meshes, because Adam's state contains a tensor like SGD's momentum. So do models with
# two heads, which not every mesh can split: for each mesh and shape, torch derives again how to split an operation.
FEW_MESHES = tuple(map(Mesh.parse, ("", "tp2", "ep1", "ep2")))
MODELS_ON_FEW_MESHES = ("heads", "sequence")
TO_OTHERS, FROM_OTHERS = "to_others", "from_others"
FIRST_GROUP_HINT = "its step used the options of the first parameter group, in which it is not"
ADAM = "_adam"  # the end of the names of variants that step with Adam, whose state universal checkpoints hold
MOMENTUM_OF = {"sgd": "momentum_buffer", "adam": "exp_avg"}  # the key of the optimizer's state
SAVED = 1  # the number of steps that are made before the save


@dataclass(frozen=True)
class Arrangement:
    """A mesh and the pipeline schedule on it; '' is the engine's default schedule.

    The schedule decides which modules a rank of pp holds: one stage, or two stages that are not adjacent.
    """

    mesh: Mesh
    schedule: str = ""

    @property
    def label(self) -> str:
        """The part of a record's name that names the mesh and the schedule."""
        return "-".join(filter(None, (self.mesh.label or "dp_shard", self.schedule)))

    @property
    def options(self) -> Mapping[str, str]:
        """The option of an engine that selects the schedule."""
        return {"schedule": self.schedule} if self.schedule else {}


def select_others(ctx: RankContext, own: Arrangement, meshes: Sequence[Mesh]) -> list[Arrangement]:
    """Return the meshes of ``meshes``, except ``own``, that the engine supports on these ranks with this model.

    All of them get the default schedule.
    """
    claims = ctx.capabilities
    return [
        Arrangement(mesh)
        for mesh in meshes
        if Arrangement(mesh) != own
        # The engine's own layer of experts has other names in a checkpoint than the model's layer.
        and (EXPERT in mesh.axes) == (EXPERT in ctx.config.mesh.axes)
        and claims.mesh_axes.issuperset(mesh.axes)
        and not claims.explain_axes(mesh)
        and not mesh.explain_misfit(ctx.world_size)
        and not (claims.whole_mesh and mesh.sizes and mesh.data_size(ctx.world_size) > 1)
        and can_split(ctx.spec, mesh)
    ]


def can_split(spec: ModelSpec, mesh: Mesh) -> bool:
    """Return whether each axis of ``mesh`` that splits models can split a part of this model into equal parts."""
    plans = {TENSOR: spec.tp_plan, CONTEXT: spec.cp_plan, EXPERT: spec.ep_plan}
    if len(spec.pp_plan) < mesh.size(PIPELINE) > 1:
        return False
    return all(plans[axis] and not explain_uneven_parts(spec, mesh, axis) for axis in mesh.axes if axis in plans)


def train_shared_batch(ctx: RankContext, engine: Engine, step: int, label: str) -> None:
    """Run forward and backward of the first data coordinate's micro-batch, and record loss and gradients."""
    batch = ctx.spec.micro_batch(ctx.seed, 0, step).to(DTYPES[ctx.config.dtype], ctx.device)
    loss = ctx.spec.loss(batch.feed(engine), batch.target)
    engine.backward(loss)
    ctx.record(f"loss-{label}", {"loss": loss}, step)
    ctx.record(f"grads-{label}", engine.full_grads(), step)


def build_other_model(ctx: RankContext) -> nn.Module:
    """Return the model with other initial weights, so that a weight that is not loaded is wrong."""
    return ctx.spec.model(ctx.seed + 1)


# The last argument is the label of the engine that loaded.
ExplainGradient = Callable[[JudgeContext, Mismatch, str], str]


@dataclass(frozen=True)
class MeshTraining:
    """The training of the engines in a law that saves on one mesh and loads on others.

    ``run_batch`` gets a number and a label. It runs forward and backward of the first data coordinate's micro-batch
    with this number, and records loss and gradients under the label. If a pipeline needs several micro-batches,
    ``run_batch`` runs the same one ``micro_batches`` times. ``schedule`` is the pipeline schedule on the cell's mesh,
    or '' for the default. ``explain_grad`` returns a hint for a wrong gradient.
    """

    optimizer: OptimizerSpec
    meshes: Sequence[Mesh]
    run_batch: Callable[[RankContext, Engine, int, str], None]
    schedule: str = ""
    micro_batches: int = 1
    explain_grad: ExplainGradient = explain_nothing


def observe_meshes(ctx: RankContext, training: MeshTraining) -> None:
    """Save after a step on the cell's mesh and load on each other mesh, or save there and load on the cell's mesh."""
    own = Arrangement(ctx.config.mesh, training.schedule)
    others = select_others(ctx, own, training.meshes)
    if ctx.variant.startswith(TO_OTHERS):
        with shared_folder() as folder:
            save_on_mesh(ctx, training, own, folder)
            for other in others:
                load_on_mesh(ctx, training, other, folder, f"loaded-{other.label}")
        return
    for other in others:
        with shared_folder() as folder:
            save_on_mesh(ctx, training, other, folder)
            load_on_mesh(ctx, training, own, folder, f"loaded-{other.label}")


def save_on_mesh(ctx: RankContext, training: MeshTraining, place: Arrangement, folder: Path) -> None:
    """Make a step on the mesh and with the schedule of ``place``, and save the engine."""
    label = f"saved-{place.label}"
    engine = ctx.build_engine(mesh=place.mesh, options=place.options, optimizer=training.optimizer)
    training.run_batch(ctx, engine, 0, label)
    engine.step()
    engine.zero_grad()
    ctx.record_training_state(engine, SAVED, f"-{label}")
    engine.save(folder)
    engine.close()


def load_on_mesh(ctx: RankContext, training: MeshTraining, place: Arrangement, folder: Path, label: str) -> None:
    """Load the checkpoint into an engine with other weights, on the mesh of ``place``, and make a step."""
    engine = ctx.build_engine_around(
        build_other_model(ctx), mesh=place.mesh, options=place.options, optimizer=training.optimizer
    )
    engine.load(folder)
    ctx.record_training_state(engine, SAVED, f"-{label}")
    training.run_batch(ctx, engine, SAVED, label)
    engine.step()
    engine.zero_grad()
    ctx.record_training_state(engine, SAVED + 1, f"-{label}")
    engine.close()


def observe_other_mesh(ctx: RankContext) -> None:
    """Save and load in the direction, and with the optimizer, that the law variant names."""
    observe_meshes(ctx, choose_training(ctx.variant, ctx.spec))


def choose_training(variant: str, spec: ModelSpec) -> MeshTraining:
    """Return the training of a law variant on a model; its steps keep the model exact."""
    optimizer = SIGN_STEPS if variant.endswith(ADAM) else LAST_BIAS_STEPS
    is_on_all = variant.endswith(ADAM) and spec.name not in MODELS_ON_FEW_MESHES
    return MeshTraining(optimizer, MESHES if is_on_all else FEW_MESHES, train_shared_batch)


def judge_other_mesh(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the state that each mesh loaded bitwise with the saved state, and judge the next step."""
    yield from judge_meshes(ctx, choose_training(ctx.variant, ctx.baseline.spec))


def judge_meshes(ctx: JudgeContext, training: MeshTraining) -> Iterator[Comparison]:
    """For each mesh that has records, compare the loaded state with the saved state, and judge the next step."""
    # The recorded layout is the layout of the last engine, and other records are from other meshes.
    ctx = replace(ctx, evidence=tuple(replace(evidence, layout={}) for evidence in ctx.evidence))
    own, labels = Arrangement(ctx.mesh, training.schedule).label, (Arrangement(mesh).label for mesh in training.meshes)
    for other in filter(lambda label: ctx.has_record(f"loss-loaded-{label}"), labels):
        saved_on, loaded_on = (own, other)[:: 1 if ctx.variant.startswith(TO_OTHERS) else -1]
        for comparison in judge_loaded(ctx, f"saved-{saved_on}", f"loaded-{other}", training):
            cause = "" if comparison.mismatch is None else comparison.mismatch.hint
            yield add_hint(comparison, "; ".join(filter(None, (cause, f"saved on {saved_on}, loaded on {loaded_on}"))))


def judge_loaded(ctx: JudgeContext, saved: str, loaded: str, training: MeshTraining) -> Iterator[Comparison]:
    """Compare the weights and state of one load with those that were saved, and judge the step after the load."""
    yield from judge_complete_state(ctx, saved, MOMENTUM_OF[training.optimizer.name])
    for what in ("params", "state"):
        labels = f"{what}-{saved}", f"{what}-{loaded}"
        for comparison in compare_records(ctx, *labels, SAVED, SAVED, Part.GATHER):
            yield hint_other_tensor(ctx, comparison, *labels)
    weights = ctx.rank_records(f"params-{loaded}", SAVED)[0]
    local = [ctx.baseline.run_rank(0, SAVED, weights)] * ctx.data_size
    yield from ctx.compare_losses(SAVED, local, f"loss-{loaded}")
    steps, repeats = range(SAVED, SAVED + 1), training.micro_batches * ctx.world_size // ctx.data_size
    exact = certify_exactness(ctx.baseline, steps, ctx.dtype, repeats=repeats, params=weights)
    grads, micros = ctx.rank_records(f"grads-{loaded}", SAVED)[0], [local] * training.micro_batches
    for comparison in ctx.compare_reduced_grads(f"grads-{loaded}", micros, SAVED, exact):
        mismatch = comparison.mismatch
        hint = "" if mismatch is None else training.explain_grad(ctx, mismatch, loaded)
        yield add_hint(comparison, hint) if hint else hint_factor(comparison, grads, local[0].grads)
    before = RecordedStep(SAVED, f"params-{loaded}", f"state-{loaded}")
    yield from judge_next_step(ctx, training.optimizer, grads, before)
    yield from compare_ranks_after_step(ctx, replace(before, step=SAVED + 1))


def hint_other_tensor(ctx: JudgeContext, comparison: Comparison, saved: str, loaded: str) -> Comparison:
    """Add a hint to a mismatch if the wrong tensor is bitwise the saved tensor of exactly one other weight.

    Zeros, such as moments of unused weights, belong to no weight in particular.
    """
    mismatch = comparison.mismatch
    if mismatch is None:
        return comparison
    before, after = (ctx.rank_records(label, SAVED)[mismatch.seen_on] for label in (saved, loaded))
    tensor, key = after[mismatch.parameter], mismatch.parameter.partition("/")[2]
    others = [name for name, value in before.items() if name.partition("/")[2] == key]
    others = [name for name in others if tensor.any() and is_bitwise_equal(before[name], tensor)]
    return add_hint(comparison, f"it is the saved {others[0]}") if len(others) == 1 else comparison


def judge_next_step(
    ctx: JudgeContext, optimizer: OptimizerSpec, grads: Mapping[str, Tensor], before: RecordedStep
) -> Iterator[Comparison]:
    """Compare the step after a load with the optimizer's formula; add a hint if it used another group's options."""
    for comparison in judge_step(ctx, optimizer, grads, before):
        is_hinted = comparison.mismatch is not None and uses_first_group(
            ctx, comparison.mismatch, optimizer, grads, before
        )
        yield add_hint(comparison, FIRST_GROUP_HINT) if is_hinted else comparison


def uses_first_group(
    ctx: JudgeContext, mismatch: Mismatch, optimizer: OptimizerSpec, grads: Mapping[str, Tensor], before: RecordedStep
) -> bool:
    """Return whether a weight and its moments are the result of a step with the options of the first group.

    The first group's learning rate is 0, so the weight alone cannot distinguish such a step from no step; the moments
    can. The momentum of SGD is the same with the options of any group, so it cannot distinguish such a step from a step
    with a learning rate of 0. A wrong step count is a separate error.
    """
    name = mismatch.parameter.partition("/")[0]
    mismatches = (each.mismatch for each in judge_step(ctx, replace(optimizer, groups=()), grads, before))
    wrong = {each.parameter for each in mismatches if each is not None} - {f"{name}/step"}
    return not any(parameter.partition("/")[0] == name for parameter in wrong)


def judge_complete_state(ctx: JudgeContext, saved: str, momentum: str) -> Iterator[Comparison]:
    """Check that every rank reports a weight and a momentum of every parameter before the save."""
    for rank in range(ctx.world_size):
        weights, state = (ctx.rank_records(f"{what}-{saved}", SAVED)[rank] for what in ("params", "state"))
        for name in ctx.baseline.parameter_names:
            is_there = name in weights and f"{name}/{momentum}" in state
            yield compare_bitwise(ctx.location(name, Part.GATHER, SAVED, rank), scalar(1), scalar(is_there))


def observe_full_state_dict(ctx: RankContext) -> None:
    """Make a step, load the full state dict into a plain model, build a second engine around it, and run a forward."""
    training = MeshTraining(LAST_BIAS_STEPS, (), train_shared_batch)
    load_full_state_dict(ctx, training, ctx.spec.model(ctx.seed), build_other_model(ctx))


def load_full_state_dict(ctx: RankContext, training: MeshTraining, model: nn.Module, other: nn.Module) -> None:
    """Make a step of an engine around ``model``, load its full state dict into ``other``, and run ``other``."""
    engine = ctx.build_engine_around(model, optimizer=training.optimizer)
    training.run_batch(ctx, engine, 0, "before")
    engine.step()
    engine.zero_grad()
    ctx.record("params", engine.full_params(), SAVED)
    full = require_full_state_dict(engine).full_state_dict()
    ctx.record("full", full)
    engine.close()
    other.load_state_dict(full)
    loaded = ctx.build_engine_around(other, optimizer=training.optimizer)
    ctx.record("params-loaded", loaded.full_params(), SAVED)
    training.run_batch(ctx, loaded, SAVED, "loaded")
    loaded.close()


def judge_full_state_dict(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare names, shapes and values of the full state dict on every rank, and the engine around the loaded model."""
    plain = ctx.baseline.build_module().state_dict()
    for rank, full in enumerate(ctx.rank_records("full")):
        yield from compare_state_dicts(ctx, plain | dict(ctx.rank_records("params", SAVED)[rank]), full, rank)
    yield from compare_loaded_engine(ctx)


def compare_loaded_engine(ctx: JudgeContext) -> Iterator[Comparison]:
    """Compare the weights and the loss of the engine around the loaded model with those of the engine that saved."""
    yield from compare_records(ctx, "params", "params-loaded", SAVED, SAVED, Part.GATHER)
    local = [ctx.baseline.run_rank(0, SAVED, ctx.rank_records("params", SAVED)[0])] * ctx.data_size
    yield from ctx.compare_losses(SAVED, local, "loss-loaded")


def compare_state_dicts(
    ctx: JudgeContext, plain: Mapping[str, Tensor], full: Mapping[str, Tensor], rank: int
) -> Iterator[Comparison]:
    """Compare names, shapes and values of the full state dict on a rank with those of the plain model."""
    check_names("full_state_dict", plain, full)
    for name, tensor in plain.items():
        place = ctx.location(name, Part.GATHER, SAVED, rank)
        yield compare_bitwise(place, tensor.new_zeros(tensor.shape), full[name].new_zeros(full[name].shape))
        yield compare_bitwise(place, tensor, full[name])


LAWS = (
    mesh_law(
        "other_mesh",
        "every mesh loads weights and optimizer state of another mesh bitwise, and continues training from them",
        observe_other_mesh,
        judge_other_mesh,
        Feature.CHECKPOINT,
        Feature.MESH_RESHARD,
        Feature.PARAM_GROUPS,
        variants=tuple(Variant(f"{way}{end}") for end in ("", ADAM) for way in (TO_OTHERS, FROM_OTHERS)),
        kept_because="the only law that loads on another mesh",
    ),
    mesh_law(
        "full_state_dict",
        "on every mesh and rank, the full state dict has every key of the plain model, with full tensors",
        observe_full_state_dict,
        judge_full_state_dict,
        Feature.CHECKPOINT,
        kept_because="the only law of the full state dict on a mesh",
    ),
)
