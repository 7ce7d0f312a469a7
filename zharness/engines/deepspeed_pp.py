"""Adapt DeepSpeed's PipelineModule and DualPipeVModule to the Engine protocol, for engines that run whole batches.

DeepSpeed's ``train_batch`` also makes the step, so a caller can read no gradient before the step. The adapter therefore
runs the same instructions in two parts: ``train_batch`` runs all instructions of a schedule except the last one, and
``step`` runs the last instruction, the optimizer's step.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.device import compute_device_type
from zharness.engines import optimizers
from zharness.engines.deepspeed import json_config
from zharness.engines.deepspeed_capabilities import NO_IN_PLACE_EDITS
from zharness.engines.deepspeed_process import (
    DeepSpeedGlobalState,
    destroy_pipeline_groups,
    import_deepspeed,
    prepare_deepspeed,
)
from zharness.engines.deepspeed_round_robin import RoundRobinLinks
from zharness.engines.deepspeed_tensors import DeepSpeedTensorReader, gather_by_name, gather_pieces, own_pieces
from zharness.engines.options import merge_options
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
from zharness.engines.torch_engine import snapshot, validate_config
from zharness.engines.without_forward import WithoutForward, join_state_dicts
from zharness.errors import ConfigError, UsageError
from zharness.mesh import PIPELINE

DOCUMENTATION = "https://www.deepspeed.ai/tutorials/pipeline/"
SCHEDULE, ONE_FORWARD_ONE_BACKWARD, DUALPIPEV = "schedule", "1f1b", "dualpipev"
DYNAMIC_SHAPE = "dynamic_shape"
STAGES_OF_DUALPIPEV = 2  # of each rank
Loss = Callable[[Any, Any], Tensor]
_FORMATS = f"a checkpoint of a pipeline has a file for each layer, and no others ({DOCUMENTATION})"
CAPABILITIES = Capabilities(
    stages=frozenset({0, 1}),  # 'ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism' (pipe/engine.py)
    dtypes=frozenset({"fp32", "bf16"}),
    refuses={
        Feature.UNIVERSAL_CHECKPOINT: _FORMATS,
        Feature.MESH_RESHARD: "a checkpoint loads only at its own stage, world size and mesh; others need a universal "
        "checkpoint (https://www.deepspeed.ai/tutorials/universal-checkpointing/)",
        Feature.LOSS_SCALER: "the CPU accelerator refuses the fp16 section (engine.py, _do_sanity_check)",
        **dict.fromkeys((Feature.INITIAL_WEIGHTS, Feature.INITIAL_BUFFERS), "a stage has the values of its own ranks"),
        Feature.RANK_BUFFERS: "'data parallel rank 0 writes all layers' (pipe/module.py, save_state_dict)",
        Feature.BATCHES_PER_STEP: "each train_batch 'ends with an optimizer step' (pipe/schedule.py, TrainSchedule)",
        Feature.UNEQUAL_MICRO_BATCHES: "stages exchange shapes once without dynamic_shape, 'Allows dynamic shapes of "
        "inputs' (pipe/module.py); set the option dynamic_shape",
    },
    variants={
        DYNAMIC_SHAPE: EngineOption(
            {DYNAMIC_SHAPE: True},
            allows=frozenset({Feature.UNEQUAL_MICRO_BATCHES}),
            schedules=frozenset({ONE_FORWARD_ONE_BACKWARD}),  # DualPipeV 'does not support dynamic_shape'
        )
    },
    refuses_models={"tied_chain": "a TiedLayerSpec ties whole layers, and this model ties one weight of two layers"},
    schedules=frozenset({ONE_FORWARD_ONE_BACKWARD, DUALPIPEV}),
    stages_per_rank={DUALPIPEV: STAGES_OF_DUALPIPEV},
    micro_batches_per_rank={DUALPIPEV: STAGES_OF_DUALPIPEV},  # one for each stage
    mesh_axes=frozenset({PIPELINE}),
    form=CallForm.WHOLE_BATCH,
    gathers=WeightGathers.ONCE,  # after a step
    sharded_dtypes=frozenset({"bf16"}),  # the optimizer of bf16 shards its fp32 weights
)


def capabilities_at(stage: int) -> Capabilities:
    """Return the engine's claims at a stage. Stage 1 of ZeRO steps copies of the weights, and so undoes an edit."""
    if stage != 1:
        return CAPABILITIES
    return replace(CAPABILITIES, refuses={**CAPABILITIES.refuses, Feature.IN_PLACE_EDITS: NO_IN_PLACE_EDITS})


