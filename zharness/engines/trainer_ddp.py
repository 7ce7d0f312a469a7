"""Adapt ``transformers.Trainer`` over DistributedDataParallel to the Engine protocol: it runs whole trainings.

The Trainer runs its own loop: it deals the samples to the ranks, accumulates, normalizes losses, clips and steps. A
callback records each step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import optimizers
from zharness.engines.accelerate_ddp import require_ddp
from zharness.engines.launch_variables import launch_variables
from zharness.engines.protocol import (
    Absent,
    CallForm,
    Capabilities,
    EngineConfig,
    Feature,
    Observations,
    TrainedStep,
)
from zharness.engines.torch_engine import leaf_parameters, snapshot, validate_config
from zharness.engines.without_forward import WholeTraining

DOCUMENTATION = "https://huggingface.co/docs/transformers/main_classes/trainer"
AVERAGE_TOKENS = "average_tokens_across_devices"
INNER = "inner"
CAPABILITIES = Capabilities(
    stages=frozenset({0}),
    refuses=dict.fromkeys(
        (Feature.CHECKPOINT, Feature.UNIVERSAL_CHECKPOINT, Feature.LOSS_SCALER),
        f"its loop saves and loads checkpoints itself, and the adapter does not ask for them yet ({DOCUMENTATION})",
    ),
    form=CallForm.WHOLE_TRAINING,
    scaled_sum="its loop reduces by a mean",
)
OPTIONS = {AVERAGE_TOKENS: "false: each rank divides by the number of its own items"}


def warm_up() -> None:
    """Import the Trainer, which takes seconds."""
    from transformers import Trainer

    assert Trainer is not None


def factory(model: nn.Module, config: EngineConfig) -> TrainerEngine:
    """Return an engine that trains ``model`` with a Trainer over the default process group.

    Raises ConfigError for an unsupported configuration.
    """
    validate_config(config, CAPABILITIES, OPTIONS)
    return TrainerEngine(model, config)


class LossModule(nn.Module):
    """A model with its loss, in the form that a Trainer calls: with ``labels``, the output has the entry ``loss``."""

    def __init__(self, inner: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self._loss = loss

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        output = self.inner(inputs)
        return output if labels is None else {"loss": self._loss(output, labels)}


class TrainerEngine(WholeTraining):
    """An engine whose Trainer runs all batches and steps; see ``Engine`` and ``SupportsTrain``."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.module, self.capabilities, self._config = model, CAPABILITIES, config
        self._params = leaf_parameters(model)
        self._optimizer = optimizers.build(self._params, config.optimizer)
        self._schedule = optimizers.schedule(self._optimizer, config.optimizer)

    def train(
        self, samples: Sequence[tuple[Tensor, Tensor]], loss: Callable[..., Tensor], counts_items: bool
    ) -> Sequence[TrainedStep]:
        """Train one epoch with a new Trainer, and return the record of each step.

        Raises EngineContractError if the Trainer trained anything but DDP over all ranks.
        """
        from transformers import PrinterCallback, Trainer

        recorder = build_recorder(self._params)
        with tempfile.TemporaryDirectory() as folder, launch_variables():
            trainer = Trainer(
                model=LossModule(self.module, loss),
                args=build_arguments(self._config, folder, next(self.module.parameters()).device),
                train_dataset=[{"inputs": inputs, "labels": target} for inputs, target in samples],
                optimizers=(self._optimizer, self._schedule),
                compute_loss_func=adapt_loss(loss) if counts_items else None,
                callbacks=[recorder],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            require_ddp(trainer.accelerator, trainer.model_wrapped)
        steps: Sequence[TrainedStep] = recorder.read_steps()
        return steps

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def full_grads(self) -> dict[str, Tensor]:
        return {name: snapshot(p.grad) for name, p in self._params.items() if p.grad is not None}

    def full_params(self) -> dict[str, Tensor]:
        return {name: snapshot(param) for name, param in self._params.items()}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        states = {name: self._optimizer.state.get(param, {}) for name, param in self._params.items()}
        return {
            name: {key: snapshot(value) for key, value in state.items() if isinstance(value, Tensor)}
            for name, state in states.items()
            if state
        }

    def observe(self) -> Observations:
        return Observations(
            loss_scale=Absent("the adapter trains in fp32"),
            skipped_steps=Absent("this engine never skips a step"),
            learning_rates=tuple(float(group["lr"]) for group in self._optimizer.param_groups),
        )

    def close(self) -> None:
        if vars(self):
            self.zero_grad()
            vars(self).clear()


def build_arguments(config: EngineConfig, folder: str, device: torch.device, **others: Any) -> Any:
    """Return the TrainingArguments for the batches and the clipping of ``config``, plus the arguments ``others``."""
    from transformers import TrainingArguments

    arguments = {
        "output_dir": folder,
        "use_cpu": device.type == "cpu",
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "num_train_epochs": 1,
        "max_grad_norm": config.clip or 0.0,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "average_tokens_across_devices": bool(config.options.get(AVERAGE_TOKENS, True)),
    }
    return TrainingArguments(**{**arguments, **others})


def adapt_loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``loss(output, target, items)`` as the ``compute_loss_func`` of a Trainer."""

    def compute_loss(outputs: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return loss(outputs, labels, num_items_in_batch)

    return compute_loss


def build_recorder(params: Mapping[str, nn.Parameter]) -> Any:
    """Return a callback of a Trainer that records the gradients before and the weights after each step, and its log."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        """Records each step."""

        def __init__(self) -> None:
            self.grads: list[dict[str, Tensor]] = []
            self.params: list[dict[str, Tensor]] = []
            self.logs: list[Mapping[str, float]] = []

        def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
            self.grads.append({name: snapshot(p.grad) for name, p in params.items() if p.grad is not None})

        def on_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
            self.params.append({name: snapshot(param) for name, param in params.items()})

        def on_log(self, *_args: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                self.logs.append(dict(kwargs["logs"]))

        def read_steps(self) -> list[TrainedStep]:
            return [
                TrainedStep(log["loss"], log["grad_norm"], grads, weights)
                for log, grads, weights in zip(self.logs, self.grads, self.params, strict=True)
            ]

    return Recorder()
