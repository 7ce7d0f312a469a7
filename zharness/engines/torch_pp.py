"""Adapt the schedules of ``torch.distributed.pipelining`` to the Engine protocol, for engines that run whole batches.

Each rank has one stage, or several stages for a schedule that interleaves them, and its optimizer updates only the
parameters of these stages. ``train_batch`` lets the schedule run the forwards and backwards of a step. Ranks that the
axis pp leaves over are data parallel within each stage, by DDP or ``fully_shard``, which torch's stages support. In
bf16 every stage is wrapped in ``fully_shard``, whose mixed precision keeps fp32 weights. The axis tp splits the modules
of a stage, as ``parallelize_module`` does: ranks at one coordinate of tp form a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zharness.engines import optimizers
from zharness.engines.fsdp2_options import build_precision_policy
from zharness.engines.protocol import (
    Absent,
    CallForm,
    Capabilities,
    EngineConfig,
    EngineOption,
    Feature,
    Observations,
    Piece,
    WeightGathers,
)
from zharness.engines.tensor_parallel import apply_plan, build_device_mesh, gather_rank_numbers, list_runs
from zharness.engines.torch_checkpoint import STAGES_FORMAT, EngineState
from zharness.engines.torch_engine import copy_full, copy_full_states, snapshot, validate_config
from zharness.engines.torch_gathers import gather_full_tensors
from zharness.engines.torch_pp_stages import (
    TiedWeights,
    build_named_tree,
    clip_over_stages,
    keep_ties,
    refuse_tied_weights,
)
from zharness.engines.without_forward import WithoutForward, join_state_dicts
from zharness.errors import ConfigError, UsageError
from zharness.mesh import DATA_SHARD, PIPELINE, TENSOR

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DOCUMENTATION = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
SCHEDULE, DATA_PARALLEL = "schedule", "data_parallel"
DDP, FULLY_SHARD = "ddp", "fully_shard"
RESHARD = "reshard_after_forward"
# Models without tied weights: fully_shard would make two parameters of a weight that two stages have.
UNTIED = frozenset({"chain", "skips", "odd_chain", "masked_chain", "dropped_chain", "token_chain", "random_chain"})
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch: its class, and the stages of each rank, as a function of rank and number of ranks.

    ``micro_batches`` is the number that the schedule needs for each rank, or 0 if one for all ranks is enough.
    """

    name: str
    stages: Callable[[int, int], tuple[int, ...]]
    micro_batches: int = 0


def one_stage(rank: int, size: int) -> tuple[int, ...]:
    """Return the one stage of a rank."""
    return (rank,)


def two_stages_in_turn(rank: int, size: int) -> tuple[int, ...]:
    """Return two stages of a rank, ``size`` apart."""
    return (rank, rank + size)


def two_stages_in_a_v(rank: int, size: int) -> tuple[int, ...]:
    """Return two stages of a rank: the first rank has the first and the last one."""
    return (rank, 2 * size - 1 - rank)


SCHEDULES: Mapping[str, ScheduleKind] = {
    "gpipe": ScheduleKind("ScheduleGPipe", one_stage),
    "1f1b": ScheduleKind("Schedule1F1B", one_stage, micro_batches=1),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B", two_stages_in_turn),
    "zero_bubble": ScheduleKind("ScheduleInterleavedZeroBubble", two_stages_in_turn, micro_batches=2),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", two_stages_in_a_v, micro_batches=2),
}
_LEFT_TO_THE_CALLER = f"the schedules leave it to the caller ({DOCUMENTATION})"
CAPABILITIES = Capabilities(
    stages=frozenset({0}),
    dtypes=frozenset({"fp32", "bf16"}),
    refuses={
        **dict.fromkeys((Feature.UNIVERSAL_CHECKPOINT, Feature.LOSS_SCALER), _LEFT_TO_THE_CALLER),
        **dict.fromkeys((Feature.INITIAL_WEIGHTS, Feature.INITIAL_BUFFERS), "a stage has the values of its own ranks"),
        Feature.RANK_BUFFERS: "torch.distributed.checkpoint saves a tensor that is not a DTensor once for all ranks",
        Feature.UNEQUAL_MICRO_BATCHES: "a stage receives all micro-batches in the shapes of the first one "
        "(https://github.com/pytorch/pytorch/issues/126600)",
    },
    mesh_axes=frozenset({PIPELINE, TENSOR}),
    only_beside={TENSOR: PIPELINE},
    variants={
        FULLY_SHARD: EngineOption({DATA_PARALLEL: FULLY_SHARD}, models=UNTIED, sharded_dtypes=frozenset({"fp32"})),
        "resharded": EngineOption(
            {DATA_PARALLEL: FULLY_SHARD, RESHARD: True},
            models=UNTIED,
            gathers=WeightGathers.EACH_CALL,
            sharded_dtypes=frozenset({"fp32"}),
        ),
    },
    form=CallForm.WHOLE_BATCH,
    gathers=WeightGathers.ONCE,
    sharded_dtypes=frozenset({"bf16"}),
    schedules=frozenset(SCHEDULES),
    stages_per_rank={name: len(kind.stages(0, 1)) for name, kind in SCHEDULES.items()},
    micro_batches_per_rank={name: kind.micro_batches for name, kind in SCHEDULES.items()},
    data_options_on={TENSOR: frozenset({FULLY_SHARD, "resharded"})},  # DDP broadcasts, which DTensor has no rule for
    refuses_models={"tied_ends": "it would repeat the cells of tied_chain: a tied layer is a tied weight to a stage"},
)