OPTIONS = {
    SCHEDULE: f"{ONE_FORWARD_ONE_BACKWARD} (default) or {DUALPIPEV}",
    DYNAMIC_SHAPE: f"true: {ONE_FORWARD_ONE_BACKWARD} sends the shapes of each micro-batch before it; default false",
}


def warm_up() -> None:
    """Import DeepSpeed, which takes seconds."""
    import_deepspeed(compute_device_type())
    importlib.import_module("deepspeed.runtime.pipe.engine")


def factory(model: nn.Module, config: EngineConfig) -> DeepSpeedPipelineEngine:
    """Build a PipelineModule of the modules that the plan of the config names, and its engine. This is a collective.

    Raises ConfigError for an unsupported configuration, and MissingEngine if DeepSpeed is not installed.
    """
    validate_config(config, CAPABILITIES, OPTIONS)
    if PIPELINE not in config.mesh.axes:
        raise ConfigError("got a mesh without the axis pp; expected one such as pp2")
    if config.options.get(SCHEDULE, ONE_FORWARD_ONE_BACKWARD) not in CAPABILITIES.schedules:
        raise ConfigError.unknown_name(SCHEDULE, config.options[SCHEDULE], sorted(CAPABILITIES.schedules))
    if not isinstance(dynamic := config.options.get(DYNAMIC_SHAPE, False), bool):
        raise ConfigError(f"got {DYNAMIC_SHAPE} {dynamic!r}; expected true or false")
    if dynamic and config.options.get(SCHEDULE) == DUALPIPEV:
        raise ConfigError(f"got {DYNAMIC_SHAPE} and {SCHEDULE} {DUALPIPEV}, which exchanges shapes once; leave out one")
    refuse_tied_weights(model, config.pp_plan)
    return DeepSpeedPipelineEngine(model, config)


class Layer(nn.Module):
    """A module of a plan, called with the tensor or the tuple that DeepSpeed passes from layer to layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: Any) -> Any:
        return self.module(*values) if isinstance(values, tuple) else self.module(values)


def refuse_tied_weights(model: nn.Module, plan: Sequence[str]) -> None:
    """Raise ConfigError if two different modules of ``plan`` have a weight in common."""
    owners: dict[int, str] = {}
    for module in plan:
        for name, param in model.get_submodule(module).named_parameters():
            if owners.setdefault(id(param), module) != module:
                raise ConfigError(
                    f"the weight {module}.{name} is tied to one of {owners[id(param)]}; DeepSpeed ties whole layers"
                )


def build_layers(deepspeed: Any, model: nn.Module, plan: Sequence[str]) -> Iterator[Any]:
    """Yield a layer for each module of ``plan``; a module that the plan names several times is a tied layer."""
    uses = Counter(plan)
    for name in plan:
        module = model.get_submodule(name)
        if uses[name] == 1:
            yield Layer(module)
        else:
            weights = [f"module.{weight}" for weight, _ in module.named_parameters()]
            key = name.replace(".", "_")  # DeepSpeed's key of a ModuleDict, which may have no dots
            yield deepspeed.pipe.TiedLayerSpec(key, Layer, module, tied_weight_attr=weights)


@dataclass(frozen=True)
class WithoutStep:
    """A schedule of DeepSpeed without its last instruction, ``step_instruction``, which makes the optimizer's step."""

    schedule: Any
    step_instruction: type

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches whose activations a rank holds at one time."""
        return int(self.schedule.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[Any]]:
        for commands in self.schedule:
            yield [command for command in commands if not isinstance(command, self.step_instruction)]


def split_off_step(engine_class: Any) -> Any:
    """Return a subclass of a pipeline engine of DeepSpeed whose ``train_batch`` ends before the optimizer's step."""
    step_instruction = importlib.import_module("deepspeed.runtime.pipe.schedule").OptimizerStep

    class SplitEngine(engine_class):  # type: ignore[misc]
        def _train_schedule(self) -> WithoutStep:
            return WithoutStep(super()._train_schedule(), step_instruction)

        def make_step(self) -> None:
            """Run the instruction that ``train_batch`` leaves out."""
            self._exec_optimizer_step()

    return SplitEngine


