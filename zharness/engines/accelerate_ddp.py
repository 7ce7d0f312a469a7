"""Adapt Hugging Face ``accelerate`` over DistributedDataParallel to the Engine protocol: stage 0.

The calls are those of its documentation: ``prepare``, ``accumulate`` around each micro-batch, ``backward``,
``clip_grad_norm_``, and ``step`` of the prepared optimizer and scheduler.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zharness.engines import ddp
from zharness.engines.launch_variables import launch_variables
from zharness.engines.protocol import AccumulationOwner, EngineConfig, EngineOption, Feature, Reduction
from zharness.engines.torch_engine import (
    AUTOCAST_OPTION,
    EngineAdapter,
    TorchEngine,
    do_nothing,
    identity,
    leaf_parameters,
    validate_config,
    without_refusal,
)
from zharness.errors import EngineContractError

if TYPE_CHECKING:
    from accelerate import Accelerator

DOCUMENTATION = "https://huggingface.co/docs/accelerate/package_reference/accelerator"
STEP_SCHEDULER = "step_scheduler_with_optimizer"
DIRECT_BACKWARD = (
    "accelerator.backward(loss) divides the loss by the number of micro-batches, and 'should be used in lieu of "
    f"loss.backward()' ({DOCUMENTATION})"
)
REFUSES: dict[Feature, str] = {
    **without_refusal(Feature.ENGINE_ACCUMULATION, ddp.REFUSES),
    Feature.AUTOCAST: f"its mixed_precision also converts the model's outputs to float32 ({DOCUMENTATION})",
    Feature.WINDOW_READ_OUT: "inside accumulate() gradients are each rank's own until the last backward of the window",
    Feature.TENSOR_BACKWARD_IN_WINDOW: DIRECT_BACKWARD,
    Feature.WORLD_RESHARD: "a process has only one PartialState, and this keeps the number of processes",
    Feature.WINDOW_WRITE_IN: "inside accumulate() gradients are each rank's own until the last backward of the window",
}
_STATIC_GRAPH = ddp.CAPABILITIES.engine_options["static_graph"]
VARIANTS: dict[str, EngineOption | dict[str, Any]] = {
    **ddp.VARIANTS,
    "static_graph": replace(
        _STATIC_GRAPH,
        refuses={
            **_STATIC_GRAPH.refuses,
            Feature.ENGINE_ACCUMULATION: (
                "accumulate() enters no_sync(), in which DDP with a static graph fails (pytorch/pytorch#143580)"
            ),
        },
    ),
    "schedule_for_each_rank": EngineOption(
        {STEP_SCHEDULER: True},
        changes_numbers="a step moves the learning-rate schedule once for each rank",
        laws=frozenset({"training.trajectory"}),
        laws_reason="it has an effect on learning-rate schedules alone",
    ),
}
CAPABILITIES = replace(
    ddp.CAPABILITIES,
    refuses=REFUSES,
    variants=VARIANTS,
    engine_windows=DIRECT_BACKWARD,
)
OPTIONS = {
    **{name: meaning for name, meaning in ddp.OPTIONS.items() if name not in AUTOCAST_OPTION},
    STEP_SCHEDULER: "a step moves the learning-rate schedule once for each rank; accelerate's default, not this one's",
}


def factory(model: nn.Module, config: EngineConfig) -> AccelerateEngine:
    """Prepare ``model`` with accelerate for DDP over the default process group. This is a collective.

    Raises ConfigError for an unsupported configuration, and EngineContractError if accelerate prepares something else.
    """
    validate_config(config, CAPABILITIES, OPTIONS)
    return AccelerateEngine(model, config)


class AccelerateEngine(TorchEngine):
    """An engine whose backward, step, clipping and checkpoints are those of an ``Accelerator``; see ``Engine``."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        adapter = EngineAdapter(
            forward=model.__call__,
            no_sync=self._leave_unreduced,
            params=leaf_parameters(model),
            full_tensors=identity,
            layout={},
            drop_gradients=do_nothing,
            release=self._release,
        )
        super().__init__(model, CAPABILITIES, config, adapter)
        self._accelerator = build_accelerator(config, next(model.parameters()).device)
        self._wrapped, self._prepared, self._prepared_schedule = self._accelerator.prepare(
            model, self._optimizer, self._schedule
        )
        require_ddp(self._accelerator, self._wrapped)
        summed = ddp.trainable_parameters(model) if config.reduction is Reduction.SUM else []
        self._hooks = [parameter.register_hook(ddp.multiply_by_world_size) for parameter in summed]  # type: ignore[no-untyped-call]
        self._zeroes_after_step = config.accumulation_owner is AccumulationOwner.ENGINE
        self._micro_batch = ExitStack()
        self._is_open = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._begin_micro_batch()
        with self._autocast():
            return self._wrapped(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._accelerator.backward(loss, retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        steps = self._accelerator.gradient_accumulation_steps
        return loss if steps == 1 else loss / steps

    def step(self) -> None:
        if self._accelerator.sync_gradients and self._clip is not None:
            norm = self._accelerator.clip_grad_norm_(self._adapter.params.values(), self._clip)
            self._last_grad_norm = float(norm)
        self._prepared.step()
        if self._accelerator.sync_gradients:
            self._prepared_schedule.step()
        if self._zeroes_after_step:
            self._prepared.zero_grad()
        self._end_micro_batch()

    def zero_grad(self) -> None:
        # Inside a window the prepared optimizer's zero_grad does nothing, and accelerate has no call that restarts a
        # window.
        if self._is_open and not self._accelerator.sync_gradients:
            self._accelerator.step = 1  # the next backward is the first one of the new window
        else:
            self._end_micro_batch()
            self._accelerator.step = 0
        self._optimizer.zero_grad(set_to_none=True)

    def save(self, path: Path) -> None:
        self._accelerator.save_state(str(path))
        self._accelerator.wait_for_everyone()  # rank 0 writes the weights for all

    def load(self, path: Path) -> None:
        self._accelerator.load_state(str(path))

    def _begin_micro_batch(self) -> None:
        """Enter ``accumulate``, unless a forward of this micro-batch has entered it."""
        if not self._is_open:
            self._micro_batch.enter_context(self._accelerator.accumulate(self._wrapped))
            self._is_open = True

    def _end_micro_batch(self) -> None:
        """Leave ``accumulate``."""
        self._micro_batch.close()
        self._is_open = False

    def _leave_unreduced(self) -> AbstractContextManager[Any]:
        """Return accelerate's context that leaves gradients unreduced, after entering the micro-batch's context."""
        self._begin_micro_batch()
        context: AbstractContextManager[Any] = self._accelerator.no_sync(self._wrapped)
        return context

    def _release(self) -> None:
        """Drop the Accelerator's references, and remove the hooks that turn DDP's mean into a sum."""
        ddp.remove_hooks(self._hooks)
        self._accelerator.free_memory()


def build_accelerator(config: EngineConfig, device: torch.device) -> Accelerator:
    """Return an Accelerator over the default process group, on the device of the model's parameters."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    ddp_options = {name: value for name, value in config.options.items() if name != STEP_SCHEDULER}
    owns = config.accumulation_owner is AccumulationOwner.ENGINE
    with launch_variables():
        return Accelerator(
            cpu=device.type == "cpu",
            gradient_accumulation_steps=config.accumulation_steps if owns else 1,
            step_scheduler_with_optimizer=bool(config.options.get(STEP_SCHEDULER, False)),
            kwargs_handlers=[DistributedDataParallelKwargs(**ddp_options)],
        )


def require_ddp(accelerator: Accelerator, wrapped: nn.Module) -> None:
    """Raise EngineContractError unless accelerate prepared DDP over all ranks; on a CPU it drops plugins silently."""
    if isinstance(wrapped, DistributedDataParallel) and accelerator.num_processes == dist.get_world_size():
        return
    raise EngineContractError(
        f"accelerate prepared a {type(wrapped).__name__} for {accelerator.num_processes} processes; expected "
        f"DistributedDataParallel for {dist.get_world_size()}"
    )