OPTIONS = {
    SCHEDULE: f"one of {', '.join(SCHEDULES)}",
    DATA_PARALLEL: f"{DDP} (default) or {FULLY_SHARD}: what a stage is wrapped in if several ranks have it",
    RESHARD: "true: fully_shard reshards weights after each forward; default false, as torchtitan does in pipelines",
}


def factory(model: nn.Module, config: EngineConfig) -> PipelineEngine:
    """Split ``model`` into stages by the plan of the config, over the default process group. This is a collective.

    Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, OPTIONS)
    if PIPELINE not in config.mesh.axes:
        raise ConfigError("got a mesh without the axis pp; expected one such as pp2")
    has_ddp = config.mesh.data_size(dist.get_world_size()) > 1 and choose_data_parallel(config) == DDP
    if has_ddp and TENSOR in config.mesh.axes:
        raise ConfigError(
            f"DDP cannot have stages that tp splits, which are DTensors; set {DATA_PARALLEL} to {FULLY_SHARD}"
        )
    return PipelineEngine(model, config)


class StageModule(nn.Module):
    """Consecutive modules of a model; each module takes the outputs of the previous module."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, *values: Tensor) -> Any:
        output: Any = values
        for part in self.parts:
            output = part(*values)
            values = output if isinstance(output, tuple) else (output,)
        return output


