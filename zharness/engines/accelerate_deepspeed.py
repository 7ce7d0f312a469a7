"""Adapt Hugging Face ``accelerate`` over DeepSpeed to the Engine protocol: it runs whole trainings.

``accelerator.backward`` of the last micro-batch of a window also makes the step and drops the gradients, so a caller
cannot read gradients between backward and step. The adapter therefore runs the loop of accelerate's documentation
itself, and records each step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zharness.device import compute_device_type
from zharness.engines import optimizers
from zharness.engines.deepspeed import json_config
from zharness.engines.deepspeed_build import require_sharding_optimizer
from zharness.engines.deepspeed_process import DeepSpeedGlobalState, import_deepspeed, prepare_deepspeed
from zharness.engines.deepspeed_round_robin import RoundRobinLinks
from zharness.engines.deepspeed_tensors import DeepSpeedTensorReader
from zharness.engines.launch_variables import launch_variables
from zharness.engines.protocol import (
    IGNORED,
    Absent,
    AccumulationOwner,
    CallForm,
    Capabilities,
    EngineConfig,
    Feature,
    Observations,
    TrainedStep,
)
from zharness.engines.torch_engine import snapshot, validate_config
from zharness.engines.without_forward import WholeTraining
from zharness.environment import restore_variables
from zharness.errors import EngineContractError

ItemLoss = Callable[[Any, Tensor, Tensor, int], Tensor]  # of output, target, items of the step, and terms of its mean
DOCUMENTATION = "https://huggingface.co/docs/accelerate/usage_guides/deepspeed"
USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
CAPABILITIES = Capabilities(
    stages=frozenset({1, 2, 3}),
    refuses=dict.fromkeys(
        (Feature.CHECKPOINT, Feature.UNIVERSAL_CHECKPOINT, Feature.LOSS_SCALER),
        f"the adapter runs one training in fp32, and saves nothing yet ({DOCUMENTATION})",
    ),
    form=CallForm.WHOLE_TRAINING,
    scaled_sum="its loop reduces by a mean",
)


def warm_up() -> None:
    """Import accelerate and DeepSpeed, which takes seconds."""
    import_deepspeed(compute_device_type())
    importlib.import_module("accelerate")


def factory(model: nn.Module, config: EngineConfig) -> AccelerateDeepSpeedEngine:
    """Return an engine that trains ``model`` over the default process group.

    Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, {})
    return AccelerateDeepSpeedEngine(model, config)


@dataclass(frozen=True)
class PreparedTraining:
    """The objects that ``accelerator.prepare`` returns: DeepSpeed's engine, optimizer, data loader and scheduler."""

    engine: Any
    optimizer: Any
    loader: Any
    scheduler: Any


