"""Implement the engine class that plain PyTorch, DDP, ZeroRedundancyOptimizer and FSDP2 share.

All of them leave the update to ``torch.optim`` and keep gradients in ``.grad`` of leaf parameters with the original
names. They differ in how the module is called, how gradient synchronization is disabled, how a full tensor is made from
a shard, and which rank owns which elements: the fields of ``EngineAdapter`` describe these differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.device import compute_device_type
from zharness.engines import optimizers
from zharness.engines.loss_scaling import BuildScaler, Progress, build_loss_scaler
from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Capabilities,
    EngineConfig,
    Feature,
    Observations,
    OptimizerSpec,
    Piece,
    Reduction,
    Resources,
)
from zharness.engines.torch_access import BY_STATE_DICT, TENSOR_ACCESS, TorchTensorAccess
from zharness.engines.torch_checkpoint import CheckpointFormat, EngineState
from zharness.errors import ConfigError, UnknownStage, UsageError

K = TypeVar("K")
FullTensors = Callable[[Sequence[Tensor]], Sequence[Tensor]]
STATE_LAWS_NOT_CLAIMED = "the laws on saved state do not cover this engine yet, so it does not claim the feature"
_CALLER_OWNS_SCALER = (
    "the loss scale belongs to the caller's torch.amp.GradScaler, which torch's engines do not see "
    "(https://docs.pytorch.org/docs/stable/notes/amp_examples.html)"
)
# Features that torch's own engines leave to the caller, or do not count.
TORCH_REFUSES: Mapping[Feature, str] = {
    Feature.REDUCED_WEIGHT_GRADIENTS: "the reduction is outside the autograd graph, so autograd.grad reduces nothing",
    Feature.CHECKSUMS: "torch.load and torch.distributed.checkpoint compare no checksums of what they read",
    Feature.UNIVERSAL_CHECKPOINT: "universal checkpoints have a format of DeepSpeed, which torch's engines do not read",
    Feature.LOSS_SCALER: _CALLER_OWNS_SCALER,
    Feature.AUTOCAST_SCALER: _CALLER_OWNS_SCALER,
    Feature.REDUCE_DTYPES: "torch's engines do not count the elements that they send",
    Feature.TRAFFIC: "torch's engines do not count the bytes that they send and gather",
    Feature.MASTERS: (
        "only DeepSpeed has configuration sections for the dtypes of masters, gradients and optimizer state; torch's "
        "engines keep the model's dtype (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)"
    ),
    **(
        {}
        if optimizers.MATRIX
        else {Feature.MUON: f"torch {torch.__version__} has no torch.optim.Muon; use torch 2.9 or newer"}
    ),
}


def without_refusal(feature: Feature, refuses: Mapping[Feature, str]) -> dict[Feature, str]:
    """Return ``refuses`` without ``feature``."""
    return {refused: reason for refused, reason in refuses.items() if refused is not feature}


def replicated_optimizer_states(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """Return an optimizer's state by parameter name, for engines where every rank has the state of every parameter."""
    # ``get``, because the optimizer's state is a defaultdict, where indexing would create an entry.
    return {name: optimizer.state.get(param, {}) for name, param in params.items()}


def absent_resources(_optimizer: torch.optim.Optimizer) -> Absent:
    """Return the reason why an engine does not count its memory."""
    return Absent("this engine does not count allocated bytes")