def split_plan(plan: Sequence[str], stages: int) -> list[list[str]]:
    """Return the names of the modules of each stage, as evenly as possible. Raises ConfigError for too few modules."""
    if len(plan) < stages:
        raise ConfigError(f"the pp_plan has {len(plan)} modules, which cannot be split into {stages} stages")
    edges = [len(plan) * stage // stages for stage in range(stages + 1)]
    return [list(plan[start:stop]) for start, stop in pairwise(edges)]


def split_stages(model: nn.Module, config: EngineConfig, names: Sequence[str], tensor_ranks: DeviceMesh) -> None:
    """Split the modules ``names`` over ``tensor_ranks`` by the config's ``tp_plan``. This is a collective.

    Raises ConfigError for an unknown word in the plan, and for a model without a plan.
    """
    own = {
        name: word for name, word in config.tp_plan.items() if any(f"{name}.".startswith(f"{each}.") for each in names)
    }
    if own or not config.tp_plan:
        with keep_ties(model):
            apply_plan(model, replace(config, tp_plan=own), tensor_ranks)


def choose_data_parallel(config: EngineConfig) -> str:
    """Return the wrapper of a stage: the option's, or by default ``fully_shard`` in bf16 and DDP in fp32."""
    kind = str(config.options.get(DATA_PARALLEL, DDP if config.dtype == "fp32" else FULLY_SHARD))
    if kind not in (DDP, FULLY_SHARD):
        raise ConfigError.unknown_name(DATA_PARALLEL, kind, [DDP, FULLY_SHARD])
    if kind == DDP and config.dtype != "fp32":
        raise ConfigError(f"got {DATA_PARALLEL} {DDP} and bf16; only {FULLY_SHARD} keeps fp32 weights beside it")
    return kind


def wrap_stage(part: StageModule, config: EngineConfig, data_ranks: DeviceMesh) -> nn.Module:
    """Return a stage wrapped for data parallelism over ``data_ranks``; one rank needs no wrapper in fp32.

    DDP refuses a stage whose weights are all frozen, so such a stage is not wrapped in DDP. If its weights are unfrozen
    later, nothing reduces their gradients, so the ranks train different weights. The adapter causes this, not torch.

    Raises ConfigError for an unknown kind.
    """
    kind = choose_data_parallel(config)
    if data_ranks.size() == 1 and config.dtype == "fp32":
        return part
    if kind == DDP:
        if not any(parameter.requires_grad for parameter in part.parameters()):
            return part
        return DistributedDataParallel(part, process_group=data_ranks.get_group())
    from torch.distributed.fsdp import fully_shard

    for module in (*part.parts, part):
        fully_shard(
            module,
            mesh=data_ranks,
            reshard_after_forward=config.options.get(RESHARD, False),
            mp_policy=build_precision_policy(replace(config, options={})),
        )
    return part


def refuse_unequal_sizes(micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise UsageError unless all micro-batches have the same number of samples, as torch's schedules need.

    A schedule receives all micro-batches in the shape of the first one. It cuts a batch by ``tensor_split``, even into
    unequal parts; its last stage then trains on rows that no stage sent (pytorch/pytorch#126600).
    """
    sizes = [len(inputs) for inputs, _ in micro_batches]
    if len(set(sizes)) != 1:
        raise UsageError(f"got micro-batches of {sizes} samples; expected one or more, with as many samples each")


def collect_owners(params: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, tuple[Piece, ...]]:
    """Return the flat elements of each parameter of ``names`` that each rank owns. This is a collective.

    ``params`` are the parameters of this rank's stages; all ranks of a stage own a parameter that is not sharded.
    """
    from torch.distributed.tensor import DTensor

    rank = dist.get_rank()
    own = {name: [Piece(rank, 0, param.numel())] for name, param in params.items()}
    sharded = {name: param for name, param in params.items() if isinstance(param.data, DTensor)}
    own |= zip(sharded, map(list_runs, gather_rank_numbers(list(sharded.values()))), strict=True)
    views: list[Mapping[str, list[Piece]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(views, own)
    owners = {name: tuple(dict.fromkeys(piece for view in views for piece in view.get(name, []))) for name in names}
    return {name: pieces for name, pieces in owners.items() if pieces}


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch, with the number of micro-batches, the input shape and the loss for which it was built."""

    micro_batches: int
    shape: torch.Size
    loss: Loss
    schedule: Any


class PipelineEngine(WithoutForward):
    """An engine whose schedule runs all forwards and backwards of a step; see ``Engine`` and ``SupportsTrainBatch``."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        from torch.distributed import pipelining

        self.module, self.capabilities, self._config = model, CAPABILITIES, config
        devices = build_device_mesh(config.mesh, next(model.parameters()).device)
        self._group = devices[PIPELINE].get_group()
        rank, size = devices[PIPELINE].get_local_rank(), devices[PIPELINE].size()
        kind = SCHEDULES[config.options.get(SCHEDULE, "gpipe")]
        self._schedule_class: Any = getattr(pipelining, kind.name)
        numbers, total = kind.stages(rank, size), size * len(kind.stages(rank, size))
        names = split_plan(config.pp_plan, total)
        if choose_data_parallel(config) == FULLY_SHARD:
            refuse_tied_weights(model, names)
        self._total = total
        self._first, self._last = 0 in numbers, total - 1 in numbers
        if TENSOR in config.mesh.axes:
            split_stages(model, config, [name for number in numbers for name in names[number]], devices[TENSOR])
        parts = {number: StageModule([model.get_submodule(name) for name in names[number]]) for number in numbers}
        self._parts: Mapping[int, nn.Module] = {
            number: wrap_stage(part, config, devices[DATA_SHARD]) for number, part in parts.items()
        }
        mine = {id(tensor) for part in parts.values() for tensor in (*part.parameters(), *part.buffers())}
        self._names = [name for name, _ in model.named_parameters()]
        self._params = {name: param for name, param in model.named_parameters() if id(param) in mine}
        self._layout: Mapping[str, tuple[Piece, ...]] = collect_owners(self._params, self._names)
        if missing := [name for name in self._names if name not in self._layout]:
            raise ConfigError(f"the pp_plan leaves out the parameters {', '.join(missing)}")
        self._tied = TiedWeights(self._params, self._group)
        buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) in mine}
        self._named_tree = build_named_tree(self._params, buffers)
        self._clip, self._norm = config.clip, float("nan")
        self._optimizer = optimizers.build(self._params, config.optimizer)
        self._lr_schedule = optimizers.schedule(self._optimizer, config.optimizer)
        self._schedules: list[Schedule] = []

    def train_batch(self, micro_batches: Sequence[tuple[Tensor, Tensor]], loss: Loss) -> tuple[Tensor, ...]:
        """Run forward and backward of all micro-batches, and return their losses on every rank.

        The mean of the gradients over the micro-batches is added to the existing gradients. Raises UsageError for
        micro-batches of several sizes.
        """
        refuse_unequal_sizes(micro_batches)
        schedule = self._find_schedule(len(micro_batches), micro_batches[0][0].shape, loss)
        losses: list[Tensor] = []
        inputs = (torch.cat([inputs for inputs, _ in micro_batches]),) if self._first else ()
        target = torch.cat([target for _, target in micro_batches])
        self._tied.begin_batch()
        schedule.step(*inputs, **({"target": target, "losses": losses} if self._last else {}))
        self._tied.end_batch()
        found: list[list[Tensor]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(found, [snapshot(value) for value in losses], group=self._group)
        return tuple(value for values in found for value in values)

    def _find_schedule(self, micro_batches: int, shape: torch.Size, loss: Loss) -> Any:
        """Return torch's schedule for a number of micro-batches, a shape of inputs and a loss; build it at first use.

        Each schedule has its own stages, because stages keep buffers for the micro-batches of one schedule, in the
        shapes of the first batch. gloo aborts a rank that receives larger tensors, and smaller tensors leave old rows
        in the buffers.
        """
        from torch.distributed import pipelining

        for known in self._schedules:
            if (known.micro_batches, known.shape, known.loss) == (micro_batches, shape, loss):
                return known.schedule
        device = next(self.module.parameters()).device
        stages = [
            pipelining.PipelineStage(part, number, self._total, device, group=self._group)
            for number, part in self._parts.items()
        ]
        try:
            schedule = self._schedule_class(stages[0] if len(stages) == 1 else stages, micro_batches, loss_fn=loss)
        except ValueError as error:  # most schedules need as many micro-batches as stages, or a multiple
            name = self._schedule_class.__name__
            found = f"{micro_batches} micro-batches for {self._total} stages of {name}"
            raise UsageError(f"got {found}: {error}") from error
        self._schedules.append(Schedule(micro_batches, shape, loss, schedule))
        return schedule

    def step(self) -> None:
        if self._clip is not None:
            self._norm = clip_over_stages(self._params, self._clip, self._tied, self._group)
        self._optimizer.step()
        self._lr_schedule.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def full_grads(self) -> dict[str, Tensor]:
        grads = {name: p.grad for name, p in self._params.items() if p.grad is not None}
        return self._merge(copy_full(grads, gather_full_tensors))

    def full_params(self) -> dict[str, Tensor]:
        return self._merge(copy_full(self._params, gather_full_tensors))

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = {name: self._optimizer.state.get(param, {}) for name, param in self._params.items()}
        return self._merge(copy_full_states(states, gather_full_tensors))

    def full_state_dict(self) -> dict[str, Tensor]:
        own = copy_full(self._named_tree.state_dict(), gather_full_tensors)
        return join_state_dicts(self.module, own, self._group)

    def grad_norm(self) -> float | None:
        return None if self._clip is None else self._norm

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        return self._layout

    def observe(self) -> Observations:
        return Observations(
            loss_scale=Absent("the schedules have no loss scale"),
            skipped_steps=Absent("this engine never skips a step"),
            learning_rates=tuple(float(group["lr"]) for group in self._optimizer.param_groups),
        )

    def save(self, path: Path) -> None:
        STAGES_FORMAT.save(path, EngineState(self._named_tree, self._optimizer, self._lr_schedule))

    def load(self, path: Path) -> None:
        STAGES_FORMAT.load(path, EngineState(self._named_tree, self._optimizer, self._lr_schedule))

    def close(self) -> None:
        self.zero_grad()
        vars(self).clear()

    def _merge(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of all stages in the order of the model's parameters. This is a collective.

        If several stages have a weight, a rank returns its own copy of it, so that the judge sees a copy that differs.
        """
        found: list[Mapping[str, Any]] = [{} for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(found, dict(own), group=self._group)
        return {name: part[name] for name in self._names for part in found if name in part} | dict(own)
