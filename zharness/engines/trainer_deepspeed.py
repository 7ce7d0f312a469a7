"""Adapt ``transformers.Trainer`` over DeepSpeed to the Engine protocol: it runs whole trainings.

The gradients are read in a hook of the optimizer, because with DeepSpeed ``accelerator.backward`` also makes the step.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from zharness.device import compute_device_type
from zharness.engines import optimizers, trainer_ddp
from zharness.engines.accelerate_deepspeed import accelerate_state, build_accelerator, require_deepspeed
from zharness.engines.deepspeed import json_config
from zharness.engines.deepspeed_process import import_deepspeed
from zharness.engines.deepspeed_round_robin import RoundRobinLinks
from zharness.engines.deepspeed_tensors import DeepSpeedTensorReader
from zharness.engines.launch_variables import launch_variables
from zharness.engines.protocol import AccumulationOwner, EngineConfig, TrainedStep
from zharness.engines.torch_engine import validate_config

CAPABILITIES = replace(trainer_ddp.CAPABILITIES, stages=frozenset({1, 2, 3}))


def warm_up() -> None:
    """Import the Trainer and DeepSpeed, which takes seconds."""
    import_deepspeed(compute_device_type())
    trainer_ddp.warm_up()


def factory(model: nn.Module, config: EngineConfig) -> TrainerDeepSpeedEngine:
    """Return an engine that trains ``model`` with a Trainer over the default process group.

    Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, trainer_ddp.OPTIONS)
    return TrainerDeepSpeedEngine(model, config)


class TrainerDeepSpeedEngine(trainer_ddp.TrainerEngine):
    """An engine whose Trainer runs all batches and steps over ZeRO; see ``Engine`` and ``SupportsTrain``."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.capabilities = CAPABILITIES
        self._open = ExitStack()
        self._reader: DeepSpeedTensorReader | None = None

    def train(
        self, samples: Sequence[tuple[Tensor, Tensor]], loss: Callable[..., Tensor], counts_items: bool
    ) -> Sequence[TrainedStep]:
        """Train one epoch, and return the record of each step.

        Raises EngineContractError if the Trainer trained anything but DeepSpeed of this stage over all ranks.
        """
        device = next(self.module.parameters()).device
        self._open.enter_context(accelerate_state(device.type))
        let_accelerate_choose_deepspeed(self._config)
        folder = self._open.enter_context(tempfile.TemporaryDirectory())
        with launch_variables():
            arguments = trainer_ddp.build_arguments(
                self._config,
                folder,
                device,
                use_cpu=False,  # with it accelerate would drop DeepSpeed
                deepspeed=json_config(replace(self._config, accumulation_owner=AccumulationOwner.ENGINE)),
                accelerator_config={"use_configured_state": True},
            )
            trainer = build_trainer(self._optimizer, self._config)(
                model=trainer_ddp.LossModule(self.module, loss),
                args=arguments,
                train_dataset=[{"inputs": inputs, "labels": target} for inputs, target in samples],
                compute_loss_func=trainer_ddp.adapt_loss(loss) if counts_items else None,
            )
            recorder = build_recorder(trainer, self._params, self._optimizer, self._config.stage)
            trainer.add_callback(recorder)
            trainer.train()
        self._open.callback(trainer.model_wrapped.destroy)
        require_deepspeed(trainer.accelerator, trainer.model_wrapped, self._config.stage)
        self._reader = recorder.reader
        steps: Sequence[TrainedStep] = recorder.read_steps()
        return steps

    def full_params(self) -> dict[str, Tensor]:
        return super().full_params() if self._reader is None else self._reader.weights()

    def close(self) -> None:
        if vars(self):
            self._open.close()
        super().close()


def let_accelerate_choose_deepspeed(config: EngineConfig) -> None:
    """Set up the PartialState for DeepSpeed by building an Accelerator with a plugin, and drop this Accelerator."""
    build_accelerator(config)
    importlib.import_module("accelerate.state").AcceleratorState._reset_state()


def build_trainer(optimizer: Any, config: EngineConfig) -> Any:
    """Return a class of Trainers with ``optimizer`` and the schedule of ``config``.

    With DeepSpeed a Trainer drops the ``optimizers`` that its caller passes (``deepspeed_init``), so this class
    overrides the methods that make the optimizer and the schedule.
    """
    from transformers import PrinterCallback, Trainer

    own = optimizer

    class OptimizerTrainer(Trainer):
        """A Trainer with an optimizer of the caller."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.remove_callback(PrinterCallback)

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = self.optimizer or own
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = optimizers.schedule(own, config.optimizer)
            return self.lr_scheduler

    return OptimizerTrainer


def build_recorder(trainer: Any, params: Any, optimizer: Any, stage: int) -> Any:
    """Return a callback that records the gradients of each step in a hook of ``optimizer``, its weights and its log."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        """Records each step."""

        def __init__(self) -> None:
            self.grads: dict[str, Tensor] = {}
            self.steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
            self.logs: list[Any] = []

        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            self.reader = DeepSpeedTensorReader(
                trainer.deepspeed,
                params,
                stage,
                RoundRobinLinks(()),
                data_group=None,
            )
            self.hook = optimizer.register_step_pre_hook(lambda *_: self.grads.update(self.reader.step_gradients()))

        def on_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
            self.steps.append((dict(self.grads), self.reader.weights()))
            self.grads.clear()

        def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
            self.hook.remove()

        def on_log(self, *_args: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                self.logs.append(dict(kwargs["logs"]))

        def read_steps(self) -> list[TrainedStep]:
            return [
                TrainedStep(log["loss"], log["grad_norm"], grads, weights)
                for log, (grads, weights) in zip(self.logs, self.steps, strict=True)
            ]

    return Recorder()