class AccelerateDeepSpeedEngine(WholeTraining):
    """An engine whose batches, backward and steps are those of an Accelerator; see ``Engine`` and ``SupportsTrain``."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.module, self.capabilities, self._config = model, CAPABILITIES, config
        self._params = dict(model.named_parameters())
        self._optimizer = optimizers.build(self._params, config.optimizer)
        self._grads: dict[str, Tensor] = {}
        self._reader: DeepSpeedTensorReader | None = None
        self._open = ExitStack()

    def train(
        self, samples: Sequence[tuple[Tensor, Tensor]], loss: Callable[..., Tensor], counts_items: bool
    ) -> Sequence[TrainedStep]:
        """Train one epoch, and return the record of each step.

        Raises EngineContractError if accelerate prepared anything but DeepSpeed of this stage over all ranks.
        """
        self._open.enter_context(accelerate_state(next(self.module.parameters()).device.type))
        accelerator = build_accelerator(self._config)
        listed: Any = samples  # a sequence is a data set
        loader: Any = DataLoader(listed, batch_size=self._config.micro_batch_size)
        schedule = optimizers.schedule(self._optimizer, self._config.optimizer)
        engine, optimizer, dealt, scheduler = accelerator.prepare(self.module, self._optimizer, loader, schedule)
        self._open.callback(engine.destroy)
        require_deepspeed(accelerator, engine, self._config.stage)
        reader = DeepSpeedTensorReader(engine, self._params, self._config.stage, RoundRobinLinks(()), data_group=None)
        self._reader = reader
        hook = self._optimizer.register_step_pre_hook(lambda *_: self._grads.update(reader.step_gradients()))
        self._open.callback(hook.remove)
        prepared = PreparedTraining(engine, optimizer, dealt, scheduler)
        return list(self._run_epoch(accelerator, prepared, reader, adapt_loss(loss, counts_items)))

    def _run_epoch(
        self, accelerator: Any, prepared: PreparedTraining, reader: DeepSpeedTensorReader, loss: ItemLoss
    ) -> Iterator[TrainedStep]:
        """Yield the record of each step of an epoch; the loop is that of accelerate's guide to gradient accumulation.

        The guide calls ``step`` of the optimizer and the scheduler, and ``zero_grad``, after each backward. Under
        DeepSpeed these three calls do nothing, because backward has already done their work.
        """
        engine, dealt = prepared.engine, prepared.loader
        items = count_items([batch for _, batch in dealt], self._config.accumulation_steps)
        losses: list[Tensor] = []
        for number, (inputs, target) in enumerate(dealt):
            with accelerator.accumulate(engine):
                window = number // self._config.accumulation_steps
                # The engine averages over ranks and divides by the micro-batches of a full window.
                terms = accelerator.num_processes * accelerator.gradient_accumulation_steps
                part = loss(engine(inputs), target, items[window], terms)
                losses.append(part.detach())
                accelerator.backward(part)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self._params.values(), self._config.clip or 0.0)
                prepared.optimizer.step()
                prepared.scheduler.step()
                prepared.optimizer.zero_grad()
                if accelerator.sync_gradients:
                    mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
                    yield TrainedStep(float(mean), float(norm), self._grads, reader.weights())
                    self._grads, losses = {}, []

    def zero_grad(self) -> None:
        self._grads = {}

    def full_grads(self) -> dict[str, Tensor]:
        return dict(self._grads)

    def full_params(self) -> dict[str, Tensor]:
        if self._reader is not None:
            return self._reader.weights()
        return {name: snapshot(param) for name, param in self._params.items()}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        return {}  # the training has ended

    def observe(self) -> Observations:
        return Observations(
            loss_scale=Absent("the adapter trains in fp32"),
            skipped_steps=Absent("this engine never skips a step in fp32"),
            learning_rates=tuple(float(group["lr"]) for group in self._optimizer.param_groups),
        )

    def close(self) -> None:
        self._open.close()


@contextmanager
def accelerate_state(device_type: str) -> Iterator[None]:
    """Let accelerate know all ranks inside the block, and reset accelerate's process-wide state at its end.

    With a DeepSpeedPlugin on a CPU, ``Accelerator()`` counts one process on every rank (``zharness repro
    deepspeed-of-one-process``) unless a PartialState exists before.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    prepare_deepspeed(device_type)
    changed = DeepSpeedGlobalState(autocast=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    with restore_variables(USE_DEEPSPEED):
        try:
            with launch_variables():
                PartialState(cpu=device_type == "cpu")
            yield
        finally:
            changed.restore()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def build_accelerator(config: EngineConfig) -> Any:
    """Return an Accelerator with a DeepSpeedPlugin for ``config``."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    owned = replace(config, accumulation_owner=AccumulationOwner.ENGINE)
    with launch_variables():
        return Accelerator(
            gradient_accumulation_steps=config.accumulation_steps,
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=json_config(owned)),
        )


def require_deepspeed(accelerator: Any, engine: Any, stage: int) -> None:
    """Raise EngineContractError unless accelerate prepared DeepSpeed of ``stage`` over all ranks."""
    kind: Any = importlib.import_module("deepspeed").DeepSpeedEngine
    found = engine.zero_optimization_stage() if isinstance(engine, kind) else None
    if found != stage or accelerator.num_processes != dist.get_world_size():
        raise EngineContractError(
            f"accelerate prepared a {type(engine).__name__} of stage {found} for {accelerator.num_processes} "
            f"processes; expected DeepSpeed of stage {stage} for {dist.get_world_size()}"
        )
    require_sharding_optimizer(engine.optimizer, stage)


def count_items(targets: Sequence[Tensor], window: int) -> list[Tensor]:
    """Return, for each step, the number of target elements of all ranks that are not IGNORED. This is a collective."""
    counts = [
        torch.stack([(target != IGNORED).sum() for target in targets[start : start + window]]).sum()
        for start in range(0, len(targets), window)
    ]
    for count in counts:
        dist.all_reduce(count)
    return counts


def adapt_loss(loss: Callable[..., Tensor], counts_items: bool) -> ItemLoss:
    """Return a loss of output, target, items and terms; with ``counts_items`` the loss is multiplied by ``terms``."""

    def compute(output: Any, target: Tensor, items: Tensor, terms: int) -> Tensor:
        return terms * loss(output, target, items) if counts_items else loss(output, target)

    return compute