def initialize(deepspeed: Any, module: Any, optimizer: Any, schedule: Any, ds_config: dict[str, Any]) -> Any:
    """Build the engine that ``deepspeed.initialize`` builds around a PipelineModule, with the step split off."""
    pipe: Any = importlib.import_module("deepspeed.runtime.pipe.engine")
    engine_class = pipe.PipelineEngine
    if type(module).__name__ == "DualPipeVModule":
        engine_class = importlib.import_module("deepspeed.runtime.pipe.dualpipev").DualPipeVEngine
    topology = module.mpu()
    return split_off_step(engine_class)(
        args=None,
        model=module,
        optimizer=optimizer,
        model_parameters=None,
        training_data=None,
        lr_scheduler=schedule,
        mpu=topology,
        dist_init_required=False,
        collate_fn=None,
        config=ds_config,
        config_class=deepspeed.DeepSpeedConfig(ds_config, topology),
    )


@dataclass(frozen=True)
class StageTensorReader(DeepSpeedTensorReader):
    """Reads the tensors of all stages. Every method is a collective.

    ``names`` are the names of all parameters of the model, in its order, and ``pipe_group`` has the ranks of one
    pipeline. A rank returns its own copy of a weight that several stages have.
    """

    names: tuple[str, ...]
    pipe_group: Any

    def grads(self) -> dict[str, Tensor]:
        """Return the full gradients by name."""
        return self._merge(super().grads())

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by name."""
        return self._merge(super().weights())

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the full optimizer state by parameter name and key."""
        return self._merge({name: state for name, state in super().optimizer_state().items() if state})

    def layout(self) -> dict[str, tuple[Piece, ...]]:
        """Return which pieces of each parameter each rank owns: the parameters of its stage, which ZeRO stage 1 shards.

        In bf16 the optimizer of a pipeline shards its fp32 weights at ZeRO stage 0, too.
        """
        are_sharded = self.stage > 0 or self._is_bf16_optimizer
        return gather_pieces(own_pieces(self.params, are_sharded=are_sharded), self.names)

    def _merge(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of all stages in the order of the model's parameters."""
        return gather_by_name(own, self.names, self.pipe_group)


class DeepSpeedPipelineEngine(WithoutForward):
    """An engine whose schedule runs all forwards and backwards of a step; see ``Engine`` and ``SupportsTrainBatch``."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.module, self.capabilities = model, capabilities_at(config.stage)
        self._is_dual = config.options.get(SCHEDULE) == DUALPIPEV
        self._has_dynamic_shape = config.options.get(DYNAMIC_SHAPE, False)
        self._fewest_micro_batches = STAGES_OF_DUALPIPEV * config.mesh.size(PIPELINE) if self._is_dual else 1
        named = dict(model.named_parameters())
        deepspeed = prepare_deepspeed(next(iter(named.values())).device.type)
        self._global_state = DeepSpeedGlobalState(autocast=False)
        self._loss: Loss | None = None
        self._losses: list[Tensor] = []
        self._shape = torch.Size()  # the shape of the previous batch's inputs
        with ExitStack() as undo:
            undo.callback(self._global_state.restore)
            module = self._build_module(deepspeed, config)
            undo.callback(destroy_pipeline_groups, module)
            self._engine = self._build(deepspeed, module, named, config)
            self._global_state.grid = self._engine.grid
            undo.pop_all()
        self._data_parallel = dist.get_world_size() // config.mesh.size(PIPELINE)
        self._micro_batch_size = config.micro_batch_size
        self._group = self._engine.grid.get_pipe_parallel_group()
        mine = {id(param) for param in self._engine.module.parameters()}
        params = {name: param for name, param in named.items() if id(param) in mine}
        self._reader = StageTensorReader(
            self._engine,
            params,
            config.stage,
            RoundRobinLinks(()),
            self._engine.grid.get_data_parallel_group(),
            tuple(named),
            self._group,
        )
        self._layout = self._reader.layout()

    def _build_module(self, deepspeed: Any, config: EngineConfig) -> Any:
        """Return a PipelineModule of the layers of this rank."""
        deepspeed.init_distributed()
        module_class = deepspeed.pipe.DualPipeVModule if self._is_dual else deepspeed.pipe.PipelineModule
        with redirect_stdout(StringIO()):  # PipelineModule prints its stages
            return module_class(
                list(build_layers(deepspeed, self.module, config.pp_plan)),
                num_stages=config.mesh.size(PIPELINE),
                loss_fn=self._compute_loss,
                partition_method="uniform",
                dynamic_shape=self._has_dynamic_shape,
            )

    def _build(self, deepspeed: Any, module: Any, named: Mapping[str, nn.Parameter], config: EngineConfig) -> Any:
        """Return DeepSpeed's engine around the layers of this rank."""
        mine = {id(param) for param in module.parameters()}
        optimizer = optimizers.build({name: p for name, p in named.items() if id(p) in mine}, config.optimizer)
        ds_config = json_config(replace(config, options={}))
        # DualPipeV refuses a smaller number; train_batch sets the number for each batch.
        ds_config["gradient_accumulation_steps"] = 2 * config.mesh.size(PIPELINE)
        return initialize(
            deepspeed, module, optimizer, optimizers.schedule(optimizer, config.optimizer), merge_options(ds_config, {})
        )

    def _compute_loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a micro-batch, computed by the function that ``train_batch`` got."""
        assert self._loss is not None
        value = self._loss(output, target)
        self._losses.append(snapshot(value))
        return value

    def train_batch(self, micro_batches: Sequence[tuple[Tensor, Tensor]], loss: Loss) -> tuple[Tensor, ...]:
        """Run forward and backward of all micro-batches, and return their losses on every rank.

        Raises UsageError for fewer micro-batches than the schedule needs, and for several sizes of them without
        dynamic shapes.
        """
        if len(micro_batches) < self._fewest_micro_batches:
            raise UsageError(
                f"got {len(micro_batches)} micro-batches; the schedule needs {self._fewest_micro_batches} or more"
            )
        sizes = [len(inputs) for inputs, _ in micro_batches]
        if len(set(sizes)) != 1 and not self._has_dynamic_shape:
            raise UsageError(f"got micro-batches of {sizes} samples; expected as many each, or {DYNAMIC_SHAPE}")
        shape = micro_batches[0][0].shape
        if shape != self._shape and not self._has_dynamic_shape:
            self._engine.reset_activation_shape()
        self._shape = shape
        self._loss, self._losses = loss, []
        self._engine.set_train_batch_size(self._micro_batch_size * len(micro_batches) * self._data_parallel)
        self._engine.train_batch(iter(micro_batches))
        found: list[list[Tensor]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(found, self._losses, group=self._group)
        return tuple(value for values in found for value in values)

    def step(self) -> None:
        self._engine.make_step()

    def zero_grad(self) -> None:
        self._engine.optimizer.zero_grad()
        self._engine.zero_grad()

    def full_grads(self) -> dict[str, Tensor]:
        return self._reader.grads()

    def full_params(self) -> dict[str, Tensor]:
        return self._reader.weights()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return self._reader.optimizer_state()

    def full_state_dict(self) -> dict[str, Tensor]:
        own = {id(buffer) for buffer in self._engine.module.buffers()}
        buffers = {name: snapshot(buffer) for name, buffer in self.module.named_buffers() if id(buffer) in own}
        return join_state_dicts(self.module, {**self._reader.weights(), **buffers}, self._group)

    def grad_norm(self) -> float | None:
        """Return DeepSpeed's get_global_grad_norm(), which is None in fp32 at stage 0 (deepspeedai/DeepSpeed#7255)."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        return self._layout

    def observe(self) -> Observations:
        return Observations(
            loss_scale=Absent("the engine has no loss scale in fp32"),
            skipped_steps=int(self._engine.skipped_steps),
            learning_rates=tuple(float(rate) for rate in self._engine.get_lr()),
        )

    def save(self, path: Path) -> None:
        self._engine.save_checkpoint(str(path))

    def load(self, path: Path) -> None:
        loaded_path, _ = self._engine.load_checkpoint(str(path))
        if loaded_path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint in {path} for this stage and world size")

    def close(self) -> None:
        with ExitStack() as undo:
            undo.callback(self._global_state.restore)
            undo.callback(destroy_pipeline_groups, self._engine.module)
            self._engine.destroy()
