"""Define what an engine claims: the features that laws test, and the options that cells set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zharness.engines.option_keys import find_reason
from zharness.engines.promises import BufferPromise, CallForm, WeightGathers
from zharness.mesh import CONTEXT, DATA_SHARD, DEFAULT_MESH, EXPERT, REPLICATE, TENSOR, Mesh

if TYPE_CHECKING:
    from torch import nn

# The reason why, on this axis, an engine rounds sums of matrix products at other places than plain PyTorch.
SPLIT_PRODUCTS = {
    TENSOR: "tensor parallelism adds parts of a matrix product over ranks",
    EXPERT: "an expert multiplies tokens of several ranks in one product",
    CONTEXT: "parts of a sequence have parts of a gradient, which are added over ranks",
}


class Feature(Enum):
    """The features that an engine claims or refuses; laws test a claim, and a refusal needs a reason."""

    ENGINE_BACKWARD = "engine.backward(loss)"
    TENSOR_BACKWARD = "loss.backward()"
    SCALE_BACKWARD = "engine.scale(loss).backward()"
    RETAIN_GRAPH = "a second backward on a retained graph"
    TORCH_FUNC = "torch.func transforms applied to the engine"
    ENGINE_ACCUMULATION = "gradient accumulation controlled by the engine"
    CALLER_ACCUMULATION = "gradient accumulation controlled by the caller"
    TENSOR_BACKWARD_IN_WINDOW = "loss.backward() inside an accumulation window that the engine controls"
    NO_SYNC = "no_sync, which accumulates gradients without reducing them"
    SUM = "gradients summed over ranks"
    CLIP = "gradient clipping by the global norm"
    PARAM_GROUPS = "several parameter groups"
    MUON = "the optimizer Muon, which needs whole matrices"
    SCHEDULE = "a learning-rate schedule"
    CHECKPOINT = "saving and loading checkpoints"
    CHECKSUMS = "checkpoints with checksums, so that a load notices changed bytes"
    RANK_BUFFERS = "buffers saved and loaded by each rank separately"
    RESHARD = "a checkpoint of one stage loaded at every other stage"
    WORLD_RESHARD = "a checkpoint loaded on more or fewer ranks than saved it; new ranks get the buffers of rank 0"
    MESH_RESHARD = "a checkpoint of one mesh loaded on every other mesh that the engine has"
    UNIVERSAL_CHECKPOINT = "reading DeepSpeed's universal checkpoints"
    AUTOGRAD = "every way to run a backward in torch"
    TRANSFORMS = "every transform of torch.func, applied to the engine or inside the model"
    RECOMPUTATION = "activation checkpointing"
    PARAMETERS = "parameters of every kind"
    UNEVEN_RANKS = "ranks that use different parameters in one step"
    OUTSIDE_FORWARD = "weights read outside the model's own forward"
    SUBMODULES = "submodules called outside the model's own forward"
    NO_GRADIENT = "no gradient, rather than zeros, for a parameter that no rank used"
    SPARSE_GRADIENTS = "gradients that a backward makes sparse"
    OWN_WEIGHT_GRADIENTS = "autograd.grad of weights that returns this rank's own gradients, differentiable again"
    REDUCED_WEIGHT_GRADIENTS = (
        "autograd.grad of weights that returns shards of the reduced gradients, divided like those of backward, "
        "differentiable again"
    )
    UNFREEZING = "parameters unfrozen after construction"
    EDITS = "full weights that one rank edits for all ranks"
    IN_PLACE_EDITS = "weights that the caller edits in place on every rank: the engine trains with them, or raises"
    DEFERRED = "a model built on the meta device"
    INITIAL_WEIGHTS = "the initial weights of rank 0 on all ranks, whatever their own models have"
    INITIAL_BUFFERS = "the initial buffers of rank 0 on all ranks, whatever their own models have"
    AUTOCAST = "a configuration section that runs forwards under torch.autocast"
    LOSS_SCALER = "a dynamic loss scale that skips steps with an overflow"
    AUTOCAST_SCALER = "a dynamic loss scale under torch_autocast in fp16"
    MASTERS = "master weights, gradients and optimizer state in configured dtypes"
    REDUCE_DTYPES = "a configured reduce dtype, and a count of the elements sent in each dtype"
    VARIATIONS = "training in which one setting varies"
    VARIANTS = "named sets of options that must not change a number"
    STEADINESS = "global state restored at close, and no read of uninitialized memory"
    RESOURCES = "a count of the bytes allocated on this rank"
    VISIBLE_COLLECTIVES = "collectives that torch's dispatcher sees, of weights, gradients and activations alone"
    TRAFFIC = "a count of the bytes sent and gathered"
    READ_OUT = "reading the gradient, weight or optimizer state of a named parameter"
    WINDOW_READ_OUT = "reading a gradient inside an accumulation window"
    WRITE_IN = "replacing the gradient, weight or optimizer state of a named parameter"
    WINDOW_WRITE_IN = "replacing a gradient inside an accumulation window, to which later micro-batches add theirs"
    STEP_READ_OUT = "reading how many steps the optimizer has made with a named parameter"
    WRITE_IN_FORWARD = "a replaced weight in the next forward, before any step"
    BATCHES_PER_STEP = "several calls of train_batch in one step"
    UNEQUAL_MICRO_BATCHES = "micro-batches of several sizes in one call of train_batch"
    SHARD_ACCESS = "reading and replacing this rank's shard of a gradient, weight or optimizer state"


@dataclass(frozen=True)
class EngineOption:
    """One value of an option of an engine, which a cell may set.

    - ``options`` is merged into ``EngineConfig.options``. Its key ``replicas``, if it has one, is the number of ranks
      that own each element of a sharded weight, according to ``layout()``.
    - ``refuses`` maps each feature that the engine refuses while the option is set to the reason.
    - ``allows`` are features that the engine refuses without the option. With the option it claims them, also on meshes
      on which it refuses them otherwise.
    - ``excludes`` maps the name of each option that cannot be set together with this one to the reason. Options that
      give different values to one key exclude each other anyway.
    - ``absent`` is the reason why this machine cannot run the option (no compiler, no libaio); it is empty if it can.
    - ``changes_numbers`` is the reason why the option may change numbers, for example a narrower reduce dtype; it is
      empty if the option must not change any number.
    - ``known_bug`` says what the engine gets wrong under the option in every training. The law
      ``training.config_invariance`` then leaves the option out. It is empty if no such bug is known.
    - ``reduce_dtypes`` maps a dtype of the model to the dtype in which gradients are reduced while the option is set.
    - ``has_torch_kernels`` is True if local gradients come from torch's kernels while the option is set, although the
      engine has its own kernels without the option.
    - ``own_kernels`` is the reason why local gradients do not come from torch's kernels while the option is set.
    - ``world_size_factor`` must divide the world size; cells of other world sizes do not set the option.
    - ``shard_factor`` must divide the number of ranks of dp_shard, which on a mesh may be smaller than the world size.
    - ``dtypes`` are the dtypes of the model in which the option can be set; if empty, all dtypes that the engine has.
    - ``laws`` are globs of the only laws that are judged with the option, or of a law with its variant
      (``state.resume-adamw``); if empty, all laws. ``laws_reason`` says why no other law is tested with the option.
    - ``models`` are the models in which the option has an effect; if empty, all models. A cell of another model does
      not set the option, because it would test nothing.
    - ``schedules`` are the pipeline schedules with which the option can be set; if empty, all schedules.
    - ``gathers`` is how often a pipeline gathers weights while the option is set, or None if the option does not change
      this.
    - ``sharded_dtypes`` are added to ``Capabilities.sharded_dtypes`` while the option is set.
    """

    options: Mapping[str, Any]
    refuses: Mapping[Feature, str] = field(default_factory=dict)
    allows: frozenset[Feature] = frozenset()
    excludes: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""
    changes_numbers: str = ""
    known_bug: str = ""
    reduce_dtypes: Mapping[str, str] = field(default_factory=dict)
    has_torch_kernels: bool = False
    own_kernels: str = ""
    world_size_factor: int = 1
    shard_factor: int = 1
    dtypes: frozenset[str] = frozenset()
    laws: frozenset[str] = frozenset()
    laws_reason: str = ""
    models: frozenset[str] = frozenset()
    schedules: frozenset[str] = frozenset()
    gathers: WeightGathers | None = None
    sharded_dtypes: frozenset[str] = frozenset()

    def explain_schedule_conflict(self, schedules: Sequence[str]) -> str:
        """Return the reason why the option cannot be set with one of these pipeline schedules, or '' if it can."""
        if not self.schedules or self.schedules.issuperset(schedules):
            return ""
        return f"it can be set only with the schedule {', '.join(sorted(self.schedules))}"

    def explain_law_limit(self, law: str, variant: str, model: str) -> str:
        """Return the reason why a cell of this law, variant of the law and model cannot show an effect, or ''."""
        names = (law, f"{law}-{variant}")
        if self.laws and not any(fnmatchcase(name, pattern) for name in names for pattern in self.laws):
            because = f", because {self.laws_reason}" if self.laws_reason else ""
            return f"it is judged in {', '.join(sorted(self.laws))} only{because}"
        if self.models and model not in self.models:
            return f"it has an effect on the models {', '.join(sorted(self.models))} only"
        return ""

    @property
    def replicas(self) -> int:
        """The number of ranks that own each element of a sharded weight while the option is set."""
        return int(self.options.get("replicas", 1))

    def explain_cell_limit(self, world_size: int, dtype: str, mesh: Mesh = DEFAULT_MESH) -> str:
        """Return the reason why cells of this world size, dtype and mesh cannot set the option, or '' if they can."""
        if self.dtypes and dtype not in self.dtypes:
            return f"it can be set under {', '.join(sorted(self.dtypes))} only"
        if world_size % self.world_size_factor:
            return f"it needs a world size that {self.world_size_factor} divides"
        if self.shard_factor > 1 and mesh.shape(world_size)[DATA_SHARD] % self.shard_factor:
            return f"it needs a number of shards that {self.shard_factor} divides"
        return self.absent


@dataclass(frozen=True)
class SentDtype:
    """The dtype in which gradients are sent, which the engine option ``key`` sets to ``value``."""

    key: str
    value: str

    def with_options(self, options: Mapping[str, Any]) -> SentDtype:
        """Return the dtype under ``options``, in which only ``key`` has an effect."""
        return SentDtype(self.key, options.get(self.key, self.value))


@dataclass(frozen=True)
class Capabilities:
    """The stages, dtypes, features and options that an engine claims.

    - ``refuses`` maps each feature that the engine refuses to the reason, which quotes the engine's documentation if
      possible. Every other feature is claimed.
    - ``own_kernels`` maps a stage to the reason why local gradients do not come from torch's kernels. Only tiers X and
      C judge such gradients.
    - ``uncached_casts`` maps a stage to the reason why torch.autocast casts a weight anew at each use. The gradients of
      the uses are then summed in the weight's own dtype, as in torch with ``cache_enabled=False``.
    - ``reduce_dtypes`` maps a dtype of the model to the dtype in which gradients are reduced, if that differs. The
      bound of the reduction follows from it.
    - ``variants`` are named options that a cell may set, alone or together. A value is an EngineOption, or only its
      ``options`` if every other field has its default.
    - ``absent`` is the reason why the engine cannot be built in this environment, so that no cell runs; it is empty if
      the engine can be built.
    - ``own_model`` has the engine options for users' models (``--model package.module:factory``).
    - ``junctions(model, options)`` returns the modules of the plain model at whose inputs the engine inserts a node
      into the autograd graph, because autograd adds gradients in another order there.
    - ``scaled_sum`` is the reason why the engine's sum over ranks is a mean times the world size, which rounds unless
      the world size is a power of two; it is empty if the engine computes a sum.
    - ``order_settles`` is the reason why the first backward may sum over ranks in another order than later backwards.
      Over more than two ranks its last bits may then differ. It is empty if all backwards sum in one order.
    - ``buffers`` is the engine's promise about the buffers that forwards write.
    - ``unused_parameters_option`` is the name of the entry of ``variants`` that the engine's documentation asks for if
      a loss does not use every parameter; it is empty if the engine needs none.
    - ``uneven_block`` is the block, such as ``engine.uneven()``, inside which alone ranks may use different parameters;
      it is empty if they may do so anywhere.
    - ``replicas`` is the number of ranks that own each element of a sharded weight, according to ``layout()``.
    - ``mesh_axes`` are the axes of a mesh, by the names of ``zharness.mesh.AXES``, that the engine can have beside the
      data parallelism that every engine has.
    - ``separate_axes`` maps each axis that the engine cannot have together with another named axis to the reason.
    - ``only_beside`` maps each axis that the engine can have only together with a certain second axis to this second
      axis.
    - ``refuses_on`` maps an axis to the features that the engine refuses on meshes with this axis, with the reasons.
    - ``data_options_on`` maps an axis to names of options. On a mesh with this axis one of these options has to be set
      if ranks are left over for data parallelism.
    - ``options_not_on`` maps an axis to the names of options that the engine cannot have on meshes with this axis.
    - ``sent_dtype_on_cp`` has the option that sets the dtype in which gradients are sent on a mesh with the axis cp,
      and its default value. It is None if gradients are sent in the reduce dtype on such a mesh.
    - ``plan_words`` are the words of a model's ``tp_plan`` that the engine can apply; if empty, all words.
    - ``whole_plan_words`` are the words of a ``tp_plan`` for which the engine does not split the layer. A layer that is
      not split gives the same numbers.
    - ``whole_mesh`` is the reason why the named axes of the mesh must take all ranks, so that none are left over for
      data parallelism; it is empty if ranks may be left over.
    - ``engine_windows`` is the reason why the engine owns an accumulation window only if backward is called through
      ``engine.backward`` or ``engine.scale``. A law that calls backward in other ways is then not stated for such a
      window. It is empty if any call will do.
    - ``form`` says who runs forwards and backwards. A law is stated for one form.
    - ``schedules`` are the pipeline schedules that the engine has, by the names that laws use.
    - ``stages_per_rank`` maps each schedule with several stages on a rank of pp to the number of these stages.
    - ``micro_batches_per_rank`` maps each schedule that needs more than one micro-batch to the smallest number of
      micro-batches for each rank of pp.
    - ``gathers`` says how often, at most, a pipeline gathers the weights of a stage.
    - ``sharded_dtypes`` are the dtypes of the model in which, even at ZeRO stage 0, each rank of a pipeline stage has a
      shard of the stage's weights, as in ``fully_shard``. In all other dtypes, at ZeRO stage 0, each rank has whole
      weights, as in DDP.
    - ``refuses_models`` maps each model of the workload that the engine cannot be built around to the reason.
    - ``joined_options`` is the number of options that a setting of a covering array joins, at least 2. A larger number
      gives an array of fewer cells, but an option with a bug hides bugs of the options in the same setting.
    - ``unknown_options`` maps the key of each option that the tested release of the engine does not know to the
      reason; the key of a section's entry is ``section.entry``.
    """

    stages: frozenset[int]
    dtypes: frozenset[str] = frozenset({"fp32"})
    refuses: Mapping[Feature, str] = field(default_factory=dict)
    own_kernels: Mapping[int, str] = field(default_factory=dict)
    uncached_casts: Mapping[int, str] = field(default_factory=dict)
    reduce_dtypes: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, EngineOption | Mapping[str, Any]] = field(default_factory=dict)
    absent: str = ""
    own_model: Mapping[str, Any] = field(default_factory=dict)
    junctions: Callable[[nn.Module, Mapping[str, Any]], Sequence[nn.Module]] | None = None
    scaled_sum: str = ""
    order_settles: str = ""
    buffers: BufferPromise = BufferPromise.LOCAL
    unused_parameters_option: str = ""
    uneven_block: str = ""
    replicas: int = 1
    unknown_options: Mapping[str, str] = field(default_factory=dict)
    mesh_axes: frozenset[str] = frozenset()
    separate_axes: Mapping[str, str] = field(default_factory=dict)
    only_beside: Mapping[str, str] = field(default_factory=dict)
    refuses_on: Mapping[str, Mapping[Feature, str]] = field(default_factory=dict)
    options_not_on: Mapping[str, frozenset[str]] = field(default_factory=dict)
    data_options_on: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sent_dtype_on_cp: SentDtype | None = None
    plan_words: frozenset[str] = frozenset()
    whole_plan_words: frozenset[str] = frozenset()
    whole_mesh: str = ""
    engine_windows: str = ""
    form: CallForm = CallForm.FORWARD_AND_BACKWARD
    joined_options: int = 2
    schedules: frozenset[str] = frozenset()
    stages_per_rank: Mapping[str, int] = field(default_factory=dict)
    micro_batches_per_rank: Mapping[str, int] = field(default_factory=dict)
    gathers: WeightGathers = WeightGathers.EACH_CALL
    sharded_dtypes: frozenset[str] = frozenset()
    refuses_models: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, feature: Feature) -> str | None:
        """Return the reason why the engine refuses ``feature``, or None if the engine claims it."""
        if feature is Feature.VARIANTS and not self.variants:
            return "the engine lists no variants in its capabilities"
        return self.refuses.get(feature)

    def unknown_option(self, options: Mapping[str, Any]) -> str:
        """Return the reason why this release does not know one of ``options``, or '' if it knows all of them."""
        return find_reason(options, self.unknown_options)

    @cached_property
    def engine_options(self) -> Mapping[str, EngineOption]:
        """Return the named options, each as an EngineOption."""
        return {
            name: value if isinstance(value, EngineOption) else EngineOption(value)
            for name, value in self.variants.items()
        }

    def explain_axes(self, mesh: Mesh) -> str:
        """Return the reason why the engine cannot have the axes of ``mesh`` together, or '' if it can."""
        separate = next((axis for axis in mesh.axes if axis in self.separate_axes and len(mesh.axes) > 1), "")
        if separate:
            others = " and ".join(axis for axis in mesh.axes if axis != separate)
            return f"cannot have {separate} beside {others}: {self.separate_axes[separate]}"
        missing = ((axis, self.only_beside[axis]) for axis in mesh.axes if axis in self.only_beside)
        alone, other = next(((axis, other) for axis, other in missing if other not in mesh.axes), ("", ""))
        return f"has {alone} beside {other} alone; expected a mesh such as {alone}2,{other}2" if alone else ""

    @property
    def neutral_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Return, by name, the options that every cell can set and that must not change any number."""
        return {
            name: dict(option.options)
            for name, option in self.engine_options.items()
            if option.world_size_factor == 1
            and not (option.dtypes or option.laws or option.absent or option.changes_numbers or option.known_bug)
        }

    @property
    def neutral_exclusions(self) -> frozenset[frozenset[str]]:
        """Return each pair of ``neutral_options`` of which one option names the other in its ``excludes``."""
        names, known = self.neutral_options, self.engine_options
        return frozenset(frozenset((name, other)) for name in names for other in known[name].excludes if other in names)

    def on_mesh(self, mesh: Mesh) -> Capabilities:
        """Return the capabilities on ``mesh``. tp, ep and cp split matrix products, whose sums round at other places.

        On a mesh with tp, ep or cp the engine therefore counts as an engine with its own kernels, which only tiers X
        and C judge.
        """
        if not mesh.sizes:
            return self
        refuses = dict(self.refuses)
        for axis in mesh.axes:
            refuses.update(self.refuses_on.get(axis, {}))
        excluded = frozenset[str]().union(*(self.options_not_on.get(axis, ()) for axis in mesh.axes))
        variants = {name: option for name, option in self.variants.items() if name not in excluded}
        replicas = max(self.replicas, mesh.size(REPLICATE))
        reason = next((reason for axis, reason in SPLIT_PRODUCTS.items() if axis in mesh.axes), "")
        own_kernels = dict.fromkeys(self.stages, reason) if reason else self.own_kernels
        return replace(self, refuses=refuses, variants=variants, replicas=replicas, own_kernels=own_kernels)

    def with_options(self, names: Sequence[str]) -> Capabilities:
        """Return the capabilities while the named options are set, without the options that these options exclude."""
        if not names:
            return self
        chosen = [self.engine_options[name] for name in names]
        excluded = {other for option in chosen for other in option.excludes}
        excluded |= {
            name for name, option in self.engine_options.items() if not option.excludes.keys().isdisjoint(names)
        }
        refuses, reduce_dtypes, sent = dict(self.refuses), dict(self.reduce_dtypes), self.sent_dtype_on_cp
        for option in chosen:
            sent = sent and sent.with_options(option.options)
            refuses.update(option.refuses)
            refuses = {feature: reason for feature, reason in refuses.items() if feature not in option.allows}
            reduce_dtypes.update(option.reduce_dtypes)
        own_kernels = {} if any(option.has_torch_kernels for option in chosen) else self.own_kernels
        for reason in filter(None, (option.own_kernels for option in chosen)):
            own_kernels = dict.fromkeys(self.stages, reason)
        variants = {name: option for name, option in self.variants.items() if name not in excluded}
        replicas = max(self.replicas, *(option.replicas for option in chosen))
        return replace(
            self,
            refuses=refuses,
            reduce_dtypes=reduce_dtypes,
            sent_dtype_on_cp=sent,
            own_kernels=own_kernels,
            variants=variants,
            replicas=replicas,
            gathers=next((option.gathers for option in chosen if option.gathers), self.gathers),
            sharded_dtypes=self.sharded_dtypes.union(*(option.sharded_dtypes for option in chosen)),
        )
