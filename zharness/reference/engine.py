"""The training engine: forward, backward, boundary, step."""

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
from zharness.reference import memory
from zharness.reference.checkpoints import storage, universal
from zharness.reference.checkpoints.training_state import CheckpointContents, TrainingState
from zharness.reference.client.optimizer import check_only_leaves, refuse_direct_steps
from zharness.reference.collectives import all_gather_full_tensors
from zharness.reference.deepspeed_json.settings import Settings
from zharness.reference.gradients import GradientClipper, Gradients
from zharness.reference.layout import ModelParam, ShardPlacement, StagePlacements
from zharness.reference.memory import UnshardedMemoryTracker
from zharness.reference.mixed_precision.loss_scale import LossScale
from zharness.reference.mixed_precision.precision import OnOverflow
from zharness.reference.parameters import Parameters
from zharness.reference.uneven_ranks.rank_errors import raise_on_all_ranks


class EnginePhase(Enum):
    """What an engine may be asked for now. ``no_sync`` and ``close`` change it."""

    TRAINING = "training"
    NO_SYNC = "inside no_sync"
    CLOSED = "closed"


class Engine:
    """ZeRO over one module: every verb is the plain one, on parts of the whole. See [Note: phases].

    No hook watches the loss or the outputs: gradients are divided where they are reduced. So every spelling of
    backward, losses that never passed through the engine, and several backwards before one step mean what they mean in
    torch.
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
        self._model_params = model_params
        self._parameters = parameters
        self._gradients = gradients
        self._loss_scale = loss_scale
        self._memory_tracker = memory_tracker
        self._phase = EnginePhase.TRAINING
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._micro_batches = 0
        self._clipper = GradientClipper(settings, loss_scale, gradients)
        self._step_guard = refuse_direct_steps(optimizer, parameters.leaves)
        kept = {"loss_scale": loss_scale if loss_scale.is_needed() else None, "schedule": schedule}
        stateful = {name: each for name, each in kept.items() if each is not None}
        self._training_state = TrainingState(module, model_params, placements, parameters, optimizer, stateful, comm)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under the configured torch_autocast; the loss is computed outside of it."""
        self._require_phase(EnginePhase.TRAINING, EnginePhase.NO_SYNC)
        precision = self.settings.precision
        with precision.autocast_context(self._device.type):
            return self.module(*precision.cast_inputs(args), **precision.cast_inputs(kwargs))

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """``scale(loss).backward()``; the mean over ranks and micro-batches is taken where gradients are reduced."""
        self.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """``loss`` times the loss scale, where one is needed; call ``backward`` on that. ``retain_graph`` says nothing.

        An external scale (``override_loss_scale``) goes before torch_autocast's, and that before fp16's own. Raises
        UsageError unless ``loss`` is a tensor of one element.
        """
        self._require_phase(EnginePhase.TRAINING, EnginePhase.NO_SYNC)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(f"a loss is a tensor of one element, got {got}; for out.backward(g) scale (out * g).sum()")
        return self._loss_scale.scale(loss)

    def needs_scaler(self) -> bool:
        """Whether a backward of an unscaled loss would be wrong; such a one raises UsageError."""
        return self._loss_scale.is_needed()

    def override_loss_scale(self, scale: float | None) -> None:
        """Use an external loss scale, which the caller moves; None returns to the configured one."""
        self._loss_scale.override(scale)

    @property
    def loss_scale(self) -> float:
        """What ``scale`` multiplies by now."""
        return self._loss_scale.value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up on this rank; a later one outside is reduced with them. Stages 0 and 1 only.

        Raises UsageError where gradients are sharded, since a shard has no room for what is not reduced; accumulate
        over ``step`` there. ``step`` inside the block raises it as well.
        """
        self._require_phase(EnginePhase.TRAINING)
        if self._placements.gradients is ShardPlacement.SHARDED:
            raise UsageError(
                f"no_sync at stage {self.settings.stage}: sharded gradients have no room for what is not reduced; "
                "set gradient_accumulation_steps and call step() after every micro-batch"
            )
        self._phase = EnginePhase.NO_SYNC
        try:
            yield
        finally:
            if self._phase is EnginePhase.NO_SYNC:  # and not closed meanwhile
                self._phase = EnginePhase.TRAINING

    def step(self) -> None:
        """Count the micro-batch; at the boundary update the parameters and forget the gradients. Collective then.

        A step whose gradients are not finite on some rank changes no weight on any: it is skipped and counted under
        fp16 and (unless bf16.check_grad_overflow is false) bf16, and raises NonFiniteError otherwise.
        """
        self._require_phase(EnginePhase.TRAINING)
        self._micro_batches += 1
        if self._micro_batches < self.settings.accumulation_steps:
            return
        self._parameters.check_ready_to_step()
        check_only_leaves(self.optimizer, self._parameters.leaves)
        reduced = self._gradients.reduce_pending()
        finite = self._clipper.unscale_and_clip(reduced)
        if finite:
            self._update(reduced)
        self.zero_grad()
        self.skipped_steps += not finite
        self._loss_scale.update(not finite)
        if not finite and self.settings.precision.on_overflow is OnOverflow.RAISE:
            raise NonFiniteError(
                f"after step {self.steps} a gradient is not finite on some rank (norm {self.grad_norm()}): no weight "
                "was changed and the gradients are forgotten; look at the loss, the data and the learning rate"
            )

    def _update(self, reduced_grads: Mapping[str, Tensor]) -> None:
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
        if self._phase not in phases:
            raise UsageError(f"the engine is {self._phase.value}; this call needs it {phases[0].value}")

    def zero_grad(self) -> None:
        """Forget every gradient, reduced or not, and the micro-batches that they came from.

        The module's and the optimizer's own ``zero_grad`` cannot: they do not see the gradients that are reduced.
        """
        self._gradients.clear()
        self._loss_scale.forget_scaled_backward()
        self._micro_batches = 0

    def grad_norm(self) -> float | None:
        """The norm of the last step's gradients, unscaled and before clipping; None where no step needed it."""
        return self._clipper.norm

    def full_grads(self) -> dict[str, Tensor]:
        """The reduced gradients so far, unscaled, original names and shapes, on CPU. Collective."""
        return {name: grad / self._loss_scale.value for name, grad in self._gradients.full_grads().items()}

    def full_params(self) -> dict[str, Tensor]:
        """The current weights, original names and shapes, on CPU. Collective."""
        return self._parameters.full_params()

    def gathered(
        self, parameters: Iterable[str | nn.Parameter] | None = None, source: int = 0
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """A block in which full weights may be edited: by name in the dictionary it gives, or as module attributes.

        ``parameters`` are names or the model's Parameters, all of them when None. Afterwards every rank has what rank
        ``source`` made of them, masters included; after an exception, on any rank, nobody has any edit. Collective at
        both ends, at every stage. Raises UsageError for an unknown parameter, and where another rank raised.
        """
        return self._parameters.unshard_for_edit(parameters, source)

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """A block whose forwards and backwards may use other parameters on other ranks, as branches on data do.

        What a rank does not use counts as zero in the mean. Without it, stage 3 asks the same reads of every rank, each
        a collective (two, inside the block: the first says which), and stage 2 as many backwards, those of reentrant
        checkpoints among them. Collective at its end. Raises UsageError where another rank raised inside it, and for
        another such block, or a step, inside it; at every stage.
        """
        with self._parameters.allow_uneven_ranks(), self._gradients.allow_uneven_ranks():
            yield

    def full_masters(self) -> dict[str, Tensor]:
        """The optimizer's own copies of the weights, where it works in another dtype than the model. Collective."""
        return self._parameters.full_masters()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter name, original shapes, on CPU; scalars such as ``step`` as they are."""
        leaves = self._parameters.leaves
        kept = {name: state for name, leaf in leaves.items() if (state := self.optimizer.state.get(leaf))}
        shards = {
            (name, key): (value, self._model_params[name].layout)
            for name, state in kept.items()
            for key, value in state.items()
            if self._is_shard(value, leaves[name])
        }
        whole = all_gather_full_tensors(shards, self.comm)
        return {
            name: {
                key: whole[name, key] if (name, key) in whole else value.detach().to("cpu", copy=True)
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
            for name, state in kept.items()
        }

    def _is_shard(self, value: Any, leaf: Tensor) -> bool:
        sharded = self._placements.optimizer_state is ShardPlacement.SHARDED
        return sharded and isinstance(value, Tensor) and value.shape == leaf.shape

    def full_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict`` with whole parameters on CPU, for ``load_state_dict`` of a plain one. Collective.

        A tied weight is one tensor under all its names, as in the plain one. Buffers are this rank's, as is a copy of
        what modules' ``get_extra_state`` give.
        """
        whole = self.full_params()
        named = {id(original.parameter): whole[name] for name, original in self._model_params.items()}
        return {
            name: named[id(value)] if id(value) in named else _copy_to_cpu(value)
            for name, value in self.module.state_dict(keep_vars=True).items()
        }

    def save_checkpoint(
        self, save_dir: Path | str, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> Path:
        """Save all that training goes on from to ``save_dir/tag`` (``global_step{steps}`` without one); its path.

        Parameters, the optimizer with its groups, the schedule, the loss scale, the counts of steps; and each rank's
        own buffers, extra state of modules, and ``client_state``, in which a caller may keep the state of random
        generators. Collective, on a file system that all ranks see. Raises CheckpointError on every rank, also where a
        schedule has no state_dict; whatever interrupts, the checkpoint before stays whole and the latest.
        """
        self._require_phase(EnginePhase.TRAINING)
        with raise_on_all_ranks(self.comm):
            if self._micro_batches or self._pending_gradients():
                raise CheckpointError("gradients wait for a step, and no checkpoint keeps them: call step or zero_grad")
            contents = self._training_state.collect_contents(self.steps, self.skipped_steps)
            facts = {"contents": vars(contents)}
            own = {"extra_state": self._training_state.extra_state(), "client_state": dict(client_state or {})}
        tag = tag or f"global_step{self.steps}"
        return storage.save_checkpoint(
            Path(save_dir), tag, self._training_state.local_tensors(contents), facts, own, self.comm
        )

    def load_checkpoint(
        self, load_dir: Path | str, tag: str | None = None, load_module_only: bool = False
    ) -> tuple[Path, dict[str, Any]]:
        """Go on from ``load_dir/tag``, or from the latest; its path and this rank's ``client_state``.

        Any stage at any world size reads what any other wrote; what is each rank's own comes from rank 0 where this
        rank did not write. ``load_module_only`` takes parameters, buffers and extra state of modules alone. Gradients
        that wait are forgotten. Collective. Raises CheckpointError on every rank, with nothing loaded, for a checkpoint
        that is missing, damaged, carries code, or is of another model or optimizer.
        """
        self._require_phase(EnginePhase.TRAINING)
        found = storage.open_checkpoint(Path(load_dir), tag, self.comm)
        with raise_on_all_ranks(self.comm):
            contents = CheckpointContents(**found.common_state["contents"])
            self._training_state.check_compatible(contents, found.rank_state["extra_state"], load_module_only)
            pieces = self._training_state.make_empty_tensors(contents, load_module_only)
        found.read_tensors(pieces)
        self._resume_from(contents, pieces, load_module_only)
        self._training_state.load_extra_state(found.rank_state["extra_state"])
        return found.path, found.rank_state["client_state"]

    def load_universal_checkpoint(self, path: Path | str, mpu: Any = None) -> tuple[Path, dict[str, Any]]:
        """Go on from a checkpoint of DeepSpeed's that its ``ds_to_universal`` converted; ``path`` and ``client_state``.

        ``mpu`` tells which tensor-parallel slice the model on this rank is. Takes weights, buffers, extra state of
        modules, Adam's moments, counts and settings, the loss scale, and the schedule where both sides have one.
        Collective. Raises CheckpointError on every rank, with nothing loaded, for one that is missing, incomplete,
        damaged, unsafe, or of another model.
        """
        self._require_phase(EnginePhase.TRAINING)
        with raise_on_all_ranks(self.comm):
            found = universal.read_universal_checkpoint(Path(path), self._training_state, mpu)
        self._resume_from(found.contents, found.local_tensors)
        self._training_state.load_extra_state(found.extra_state)
        return Path(path), found.client_state

    def _resume_from(
        self, contents: CheckpointContents, local_tensors: Mapping[str, Tensor], module_only: bool = False
    ) -> None:
        self.zero_grad()
        self._training_state.load_tensors(contents, local_tensors, module_only)
        if not module_only:
            self.steps, self.skipped_steps = contents.steps, contents.skipped_steps

    def _pending_gradients(self) -> list[Tensor]:
        local = (original.parameter.grad for original in self._model_params.values())
        return [*self._gradients.reduced_tensors(), *(grad for grad in local if grad is not None)]

    def shards(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Per parameter, start and stop of each rank's flat elements; empty where the optimizer state is whole."""
        if self._placements.optimizer_state is ShardPlacement.REPLICATED:
            return {}
        ranks = range(self.comm.world_size)
        return {name: tuple(map(original.layout.shard_bounds, ranks)) for name, original in self._model_params.items()}

    def held_bytes(self) -> dict[str, int]:
        """Bytes allocated on this rank for parameters, gradients and optimizer state (masters among it)."""
        return {kind: memory.storage_bytes(tensors) for kind, tensors in self._tensors_by_kind().items()}

    def memory_report(self) -> dict[str, dict[str, int]]:
        """The same, of each kind the bytes in each dtype, as in ``{"parameters": {"bfloat16": 1024}}``."""
        return {kind: memory.storage_bytes_by_dtype(tensors) for kind, tensors in self._tensors_by_kind().items()}

    def _tensors_by_kind(self) -> dict[str, list[Any]]:
        parameters = [original.parameter for original in self._model_params.values()]
        state = [value for held in self.optimizer.state.values() for value in held.values()]
        return {
            "parameters": parameters,
            "gradients": [*self._gradients.reduced_tensors(), *(p.grad for p in parameters)],
            "optimizer_state": [*self._parameters.master_weights.values(), *state],
        }

    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters that are alive on this rank now; 0 between steps."""
        return self._memory_tracker.live_bytes()

    def peak_gathered_bytes(self) -> int:
        """The most that ``gathered_bytes`` ever was, since ``reset_peak``."""
        return self._memory_tracker.peak

    def reset_peak(self) -> None:
        self._memory_tracker.peak = self._memory_tracker.live_bytes()

    def close(self) -> None:
        """Take the hooks and the exchanged classes away. No collective: at stage 3 the parameters stay shards."""
        if self._phase is not EnginePhase.CLOSED:
            self._phase = EnginePhase.CLOSED
            self._step_guard.remove()
            self._loss_scale.close()
            self._gradients.close()
            self._parameters.close()


def _copy_to_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
