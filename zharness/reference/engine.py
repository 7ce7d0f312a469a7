"""Train a model with ZeRO: ``Engine`` has the methods for forward, backward, step and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.errors import CheckpointError, NonFiniteError, UsageError
from zharness.reference.checkpoints import storage, universal
from zharness.reference.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from zharness.reference.checkpoints.training_state import CheckpointContents, TrainingState
from zharness.reference.client.optimizer import check_only_leaves, refuse_direct_steps
from zharness.reference.deepspeed_json.settings import Settings
from zharness.reference.gradients import GradientClipper, Gradients
from zharness.reference.inspection import memory
from zharness.reference.inspection.coalesced_collectives import all_gather_optimizer_state
from zharness.reference.inspection.memory import UnshardedMemoryTracker
from zharness.reference.layout import ModelParam, ShardPlacement, StagePlacements
from zharness.reference.mixed_precision.loss_scale import LossScale
from zharness.reference.parameters import Parameters


class EnginePhase(Enum):
    """The state of an engine, which determines the methods that may be called: training, in ``no_sync``, or closed."""

    TRAINING = "training"
    NO_SYNC = "inside no_sync"
    CLOSED = "closed"


class Engine:
    """Trains one module with ZeRO; [Note: phases] in the package's docstring describes the order of calls.

    The engine sets no hook on the loss or the outputs, because gradients are divided where they are reduced. So any way
    to call backward, a loss computed elsewhere, and several backwards before a step work as in plain PyTorch.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        placements: StagePlacements,
        comm: Comm,
        model_params: Mapping[str, ModelParam],
        parameters: Parameters,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        loss_scale: LossScale,
        memory_tracker: UnshardedMemoryTracker,
    ) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = optimizer
        self.schedule = schedule
        self.comm = comm
        self.steps = 0
        self.skipped_steps = 0
        self._placements = placements
        self.model_params = model_params
        self._parameters = parameters
        self._gradients = gradients
        self.loss_scaler = loss_scale
        self._memory_tracker = memory_tracker
        self._phase = EnginePhase.TRAINING
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._micro_batches = 0
        self._clipper = GradientClipper(settings, loss_scale, gradients)
        self._step_guard = refuse_direct_steps(optimizer, parameters.leaves)
        candidates = {"loss_scale": loss_scale if loss_scale.is_needed() else None, "schedule": schedule}
        stateful = {name: value for name, value in candidates.items() if value is not None}
        self._training_state = TrainingState(module, model_params, placements, parameters, optimizer, stateful, comm)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, inside torch.autocast if configured; the loss is computed outside of autocast."""
        self._require_phase(EnginePhase.TRAINING, EnginePhase.NO_SYNC)
        precision = self.settings.precision
        with precision.autocast_context(self.device.type):
            return self.module(*precision.cast_inputs(args), **precision.cast_inputs(kwargs))

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Call ``scale(loss).backward()``; reductions turn the gradients into means over ranks and micro-batches."""
        self.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Return ``loss`` times the loss scale, if one is needed. The caller runs ``backward`` on the returned loss.

        A scale set by ``override_loss_scale`` has precedence over the configured one. ``retain_graph`` has no effect
        and exists because DeepSpeed's callers pass it. Raises UsageError unless ``loss`` is a tensor of one element.
        """
        self._require_phase(EnginePhase.TRAINING, EnginePhase.NO_SYNC)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(f"a loss is a tensor of one element, got {got}; for out.backward(g) pass (out * g).sum()")
        return self.loss_scaler.scale(loss)

    def needs_scaler(self) -> bool:
        """Return whether a loss must be passed to ``scale``; if so, any other backward raises UsageError."""
        return self.loss_scaler.is_needed()

    def override_loss_scale(self, scale: float | None) -> None:
        """Use ``scale`` as the loss scale, which only the caller changes; None restores the configured scale."""
        self.loss_scaler.override(scale)

    @property
    def loss_scale(self) -> float:
        """The current loss scale, or 1.0 if none is needed."""
        return self.loss_scaler.value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank inside the block, at stages 0 and 1; the next ``step`` reduces them.

        Raises UsageError at stages 2 and 3, where a gradient shard has no room for a full gradient: call ``step`` after
        every micro-batch instead. Calling ``step`` inside the block raises UsageError too.
        """
        self._require_phase(EnginePhase.TRAINING)
        if self._placements.gradients is ShardPlacement.SHARDED:
            raise UsageError(
                f"no_sync at stage {self.settings.stage} is impossible: gradient shards have no room for full ones; "
                "set gradient_accumulation_steps and call step() after every micro-batch"
            )
        self._phase = EnginePhase.NO_SYNC
        try:
            yield
        finally:
            if self._phase is EnginePhase.NO_SYNC:  # it was not closed inside the block
                self._phase = EnginePhase.TRAINING

    def step(self, is_boundary: bool | None = None) -> None:
        """Count the micro-batch, and at the accumulation boundary update the parameters and drop the gradients.

        ``is_boundary`` overrides the count. This is a collective at the boundary. If a gradient is not finite on some
        rank, no rank changes a weight: under fp16 and bf16 (unless bf16.check_grad_overflow is false) the step is
        skipped and counted, otherwise NonFiniteError is raised.
        """
        self._require_phase(EnginePhase.TRAINING)
        self._micro_batches += 1
        if not (self._micro_batches >= self.settings.accumulation_steps if is_boundary is None else is_boundary):
            return
        self._parameters.check_ready_to_step()
        check_only_leaves(self.optimizer, self._parameters.leaves)
        reduced_grads = self._gradients.reduce_pending()
        is_finite = self._clipper.unscale_and_clip(reduced_grads)
        if is_finite:
            self._update(reduced_grads)
        self.zero_grad()
        self.skipped_steps += not is_finite
        self.loss_scaler.update(not is_finite)
        if not is_finite and not self.settings.precision.skips_on_overflow:
            raise NonFiniteError(
                f"after step {self.steps} a gradient is not finite on some rank (norm {self.grad_norm()}): no weight "
                "was changed and the gradients were dropped; check the loss, the data and the learning rate"
            )

    def _update(self, reduced_grads: Mapping[str, Tensor]) -> None:
        """Run the optimizer with these gradients, write the leaves back to the parameters and step the schedule."""
        leaves = self._parameters.leaves
        try:
            for name, grad in reduced_grads.items():
                leaves[name].grad = grad
            if reduced_grads:
                self.optimizer.step()
        finally:
            for name in reduced_grads:
                leaves[name].grad = None
        self._parameters.publish(reduced_grads)
        self.steps += 1
        if self.schedule is not None:
            self.schedule.step()

    def _require_phase(self, *phases: EnginePhase) -> None:
        """Raise UsageError unless the engine is in one of ``phases``."""
        if self._phase not in phases:
            raise UsageError(f"the engine is {self._phase.value}, but this method needs it to be {phases[0].value}")

    def zero_grad(self) -> None:
        """Drop all gradients, reduced or not, and begin a new accumulation window.

        Use this method instead of the module's or the optimizer's ``zero_grad``, which do not see reduced gradients.
        """
        self._gradients.clear()
        self.loss_scaler.forget_scaled_backward()
        self._micro_batches = 0

    def grad_norm(self) -> float | None:
        """Return the gradient norm of the last step, unscaled and before clipping, or None if it was not computed."""
        return self._clipper.norm

    def full_grads(self) -> dict[str, Tensor]:
        """Return the accumulated full gradients, reduced and unscaled, by name on the CPU. This is a collective."""
        return {name: grad / self.loss_scaler.value for name, grad in self._gradients.full_grads().items()}

    def full_params(self) -> dict[str, Tensor]:
        """Return the full current weights by name on the CPU. This is a collective."""
        return self._parameters.full_params()

    def gathered(
        self, parameters: Iterable[str | nn.Parameter] | None = None, source: int = 0
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """Unshard weights for edits inside the block, in the yielded dictionary or through module attributes.

        ``parameters`` are names or the model's Parameters; None means all. At the end rank ``source``'s edits are
        broadcast, also to master weights; if any rank raises, no rank keeps an edit. The block begins and ends with a
        collective at every stage. Raises UsageError for an unknown parameter, and if another rank raised.
        """
        return self._parameters.unshard_for_edit(parameters, source)

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Let ranks use different parameters inside the block, for models whose branches depend on the data.

        A parameter that a rank does not use counts as zero in the mean. Outside the block, stage 3 needs the same reads
        on every rank, and stage 2 the same number of backwards, including those of reentrant checkpoints. Inside, each
        read at stage 3 costs two collectives instead of one. The block ends with a collective. Raises UsageError at
        every stage if another rank raised inside the block, and for a ``step`` or another ``uneven`` inside the block.
        """
        with self._parameters.allow_uneven_ranks(), self._gradients.allow_uneven_ranks():
            yield

    def full_masters(self) -> dict[str, Tensor]:
        """Return the full master weights (possibly none) by name on the CPU. This is a collective."""
        return self._parameters.full_masters()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the full optimizer state by parameter name and key, on the CPU. This is a collective.

        Elementwise state has the parameter's shape; scalars such as ``step`` stay scalars.
        """
        is_sharded = self._placements.optimizer_state is ShardPlacement.SHARDED
        layouts = {name: param.layout for name, param in self.model_params.items()} if is_sharded else {}
        return all_gather_optimizer_state(self.optimizer, self._parameters.leaves, layouts, self.comm)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the module's ``state_dict`` with full parameters on the CPU, to load into a plain model.

        This is a collective. A tied parameter is one tensor under all its names, as in a plain model. Buffers and the
        modules' extra state (``get_extra_state``) are copies of this rank's.
        """
        full = self.full_params()
        by_id = {id(param.parameter): full[name] for name, param in self.model_params.items()}
        return {
            name: by_id[id(value)] if id(value) in by_id else _copy_to_cpu(value)
            for name, value in self.module.state_dict(keep_vars=True).items()
        }

    def save_checkpoint(
        self,
        save_dir: Path | str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Save the training state to ``save_dir/tag``, and return that path. This is a collective.

        The default tag is ``global_step{steps}``. The checkpoint has the parameters, the optimizer with its groups, the
        schedule, the loss scale, the step counts, and each rank's buffers, modules' extra state and ``client_state``.
        ``save_latest`` makes it the checkpoint that loads without a tag. All ranks must share the file system. Raises
        CheckpointError on every rank if the save fails, or if the schedule has no state_dict. An interrupted save
        leaves the previous checkpoint complete.
        """
        self._require_phase(EnginePhase.TRAINING)
        with raise_on_all_ranks(self.comm.all_ranks):
            if self._micro_batches or self.pending_gradients():
                raise CheckpointError(
                    "the engine has gradients that no optimizer step has used, and a checkpoint does not save them; "
                    "call step() until the accumulation boundary, or call zero_grad()"
                )
            contents = self._training_state.collect_contents(self.steps, self.skipped_steps, exclude_frozen_parameters)
            common_state = {"contents": vars(contents)}
            rank_state = {"extra_state": self._training_state.extra_state(), "client_state": dict(client_state or {})}
        tag = tag or f"global_step{self.steps}"
        local_tensors = self._training_state.local_tensors(contents)
        states, ranks = (common_state, rank_state), self.comm.all_ranks
        return storage.save_checkpoint(Path(save_dir), tag, local_tensors, *states, ranks, save_latest)

    def load_checkpoint(
        self,
        load_dir: Path | str,
        tag: str | None = None,
        load_module_only: bool = False,
        load_module_strict: bool = True,
    ) -> tuple[Path, dict[str, Any]]:
        """Load ``load_dir/tag`` or the latest checkpoint; return its path and this rank's ``client_state``.

        This is a collective. A checkpoint can be loaded at any stage and world size; a rank that the checkpoint does
        not have gets rank 0's buffers, extra state and ``client_state``. ``load_module_only`` loads only parameters,
        buffers and extra state. Unless ``load_module_strict``, parameters of the checkpoint or the model alone are left
        out. Drops all gradients. Raises CheckpointError on every rank, with nothing loaded, for a checkpoint that is
        missing or damaged, contains code, or belongs to another model or optimizer.
        """
        self._require_phase(EnginePhase.TRAINING)
        saved = storage.open_checkpoint(Path(load_dir), tag, self.comm.all_ranks)
        with raise_on_all_ranks(self.comm.all_ranks):
            contents = CheckpointContents(**saved.common_state["contents"])
            self._training_state.check_compatible(
                contents, saved.rank_state["extra_state"], load_module_only, not load_module_strict
            )
            local_tensors = self._training_state.make_empty_tensors(contents, load_module_only)
        saved.read_tensors(local_tensors)
        self._resume_from(contents, local_tensors, load_module_only)
        self._training_state.load_extra_state(saved.rank_state["extra_state"])
        return saved.path, saved.rank_state["client_state"]

    def load_universal_checkpoint(self, path: Path | str, mpu: Any = None) -> tuple[Path, dict[str, Any]]:
        """Load a checkpoint that ``ds_to_universal`` converted; return ``path`` and its ``client_state``.

        This is a collective. ``mpu`` has methods that return the tensor-parallel rank and size of this model. Loads
        weights, buffers, extra state, Adam's moments, step counts and settings, the loss scale, and a schedule of the
        same kind. Raises CheckpointError on every rank, with nothing loaded, for a checkpoint that is missing,
        incomplete or damaged, contains code, or belongs to another model.
        """
        self._require_phase(EnginePhase.TRAINING)
        with raise_on_all_ranks(self.comm.all_ranks):
            saved = universal.read_universal_checkpoint(Path(path), self._training_state, mpu)
        self._resume_from(saved.contents, saved.local_tensors)
        self._training_state.load_extra_state(saved.extra_state)
        return Path(path), saved.client_state

    def _resume_from(
        self, contents: CheckpointContents, local_tensors: Mapping[str, Tensor], module_only: bool = False
    ) -> None:
        """Drop all gradients and load a checkpoint; ``module_only`` keeps the optimizer state and the step counts."""
        self.zero_grad()
        self._training_state.load_tensors(contents, local_tensors, module_only)
        if not module_only:
            self.steps, self.skipped_steps = contents.steps, contents.skipped_steps

    def pending_gradients(self) -> list[Tensor]:
        """Return all gradients on this rank, reduced or not."""
        local = (param.parameter.grad for param in self.model_params.values())
        return [*self._gradients.reduced_tensors(), *(grad for grad in local if grad is not None)]

    def shards(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return, by parameter name, the range (start, stop) of elements that each rank owns; empty at stage 0."""
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return {}
        size, ranks = self.comm.world_size, range(self.comm.all_ranks.world_size)
        return {n: tuple(p.layout.shard_bounds(r % size) for r in ranks) for n, p in self.model_params.items()}

    def allocated_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state (with master weights) on this rank."""
        return {kind: memory.storage_bytes(tensors) for kind, tensors in self._tensors_by_kind().items()}

    def memory_report(self) -> dict[str, dict[str, int]]:
        """Return the bytes of ``allocated_bytes`` by dtype, for example ``{"parameters": {"bfloat16": 1024}}``."""
        return {kind: memory.storage_bytes_by_dtype(tensors) for kind, tensors in self._tensors_by_kind().items()}

    def _tensors_by_kind(self) -> dict[str, list[Any]]:
        """Return this rank's parameters, gradients and optimizer state; some values are not tensors, such as None."""
        parameters = [param.parameter for param in self.model_params.values()]
        state_values = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": parameters,
            "gradients": [*self._gradients.reduced_tensors(), *(p.grad for p in parameters)],
            "optimizer_state": [*self._parameters.master_weights.values(), *state_values],
        }

    def gathered_bytes(self) -> int:
        """Return the bytes of the unsharded parameters that exist on this rank now, which is 0 between steps."""
        return self._memory_tracker.live_bytes()

    def peak_gathered_bytes(self) -> int:
        """Return the largest value that ``gathered_bytes`` had since ``reset_peak``."""
        return self._memory_tracker.peak

    def reset_peak(self) -> None:
        """Start to measure ``peak_gathered_bytes`` again from the current value of ``gathered_bytes``."""
        self._memory_tracker.peak = self._memory_tracker.live_bytes()

    def close(self) -> None:
        """Remove the hooks and restore the modules' classes, without a collective; sharded parameters stay sharded."""
        if self._phase is not EnginePhase.CLOSED:
            self._phase = EnginePhase.CLOSED
            self._step_guard.remove()
            for part in (self.loss_scaler, self._gradients, self._parameters, self.comm):
                part.close()


def _copy_to_cpu(value: Any) -> Any:
    """Return a copy of ``value``: a tensor is copied to the CPU, any other value with copy.deepcopy."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
