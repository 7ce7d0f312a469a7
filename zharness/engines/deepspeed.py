"""DeepSpeed's ZeRO stages 0 to 3 behind the Engine protocol, through DeepSpeed's documented verbs.

The deviations that DeepSpeed documents are reasons in ``capabilities_at``; what it does not document is claimed, so
that a check can show it. Nothing of DeepSpeed is imported before a factory or ``warm_up`` runs.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines import optimizers, warm
from zharness.engines.common import NO_STATE_LAWS, NOT_JOINED, snapshot
from zharness.engines.protocol import (
    Absent,
    AccumulationOwner,
    Capabilities,
    EngineConfig,
    Feature,
    Observations,
    Piece,
    Reduction,
)
from zharness.errors import ConfigError, EngineContractError, MissingEngine

# torch 2.13 renames the collectives that DeepSpeed calls, and says so once per call site and rank.
_RENAMED = r"`torch\.distributed\.\w+` is deprecated"

_COMMON: dict[Feature, str] = {
    Feature.CHECKPOINT: NO_STATE_LAWS,
    **NOT_JOINED,
}
# The reasons below are DeepSpeed's own: the RuntimeError that direct calls raise at stage 0 (engine.py,
# _backward_prologue) and the docstring of DeepSpeedEngine.no_sync.
_AT_STAGE: dict[int, dict[Feature, str]] = {
    0: {
        Feature.TENSOR_BACKWARD: "direct calls to tensor.backward() are not supported at ZeRO stage 0",
        Feature.SCALE_BACKWARD: "direct calls to tensor.backward() are not supported at ZeRO stage 0",
    },
    2: {Feature.NO_SYNC: "no_sync is incompatible with ZeRO stage 2/3, which rely on reduction for partitioning"},
    3: {Feature.NO_SYNC: "no_sync is incompatible with ZeRO stage 2/3, which rely on reduction for partitioning"},
}

CAPABILITIES = Capabilities(
    stages=frozenset({0, 1, 2, 3}),
    dtypes=frozenset({"fp32"}),
    refuses=_COMMON,
    own_kernels={3: "stage 3 replaces torch.nn.functional.linear by its own autograd function"},
)


def capabilities_at(stage: int) -> Capabilities:
    """What DeepSpeed claims at one stage: CAPABILITIES and the stage's own refusals."""
    return Capabilities(
        stages=CAPABILITIES.stages,
        dtypes=CAPABILITIES.dtypes,
        refuses={**_COMMON, **_AT_STAGE.get(stage, {})},
        own_kernels=CAPABILITIES.own_kernels,
    )


def factory(model: nn.Module, config: EngineConfig) -> DeepSpeedEngine:
    """A DeepSpeed engine over ``model``; collective. Raises ConfigError, MissingEngine."""
    if config.dtype not in CAPABILITIES.dtypes:
        raise ConfigError.unknown("dtype of the deepspeed engine", config.dtype, sorted(CAPABILITIES.dtypes))
    if config.stage not in CAPABILITIES.stages:
        raise ConfigError.unknown("stage of the deepspeed engine", config.stage, sorted(CAPABILITIES.stages))
    if config.reduction is Reduction.SUM and config.stage == 3:
        raise ConfigError("got reduction sum at stage 3; DeepSpeed reduces by sum at stages 0-2 only; use mean")
    return DeepSpeedEngine(model, config)