@dataclass(frozen=True)
class EngineAdapter:
    """The functions and values in which torch's engines differ.

    - ``full_tensors`` returns the full tensors of parameters, gradients or optimizer state. It may be collective.
    - ``drop_gradients`` drops gradients that are not in ``.grad``.
    - ``release`` undoes at ``close()`` the changes that building the engine made.
    - ``compute_dtype`` is the dtype in which the model computes, or None if that is the optimizer's dtype.
    - ``checkpoint_format`` saves and loads checkpoints; it is None if the engine does neither.
    - ``build_optimizer`` returns the optimizer.
    - ``build_scaler`` returns the GradScaler of a caller who trains in fp16.
    - ``optimizer_states`` returns the optimizer's state by parameter name. It may be collective.
    - ``measure_resources`` returns the number of allocated bytes.
    """

    forward: Callable[..., Any]
    no_sync: Callable[[], AbstractContextManager[Any]]
    params: Mapping[str, nn.Parameter]
    full_tensors: FullTensors
    layout: Mapping[str, tuple[Piece, ...]]
    drop_gradients: Callable[[], None]
    release: Callable[[], None]
    compute_dtype: torch.dtype | None = None
    checkpoint_format: CheckpointFormat | None = None
    build_optimizer: Callable[[Mapping[str, Tensor], OptimizerSpec], torch.optim.Optimizer] = optimizers.build
    build_scaler: BuildScaler = torch.amp.GradScaler
    optimizer_states: Callable[[torch.optim.Optimizer, Mapping[str, Tensor]], Mapping[str, Mapping[str, Any]]] = (
        replicated_optimizer_states
    )
    measure_resources: Callable[[torch.optim.Optimizer], Resources | Absent] = absent_resources


def do_nothing() -> None:
    """Do nothing, for adapters in which one of the functions has no work."""


def call_each(*actions: Callable[[], None]) -> None:
    """Call each of ``actions``, in order."""
    for action in actions:
        action()


