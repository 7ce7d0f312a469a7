"""The one engine class behind torch's own engines; an adapter hands it the parts in which it differs.

[Note: what does not differ]
Plain, DDP and FSDP2 all leave the update to ``torch.optim``, and keep gradients in ``.grad`` of leaf parameters that
carry the original names. What differs is how the module is called, how synchronisation is put off, how a whole tensor
is had from a shard, and who owns what: that is ``Parts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import optimizers
from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Capabilities,
    EngineConfig,
    Feature,
    Observations,
    OptimizerSpec,
    Piece,
    Resources,
)
from zharness.engines.torch_checkpoint import CheckpointFormat, EngineState
from zharness.errors import ConfigError, UsageError

STATE_LAWS_NOT_CLAIMED = "not held to the state laws yet, so no claim is made"
_CALLER_OWNS_SCALER = (
    "the loss scale belongs to the caller's torch.amp.GradScaler, of which torch's engines know nothing "
    "(https://docs.pytorch.org/docs/stable/notes/amp_examples.html)"
)
# What torch's own engines leave to their caller, or do not count.
TORCH_REFUSES: Mapping[Feature, str] = {
    Feature.REDUCED_WEIGHT_GRADIENTS: "what reduces is no part of autograd's graph, so autograd.grad reduces nothing",
    Feature.UNIVERSAL_CHECKPOINT: "it is DeepSpeed's own format, of which torch's engines know nothing",
    Feature.LOSS_SCALER: _CALLER_OWNS_SCALER,
    Feature.AUTOCAST_SCALER: _CALLER_OWNS_SCALER,
    Feature.WIRES: "torch's engines do not count what they send, by dtype or otherwise",
    Feature.TRAFFIC: "torch's engines do not count what they send and gather",
    Feature.MASTERS: (
        "the sections that choose dtypes of masters, gradients and optimizer state are DeepSpeed's; torch's engines "
        "keep them in the model's own (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)"
    ),
}


def replicated_optimizer_states(
    optimizer: torch.optim.Optimizer, params: Mapping[str, Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """State by parameter, of an optimizer that keeps that of every parameter on every rank."""
    # Read with ``get``: the optimizer's own table is a defaultdict, where a look-up would create an entry.
    return {name: optimizer.state.get(param, {}) for name, param in params.items()}


def absent_resources(_optimizer: torch.optim.Optimizer) -> Absent:
    """The resources of an engine that counts none."""
    return Absent("torch's engines do not count them")


@dataclass(frozen=True)
class EngineAdapter:
    """Where one engine differs from the others.

    ``whole`` turns a parameter, a gradient or an optimizer state into the tensor of the original's shape; it may be
    collective. ``forget`` drops gradients that live elsewhere than in ``.grad``; ``release`` undoes at ``close``.
    ``computed`` is the dtype that weights are rounded to where the model computes with another than the optimizer.
    ``build`` makes the optimizer, and ``states`` is its state by parameter, which may be collective. ``resources``
    are the bytes held. Without ``saving`` there is no save and no load.
    """

    forward: Callable[..., Any]
    no_sync: Callable[[], AbstractContextManager[Any]]
    params: Mapping[str, nn.Parameter]
    full_tensor: Callable[[Tensor], Tensor]
    layout: Mapping[str, tuple[Piece, ...]]
    drop_gradients: Callable[[], None]
    release: Callable[[], None]
    compute_dtype: torch.dtype | None = None
    checkpoint_format: CheckpointFormat | None = None
    build_optimizer: Callable[[Mapping[str, Tensor], OptimizerSpec], torch.optim.Optimizer] = optimizers.build
    optimizer_states: Callable[[torch.optim.Optimizer, Mapping[str, Tensor]], Mapping[str, Mapping[str, Any]]] = (
        replicated_optimizer_states
    )
    measure_resources: Callable[[torch.optim.Optimizer], Resources | Absent] = absent_resources


def do_nothing() -> None:
    """A part that has nothing to do."""


def identity(tensor: Tensor) -> Tensor:
    """``whole`` of an engine that shards nothing."""
    return tensor


def leaf_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under its original name; a tied one once, under its first name."""
    return dict(module.named_parameters())


def validate_dtype(config: EngineConfig, capabilities: Capabilities) -> None:
    """Raises ConfigError for a dtype that ``capabilities`` does not claim."""
    if config.dtype not in capabilities.dtypes:
        raise ConfigError.unknown_name("dtype", config.dtype, sorted(capabilities.dtypes))


def validate_config(config: EngineConfig, capabilities: Capabilities, options: Mapping[str, str]) -> None:
    """Raises ConfigError for a stage, dtype, accumulation owner or option (name to meaning) that is not honoured."""
    validate_dtype(config, capabilities)
    if config.stage not in capabilities.stages:
        raise ConfigError.unknown_name("stage", config.stage, sorted(capabilities.stages))
    reason = capabilities.refusal(Feature.ENGINE_ACCUMULATION)
    if config.accumulation_owner is AccumulationOwner.ENGINE and reason is not None:
        raise ConfigError(f"accumulation owned by the engine: {reason}; let the caller own it")
    for name in config.options:
        if name not in options:
            raise ConfigError.unknown_name("option", name, [f"{key} ({meaning})" for key, meaning in options.items()])


