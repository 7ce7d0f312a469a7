"""Stand in for ``deepspeed.runtime.engine.DeepSpeedEngine``: DeepSpeed's methods on the reference engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.compat.deepspeed_engine import checkpoints
from zharness.compat.deepspeed_engine.communication import get_local_rank
from zharness.compat.deepspeed_engine.configuration import EngineConfig
from zharness.compat.deepspeed_engine.leaf_modules import get_z3_leaf_modules
from zharness.compat.deepspeed_engine.optimizer import make_optimizer
from zharness.compat.deepspeed_engine.output_hooks import OutputHooks
from zharness.compat.deepspeed_engine.parameters import EngineOwner, unmark
from zharness.compat.deepspeed_engine.refusals import require
from zharness.compat.deepspeed_engine.tensor_fragment import attach_access, detach_access
from zharness.reference.engine import Engine
from zharness.reference.inspection.tensor_access import TensorAccess
from zharness.reference.layout import ModelParam

ENGINES: WeakKeyDictionary[nn.Module, ReferenceType[DeepSpeedEngine]] = WeakKeyDictionary()  # by the model

SECOND_ENGINE = (
    "the model already has an engine, which ends now: any further use of it raises UsageError; call destroy() on the "
    "first engine before deepspeed.initialize builds a second one for the same model"
)


def release_engine(model: nn.Module) -> None:
    """End the engine that ``model`` already has at stage 0, 1 or 2, with a RuntimeWarning.

    DeepSpeed lets both engines live; here every further use of the first raises UsageError. At stage 3 the model's
    parameters stay shards, so ``initialize`` refuses the model.
    """
    reference = ENGINES.pop(model, None)
    engine = reference() if reference is not None else None
    if engine is not None and engine.zero_optimization_stage() < 3:
        warnings.warn(SECOND_ENGINE, RuntimeWarning, stacklevel=3)
        engine.destroy()


class DeepSpeedEngine(nn.Module):
    """The reference engine with the methods and attributes of DeepSpeed's engine.

    What DeepSpeed refuses with an AssertionError is refused with the same words; all other errors are the reference
    engine's. Attributes that this class lacks are those of the model.
    """

    def __init__(self, reference: Engine, config: EngineConfig, lr_scheduler: Any, loader: Any) -> None:
        super().__init__()
        self.module = reference.module
        self.reference = reference
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = loader
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.overflow = False
        self.inside_no_sync_ctxt = False
        self.local_rank = get_local_rank()
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.dp_world_size = self.world_size
        self._stand_in_config = config
        self._step_applied = False
        self._is_gradient_accumulation_boundary: bool | None = None  # DeepSpeed's own name
        self.pipeline_parallelism = False
        self.sparse_tensor_module_names: set[str] = set()
        self._hooks = OutputHooks(reference)
        self._mark_parameters(list(reference.model_params.values()))
        self.optimizer = make_optimizer(self)
        ENGINES[self.module] = ref(self)

    def _mark_parameters(self, params: list[ModelParam]) -> None:
        """Let the functions of ``deepspeed.utils`` and ``deepspeed.zero`` find the Parameters."""
        access = TensorAccess(self.reference)
        for param in params:
            attach_access(param.parameter, param.name, access)
        if self.zero_optimization_stage() == 3:
            EngineOwner(self.reference).mark(params)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.reference.device

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite."""
        return self.reference.skipped_steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        with self._uneven_leaves():
            return self._hooks.watch(self.reference(*args, **kwargs))

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Scale the loss and run its backward; without ``scale_wrt_gas``, gradients are summed over micro-batches.

        Returns the loss, with ``scale_wrt_gas`` divided by the number of micro-batches.
        """
        micro_batches = self.gradient_accumulation_steps()
        unscaled = loss if scale_wrt_gas or micro_batches == 1 else loss * micro_batches
        with self._uneven_leaves():
            self.scale(unscaled).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss / micro_batches if scale_wrt_gas and micro_batches > 1 else loss

    def _uneven_leaves(self) -> AbstractContextManager[None]:
        """Let ranks use different parameters inside the block if the model has a leaf module at stage 3.

        DeepSpeed fetches all parameters of a leaf module on every rank, whichever of them its forward uses.
        """
        is_marked = self.zero_optimization_stage() == 3 and bool(get_z3_leaf_modules(self.module))
        return self.reference.uneven() if is_marked else nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale. Raises AssertionError unless it is a scalar tensor."""
        numel = loss.numel() if isinstance(loss, Tensor) else 0
        require(numel == 1, "scale() expects a scalar tensor (single value)")
        return self.reference.scale(loss)

    def step(self, lr_kwargs: Any = None) -> None:
        """Count the micro-batch, and at the boundary update the weights and drop the gradients."""
        require(not self.inside_no_sync_ctxt, "It is illegal to call Engine.step() inside no_sync context manager")
        is_boundary = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        skipped = self.skipped_steps
        backwards = self._hooks.take_backward_count()
        micro_batches = 1 if self.managed_gradient_accumulation() else backwards
        self.micro_steps += micro_batches
        self.global_samples += self._samples_of_micro_batch() * micro_batches
        self.reference.step(is_boundary)
        self.overflow = self.skipped_steps > skipped
        self._step_applied = is_boundary and not self.overflow
        self.global_steps += is_boundary

    def _samples_of_micro_batch(self) -> int:
        """Return the samples of one micro-batch on all ranks."""
        return self.reference.settings.micro_batch_size * self.world_size

    def was_step_applied(self) -> bool:
        """Return whether the last ``step`` changed the weights."""
        return self._step_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next ``step`` updates the weights."""
        if self._is_gradient_accumulation_boundary is not None:
            return self._is_gradient_accumulation_boundary
        return self.managed_gradient_accumulation() and (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let the caller decide whether ``step`` updates the weights."""
        require(
            self.managed_gradient_accumulation(),
            "set_gradient_accumulation_boundary is not supported with managed_gradient_accumulation=False",
        )
        self._is_gradient_accumulation_boundary = is_boundary

    def managed_gradient_accumulation(self) -> bool:
        """Return whether the engine counts micro-batches; else every ``step`` is a boundary."""
        return self._stand_in_config.is_managed

    @property
    def has_strict_tags(self) -> bool:
        """Whether a checkpoint whose tag differs between ranks raises AssertionError."""
        return self._stand_in_config.tag_validation == "FAIL"

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank inside the block, at stages 0 and 1."""
        require(
            self.zero_optimization_stage() < 2,
            "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
            f"{self.zero_optimization_stage()}",
        )
        require(not self.inside_no_sync_ctxt, "no_sync context manager reentry is unsupported")
        with self._without_step(), self.reference.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Allow no ``step`` inside the block; when gradients are reduced does not change them."""
        require(
            self.managed_gradient_accumulation(),
            "coalesce_grad_reduction is not supported with managed_gradient_accumulation=False; the caller already "
            "owns the accumulation boundary via step()",
        )
        if self.pipeline_parallelism:
            raise NotImplementedError("coalesce_grad_reduction is not supported with pipeline parallelism")
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError("coalesce_grad_reduction requires ZeRO stage 1/2/3, got stage 0")
        require(not self.inside_no_sync_ctxt, "coalesce_grad_reduction cannot be nested inside another no_sync context")
        with self._without_step():
            yield

    @contextmanager
    def _without_step(self) -> Iterator[None]:
        """Refuse ``step`` inside the block."""
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self._hooks.take_backward_count()
        self.reference.zero_grad()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients, before clipping."""
        return self.reference.grad_norm()

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.reference.settings.stage

    def zero_optimization(self) -> bool:
        """Return whether the stage is above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self.zero_optimization_stage() > 1

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether weights are sharded."""
        return self.zero_optimization_stage() > 2

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of a step."""
        return self.reference.settings.accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch on one rank."""
        return self.reference.settings.micro_batch_size

    def train_batch_size(self) -> int:
        """Return the samples of a step on all ranks."""
        return self._samples_of_micro_batch() * self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        """Return the norm at which gradients are clipped; 0 means none."""
        return self.reference.settings.max_grad_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Return whether the model is in float16."""
        return self._stand_in_config.half_dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether the model is in bfloat16."""
        return self._stand_in_config.half_dtype is torch.bfloat16

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.reference.loss_scale

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint in the reference engine's format, and return True. This is a collective."""
        checkpoints.save_checkpoint(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the full ``state_dict`` in one file, and return True. This is a collective.

        As in DeepSpeed, nothing is saved at stage 3, and False is returned, unless the JSON sets
        ``stage3_gather_16bit_weights_on_model_save``.
        """
        if self.zero_optimization_stage() == 3 and not self._stand_in_config.gathers_on_save:
            return False
        checkpoints.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _get_optimizer_ckpt_name(self, *_: Any) -> None:
        """Return None, as the optimizer has no file of its own; DeepSpeed's tests patch this method."""

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of the reference engine; return its path and the client state. This is a collective.

        Returns None twice if the folder has no checkpoint. Raises UsageError for a ``custom_load_fn``.
        """
        return checkpoints.load_checkpoint(
            self,
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )

    def empty_partition_cache(self) -> None:
        """Do nothing: no full Parameter is kept between steps."""

    def destroy(self) -> None:
        """End the engine; its model can be used no more at stage 3, and may have another engine at stages 0 to 2."""
        if (known := ENGINES.get(self.module)) is not None and known() is self:
            del ENGINES[self.module]
        for param in self.reference.model_params.values():
            detach_access(param.parameter)
            unmark(param.parameter)
        self.reference.close()