def identity(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``tensors`` unchanged, as the ``full_tensors`` of an engine that shards nothing."""
    return tensors


def leaf_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by original name; a tied parameter appears once, under its first name."""
    return dict(module.named_parameters())


def validate_dtype(config: EngineConfig, capabilities: Capabilities) -> None:
    """Raise ConfigError for a dtype that ``capabilities`` does not claim."""
    if config.dtype not in capabilities.dtypes:
        raise ConfigError.unknown_name("dtype", config.dtype, sorted(capabilities.dtypes))


def validate_config(config: EngineConfig, capabilities: Capabilities, options: Mapping[str, str]) -> None:
    """Raise ConfigError for an unsupported dtype, accumulation owner or option, and UnknownStage for a stage.

    ``options`` maps each allowed option to its description.
    """
    validate_dtype(config, capabilities)
    if config.stage not in capabilities.stages:
        raise UnknownStage.unknown_name("stage", config.stage, sorted(capabilities.stages))
    reason = capabilities.refusal(Feature.ENGINE_ACCUMULATION)
    if config.accumulation_owner is AccumulationOwner.ENGINE and reason is not None:
        raise ConfigError(f"AccumulationOwner.ENGINE is not supported: {reason}; use AccumulationOwner.CALLER")
    for name in config.options:
        if name not in options:
            raise ConfigError.unknown_name("option", name, [f"{key} ({meaning})" for key, meaning in options.items()])


LOW_PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# By the name of a dtype: the dtype in which FSDP reduces, and the dtype to which FSDP casts weights for a forward.
REDUCE_DTYPES = {"fp32": torch.float32, **LOW_PRECISION_DTYPES}
PARAM_DTYPES = {"fp32": None, **LOW_PRECISION_DTYPES}
AUTOCAST_OPTION = {
    "torch_autocast": "{'enabled': true, 'dtype': 'bf16' or 'fp16'}: run every forward under torch.autocast"
}


def read_autocast_dtype(config: EngineConfig) -> torch.dtype | None:
    """Return the dtype of torch.autocast in forwards, or None if it is off.

    Raises ConfigError for an unknown key or dtype.
    """
    section = config.options.get("torch_autocast", {})
    for key in section:
        if key not in ("enabled", "dtype"):
            raise ConfigError.unknown_name("torch_autocast option", key, ["enabled", "dtype"])
    if not section.get("enabled"):
        return None
    dtype = section.get("dtype", "bf16")
    if dtype not in LOW_PRECISION_DTYPES:
        raise ConfigError.unknown_name("torch_autocast dtype", dtype, sorted(LOW_PRECISION_DTYPES))
    return LOW_PRECISION_DTYPES[dtype]


def snapshot(tensor: Tensor) -> Tensor:
    """Return a dense CPU copy that shares no memory with ``tensor``."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.detach().to("cpu", copy=True)


def copy_full(tensors: Mapping[K, Tensor], full_tensors: FullTensors) -> dict[K, Tensor]:
    """Return a CPU copy of the full tensor of each of ``tensors``. This is a collective if ``full_tensors`` is one."""
    full = full_tensors(list(tensors.values()))
    return {key: snapshot(tensor) for key, tensor in zip(tensors, full, strict=True)}


def copy_full_states(
    states: Mapping[str, Mapping[str, Any]], full_tensors: FullTensors
) -> dict[str, dict[str, Tensor]]:
    """Return CPU copies of the tensors of an optimizer's states by parameter name, as ``copy_full`` does."""
    tensors = {
        (name, key): value
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    full: dict[str, dict[str, Tensor]] = {name: {} for name, state in states.items() if state}
    for (name, key), value in copy_full(tensors, full_tensors).items():
        full[name][key] = value
    return full


def register_all_reduce_hooks(params: Iterable[nn.Parameter], reduction: Reduction) -> None:
    """All-reduce each gradient of ``params`` before autograd accumulates it, since FSDP skips ignored parameters.

    Integer parameters, such as quantised weights, never have a gradient.
    """

    def all_reduce_gradient(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total if reduction is Reduction.SUM else total / dist.get_world_size()

    for param in params:
        if not (param.is_floating_point() or param.is_complex()):
            continue
        frozen = not param.requires_grad
        param.requires_grad_()  # torch registers no hook on a frozen parameter, which may be unfrozen later
        param.register_hook(all_reduce_gradient)  # type: ignore[no-untyped-call]
        param.requires_grad_(not frozen)


class TorchEngine(TorchTensorAccess):
    """An engine that updates leaf parameters with ``torch.optim``; see ``zharness.engines.protocol.Engine``.

    ``_steps_per_window`` is the number of micro-batches per optimizer step (1 if the caller owns accumulation), and
    ``_micro_batches_counted`` the number of micro-batches since the last boundary or ``zero_grad``.
    """

    def __init__(
        self, module: nn.Module, capabilities: Capabilities, config: EngineConfig, adapter: EngineAdapter
    ) -> None:
        self.module = module
        self.capabilities = capabilities
        self._adapter = adapter
        # Autocast is on the compute device, not on the parameters' device, because offloaded shards are on the CPU.
        autocast_dtype = read_autocast_dtype(config)
        self._autocast: Callable[[], AbstractContextManager[Any]] = (
            partial(torch.autocast, compute_device_type(), autocast_dtype) if autocast_dtype else nullcontext
        )
        self._clip = config.clip
        self._reads_state_dicts = config.options.get(TENSOR_ACCESS) == BY_STATE_DICT
        self._optimizer = adapter.build_optimizer(adapter.params, config.optimizer)
        self._schedule = optimizers.schedule(self._optimizer, config.optimizer)
        self._scaler = build_loss_scaler(config, autocast_dtype, adapter.build_scaler)
        engine_owns = config.accumulation_owner is AccumulationOwner.ENGINE
        self._steps_per_window = config.accumulation_steps if engine_owns else 1
        self._micro_batches_counted = 0
        self._last_grad_norm: float | None = None
        self._never_trained = {name for name, param in adapter.params.items() if not param.requires_grad}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            return self._adapter.forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss if self._steps_per_window == 1 else loss / self._steps_per_window)

    def step(self) -> None:
        self._micro_batches_counted += 1
        if self._micro_batches_counted < self._steps_per_window:
            return
        if self._clip is not None:
            self._scaler.unscale_in_place(self._optimizer)
            self._last_grad_norm = self.clip_gradients(self._clip)
        if self._scaler.step(self._optimizer):
            self._schedule.step()
        self._never_trained -= {name for name, param in self._adapter.params.items() if param.requires_grad}
        self._micro_batches_counted = 0
        if self._steps_per_window > 1:
            # An engine that owns the boundary also begins the next window: its callers do not call zero_grad.
            self.zero_grad()

    def clip_gradients(self, limit: float) -> float:
        """Clip the gradients to the global norm ``limit``, and return the norm that they had."""
        norm = torch.nn.utils.clip_grad_norm_(self._adapter.params.values(), limit)
        return float(self._adapter.full_tensors([norm])[0])

    def zero_grad(self) -> None:
        # A new accumulation window begins. The earlier micro-batches no longer count, because their gradients are
        # dropped.
        self._micro_batches_counted = 0
        self._optimizer.zero_grad(set_to_none=True)
        self._adapter.drop_gradients()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._adapter.no_sync()

    def full_grads(self) -> dict[str, Tensor]:
        grads = {name: p.grad for name, p in self._adapter.params.items() if p.grad is not None}
        return {name: self._scaler.unscale(grad) for name, grad in self._full_copies(grads).items()}

    def full_params(self) -> dict[str, Tensor]:
        """Return trained parameters in the dtype in which the model computes, and never trained parameters as stored.

        FSDP stores all parameters unrounded and rounds them for every forward. In plain PyTorch a layer that is frozen
        from the start casts its unrounded weight itself, so its weight is returned unrounded. This is a collective if
        parameters are sharded.
        """
        params, dtype = self._adapter.params, self._adapter.compute_dtype
        return {
            name: weight.to(dtype)
            if dtype and (params[name].requires_grad or name not in self._never_trained)
            else weight
            for name, weight in self._full_masters().items()
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = self._adapter.optimizer_states(self._optimizer, self._adapter.params)
        return copy_full_states(states, self._adapter.full_tensors)

    def grad_norm(self) -> float | None:
        return self._last_grad_norm

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        return self._adapter.layout

    def observe(self) -> Observations:
        return Observations(
            loss_scale=self._scaler.read_scale(),
            skipped_steps=self._scaler.skipped_steps,
            learning_rates=tuple(float(group["lr"]) for group in self._optimizer.param_groups),
            masters=self._full_masters()
            if self._adapter.compute_dtype
            else Absent("the optimizer works on the parameters themselves"),
            resources=self._adapter.measure_resources(self._optimizer),
        )

    def save(self, path: Path) -> None:
        self._require_checkpoint_format(f"save to {path}").save(path, self._engine_state())

    def load(self, path: Path) -> None:
        self._require_checkpoint_format(f"load from {path}").load(path, self._engine_state())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the plain model's ``state_dict()`` on CPU, with one tensor for each tied parameter.

        This is a collective.
        """
        tied = {name: id(param) for name, param in self.module.named_parameters(remove_duplicate=False)}
        state = self.module.state_dict()
        keys = {name: tied.get(name, id(tensor)) for name, tensor in state.items()}
        copies = self._full_copies({keys[name]: tensor for name, tensor in state.items()})
        return {name: copies[key] for name, key in keys.items()}

    def _full_masters(self) -> dict[str, Tensor]:
        """Return full copies of the parameters that the optimizer updates. This is a collective if they are sharded."""
        return self._full_copies(self._adapter.params)

    def _engine_state(self) -> EngineState:
        """Return the objects that a checkpoint saves and loads."""
        return EngineState(self.module, self._optimizer, Progress(self._schedule, self._scaler))

    def _require_checkpoint_format(self, action: str) -> CheckpointFormat:
        """Return the checkpoint format. Raises UsageError with the refusal's reason if the engine has none."""
        if self._adapter.checkpoint_format is None:
            raise UsageError(f"{action}: {self.capabilities.refusal(Feature.CHECKPOINT)}")
        return self._adapter.checkpoint_format

    def close(self) -> None:
        """Free all memory; a second call does nothing, and any other use of the engine raises AttributeError."""
        attributes = vars(self)
        if attributes:
            self.zero_grad()
            self._adapter.release()
            attributes.clear()

    def _full_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of the full tensor on the CPU. This is a collective if ``tensor`` is sharded."""
        return self._full_copies({"": tensor})[""]

    def _full_copies(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return copies of the full tensors on the CPU. This is a collective if some are sharded."""
        return copy_full(tensors, self._adapter.full_tensors)