LOW_PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST_OPTION = {"torch_autocast": "{'enabled': true, 'dtype': 'bf16' or 'fp16'}: every forward under torch.autocast"}


def autocast_factory(config: EngineConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What forwards run in: torch.autocast where the option asks for it. Raises ConfigError for an unknown setting."""
    section = config.options.get("torch_autocast", {})
    for key in section:
        if key not in ("enabled", "dtype"):
            raise ConfigError.unknown_name("torch_autocast option", key, ["enabled", "dtype"])
    if not section.get("enabled"):
        return nullcontext
    dtype = section.get("dtype", "bf16")
    if dtype not in LOW_PRECISION_DTYPES:
        raise ConfigError.unknown_name("torch_autocast dtype", dtype, sorted(LOW_PRECISION_DTYPES))
    return partial(torch.autocast, device.type, LOW_PRECISION_DTYPES[dtype])


def snapshot(tensor: Tensor) -> Tensor:
    """A dense CPU copy that shares nothing with the engine."""
    whole = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return whole.detach().to("cpu", copy=True)


class TorchEngine:
    """An engine whose update is ``torch.optim``'s over leaf parameters; see ``zharness.engines.protocol.Engine``.

    State: ``_window`` micro-batches make a step (1 where the caller owns accumulation), ``_seen`` of them have been
    counted since the last boundary or ``zero_grad``, and ``_norm`` is what the last clipping step computed.
    """

    def __init__(
        self, module: nn.Module, capabilities: Capabilities, config: EngineConfig, adapter: EngineAdapter
    ) -> None:
        self.module = module
        self.capabilities = capabilities
        self._adapter = adapter
        self._autocast = autocast_factory(config, next(iter(adapter.params.values())).device)
        self._clip = config.clip
        self._optimizer = adapter.build_optimizer(adapter.params, config.optimizer)
        self._schedule = optimizers.schedule(self._optimizer, config.optimizer)
        owned = config.accumulation_owner is AccumulationOwner.ENGINE
        self._steps_per_window = config.accumulation_steps if owned else 1
        self._micro_batches_counted = 0
        self._last_grad_norm: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            return self._adapter.forward(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self._steps_per_window == 1 else loss / self._steps_per_window

    def step(self) -> None:
        self._micro_batches_counted += 1
        if self._micro_batches_counted < self._steps_per_window:
            return
        if self._clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._adapter.params.values(), self._clip)
            self._last_grad_norm = float(self._adapter.full_tensor(norm))
        self._optimizer.step()
        self._schedule.step()
        self._micro_batches_counted = 0
        if self._steps_per_window > 1:
            # The owner of the boundary begins the next window: callers of such engines do not call zero_grad.
            self.zero_grad()

    def zero_grad(self) -> None:
        # The window begins anew: its micro-batches are forgotten with their gradients.
        self._micro_batches_counted = 0
        self._optimizer.zero_grad(set_to_none=True)
        self._adapter.drop_gradients()

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._adapter.no_sync()

    def full_grads(self) -> dict[str, Tensor]:
        return {name: self._full_copy(p.grad) for name, p in self._adapter.params.items() if p.grad is not None}

    def full_params(self) -> dict[str, Tensor]:
        return {
            name: weight.to(self._adapter.compute_dtype or weight.dtype)
            for name, weight in self._full_masters().items()
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = self._adapter.optimizer_states(self._optimizer, self._adapter.params)
        return {
            name: {key: self._full_copy(value) for key, value in state.items() if isinstance(value, Tensor)}
            for name, state in states.items()
            if state
        }

    def grad_norm(self) -> float | None:
        return self._last_grad_norm

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        return self._adapter.layout

    def observe(self) -> Observations:
        return Observations(
            loss_scale=Absent("the loss scale belongs to the caller's torch.amp.GradScaler"),
            skipped_steps=Absent("never skips a step"),
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
        """``state_dict()`` of the plain model: on CPU, tied weights one tensor. Collective."""
        tied = {name: id(param) for name, param in self.module.named_parameters(remove_duplicate=False)}
        known: dict[int, Tensor] = {}
        found = {}
        for name, tensor in self.module.state_dict().items():
            key = tied.get(name, id(tensor))
            if key not in known:
                known[key] = self._full_copy(tensor)
            found[name] = known[key]
        return found

    def _full_masters(self) -> dict[str, Tensor]:
        return {name: self._full_copy(param) for name, param in self._adapter.params.items()}

    def _engine_state(self) -> EngineState:
        return EngineState(self.module, self._optimizer, self._schedule)

    def _require_checkpoint_format(self, action: str) -> CheckpointFormat:
        if self._adapter.checkpoint_format is None:
            raise UsageError(f"{action}: {self.capabilities.refusal(Feature.CHECKPOINT)}")
        return self._adapter.checkpoint_format

    def close(self) -> None:
        """Release everything; a second call does nothing, any other use fails on a missing attribute."""
        held = vars(self)
        if held:
            self.zero_grad()
            self._adapter.release()
            held.clear()

    def _full_copy(self, tensor: Tensor) -> Tensor:
        return snapshot(self._adapter.full_tensor(tensor.detach()))