def json_config(config: EngineConfig) -> dict[str, Any]:
    """DeepSpeed's JSON for ``config``, with ``config.options`` merged in last and deep."""
    owned = config.accumulation_owner is AccumulationOwner.ENGINE
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps if owned else 1,
        # Written always: the default became 1.0 in 0.19.3, which silently clips.
        "gradient_clipping": 0.0 if config.clip is None else config.clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": config.stage},
    }
    if config.reduction is Reduction.SUM:
        base["gradient_allreduce_op"] = "sum"
    if config.stage == 3:
        # With the default of 100,000 elements every small model stays whole on every rank.
        base["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return _merged(base, config.options)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        nested = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(below, value) if nested else value  # type: ignore[arg-type]
    return result


class DeepSpeedEngine:
    """One deepspeed.initialize on this rank.

    The LR schedule is torch's LambdaLR handed to DeepSpeed, the optimizer torch.optim's (DeepSpeed's own "Adam" is
    AdamW with a decay of 0.01 under other names).
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.capabilities = capabilities_at(config.stage)
        self._config = config
        self._caller_owns = config.accumulation_owner is AccumulationOwner.CALLER and config.accumulation_steps > 1
        self._backwards = 0
        self._params: dict[str, nn.Parameter] = dict(model.named_parameters())
        device = next(iter(self._params.values())).device
        deepspeed = _prepare(device.type)
        trained = {name: param for name, param in self._params.items() if param.requires_grad}
        optimizer = optimizers.build(trained, config.optimizer)
        self._linear = _LinearPatch()
        self._engine: Any = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=optimizers.schedule(optimizer, config.optimizer),
            config=json_config(config),
        )[0]
        self.module: nn.Module = self._engine.module
        self._layout = self._find_layout()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._announce_boundary()
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._announce_boundary()
        self._engine.backward(loss, retain_graph=retain_graph)
        self._backwards += 1

    def scale(self, loss: Tensor) -> Tensor:
        self._announce_boundary()
        self._backwards += 1
        return cast(Tensor, self._engine.scale(loss))

    def step(self) -> None:
        if self._caller_owns and self._backwards == 0:
            raise EngineContractError(
                "got step() before any backward; with accumulation owned by the caller, spell it engine.backward(loss) "
                "or engine.scale(loss).backward(): a plain loss.backward() cannot be counted"
            )
        self._engine.step()
        if self._backwards >= self._config.accumulation_steps:
            self._backwards = 0

    def zero_grad(self) -> None:
        self._backwards = 0
        # Both: the optimizer's clears the accumulated partitions, the engine's the parameters' own gradients.
        self._engine.optimizer.zero_grad()
        self._engine.zero_grad()

    def no_sync(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self._engine.no_sync())

    def full_grads(self) -> dict[str, Tensor]:
        """The gradients that ``step`` is about to apply; where none were reduced, each rank's own."""
        found = {}
        for name, param in self._params.items():
            grad = self._full_grad(param) if param.requires_grad else None
            if grad is not None:
                found[name] = snapshot(grad)
        return found

    def full_params(self) -> dict[str, Tensor]:
        """The weights that the next forward uses (not the fp32 masters, which a broken copy-back would leave apart)."""
        with self._gathered():
            return {name: snapshot(param) for name, param in self._params.items()}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        if self._engine.global_steps == 0:
            return {}
        read = (self._whole_state, self._partitioned_state, self._partitioned_state, self._stage3_state)
        trained = {name: param for name, param in self._params.items() if param.requires_grad}
        return {name: read[self._config.stage](param) for name, param in trained.items()}

    def grad_norm(self) -> float | None:
        """DeepSpeed's get_global_grad_norm(); it computes none in fp32 at stage 0 (#7255)."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def layout(self) -> Mapping[str, tuple[Piece, ...]]:
        """Where DeepSpeed put the fp32 masters, as each rank reported it when the engine was built."""
        return self._layout

    def observe(self) -> Observations:
        scale = getattr(self._engine.optimizer, "loss_scale", None)
        return Observations(
            loss_scale=Absent("the fp32 optimizer of stage 0 has no loss scaler") if scale is None else float(scale),
            skipped_steps=int(self._engine.skipped_steps),
            learning_rates=tuple(float(rate) for rate in self._engine.get_lr()),
        )

    def save(self, path: Path) -> None:
        self._engine.save_checkpoint(str(path))

    def load(self, path: Path) -> None:
        self._engine.load_checkpoint(str(path))

    def close(self) -> None:
        self._engine.destroy()
        self._linear.undo()

    def _announce_boundary(self) -> None:
        """The documented style for a caller who owns the boundary: state it before each forward and backward."""
        if self._caller_owns:
            self._engine.set_gradient_accumulation_boundary(self._backwards + 1 >= self._config.accumulation_steps)

    def _full_grad(self, param: Any) -> Tensor | None:
        """safe_get_full_grad without its shortcut: it returns ``param.grad`` where one is set, and above stage 0 that
        is a gradient that was never reduced, while ``step`` applies the partitions.
        """
        from deepspeed.utils import safe_get_full_grad

        if not self._has_partitions():
            return cast("Tensor | None", param.grad)
        # Both ways run the same collective, so ranks that differ in having a param.grad do not wait for each other.
        if self._config.stage == 0 or param.grad is None:
            return cast("Tensor | None", safe_get_full_grad(param))
        if self._config.stage == 3:
            return cast(Tensor, param._z3_optimizer.get_fp32_grad_for_param(param))
        return cast(Tensor, param.get_full_hp_grad())

    def _has_partitions(self) -> bool:
        """Whether every group has reduced gradients. The same answer on all ranks: the groups are.

        Asked for first because a rank that owns a part of a parameter raises where a rank that owns none goes on into
        the collective, and waits.
        """
        if self._config.stage in (0, 3) or self._engine.zero_cpu_offload():
            return True
        held = self._engine.optimizer.averaged_gradients
        return all(held.get(index) is not None for index in range(len(self._engine.optimizer.bit16_groups)))

    def _whole_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        state = self._engine.optimizer.state.get(param, {})
        return {key: snapshot(value) for key, value in state.items() if isinstance(value, Tensor)}

    def _partitioned_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        # Not safe_get_full_optimizer_state: stages 1 and 2 link the states to the parameters when the first group has
        # stepped and never again, so it raises for the parameters of every other group.
        zero = self._engine.optimizer
        index = next(i for i, group in enumerate(zero.bit16_groups) if any(member is param for member in group))
        flat = zero.single_partition_of_fp32_groups[index]
        state = zero.optimizer.state[flat]
        found = {key: self._assembled(param, value) for key, value in state.items() if _shaped_like(value, flat)}
        return {**found, **_step_of(state)}

    def _assembled(self, param: Any, flat_state: Tensor) -> Tensor:
        """The original shape of one state of ``param``; every rank contributes the elements it owns."""
        whole = torch.zeros(param.numel(), dtype=flat_state.dtype, device=flat_state.device)
        mapping = param._hp_mapping
        if mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            whole[here.start : here.start + here.numel] = flat_state.narrow(0, there.start, there.numel)
        dist.all_reduce(whole)
        return snapshot(whole.reshape(param.shape))

    def _stage3_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        zero: Any = self._engine.optimizer
        group = zero.grad_position[zero.get_param_id(param)][0]
        flat = zero.fp32_partitioned_groups_flat[group]
        state = zero.optimizer.state[flat]
        keys = [key for key, value in state.items() if _shaped_like(value, flat)]
        return {**{key: snapshot(safe_get_full_optimizer_state(param, key)) for key in keys}, **_step_of(state)}

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        if self._config.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self._params.values()), modifier_rank=None):
            yield

    def _find_layout(self) -> dict[str, tuple[Piece, ...]]:
        if self._config.stage == 0:
            return {}
        mine = {name: _own_piece(param) for name, param in self._params.items() if param.requires_grad}
        ranks: list[dict[str, Piece | None]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        return {name: tuple(piece for rank in ranks if (piece := rank[name]) is not None) for name in mine}


def _own_piece(param: Any) -> Piece | None:
    """The part of ``param`` whose master lives here, from DeepSpeed's own records; None when there is none."""
    rank = dist.get_rank()
    if hasattr(param, "ds_tensor"):
        size = param.ds_tensor.ds_numel
        start, stop = min(rank * size, param.ds_numel), min((rank + 1) * size, param.ds_numel)
        return Piece(rank, start, stop) if stop > start else None
    mapping = getattr(param, "_hp_mapping", None)
    if mapping is None:
        return None
    at = mapping.lp_fragment_address
    return Piece(rank, at.start, at.start + at.numel) if at.numel else None


def _shaped_like(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _step_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {"step": snapshot(torch.as_tensor(state["step"]))} if "step" in state else {}


class _LinearPatch:
    """DeepSpeed's replacement of torch.nn.functional.linear, which outlives engine.destroy().

    Undone by the last engine that found torch's own function in place: an engine that was built under another one's
    patch leaves it to that one.
    """

    def __init__(self) -> None:
        self._before = torch.nn.functional.linear

    def undo(self) -> None:
        if self._before.__module__.partition(".")[0] != "deepspeed":
            torch.nn.functional.linear = self._before


def _prepare(device_type: str) -> Any:
    """The deepspeed module, with the process made ready for deepspeed.initialize on ``device_type``."""
    deepspeed = imported(device_type)
    local = os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
    # Read by DeepSpeed instead of the process group: the local rank by its argument check, the number of ranks on this
    # machine by its CPU accelerator. A rank is a process of its own, so nobody else sees them.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank() % int(local)))
    os.environ["LOCAL_SIZE"] = local
    name = deepspeed.accelerator.get_accelerator().device_name()
    if name != device_type:
        raise EngineContractError(
            f"DeepSpeed was imported for {name}, the model lives on {device_type}; set DS_ACCELERATOR={device_type}"
        )
    return deepspeed


def imported(device_type: str) -> Any:
    """The deepspeed module, without the build that ranks would race for. Raises MissingEngine."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # read at import; _prepare names a decision for another device
    try:
        import deepspeed

        # By name: the attribute deepspeed.comm.torch is torch itself.
        backend: Any = importlib.import_module("deepspeed.comm.torch")
    except ImportError as missing:
        raise MissingEngine(
            f"deepspeed does not import ({missing}); install it with: pip install 'zharness[deepspeed]'"
        ) from missing
    # init_distributed compiles a shared-memory all-reduce on first use: half a minute in which ranks race for one build
    # folder and a deadline takes it for a hang. Without it DeepSpeed uses torch.distributed, as on every other device.
    backend.build_shm_op = lambda: None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, message=_RENAMED)
    return deepspeed


def warm_up(device_type: str = "cpu") -> tuple[str, ...]:
    """Import in this process, which will fork the ranks, what DeepSpeed imports lazily; the names."""
    imported(device_type)
    return warm.import_what(partial(_throw_away, device_type))


def _throw_away(device_type: str) -> None:
    """One step of every stage on one rank; stage 3 first, because it imports most and no release here fails at it."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for stage in sorted(CAPABILITIES.stages, reverse=True):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(device_type)
            engine = factory(model, EngineConfig(stage=stage))
            engine.backward(engine(torch.ones(1, 2, device=device_type)).sum())
            engine.full_grads()
            engine.step()
            engine.full_params()
            engine.close()
        dist.destroy_process_group()
