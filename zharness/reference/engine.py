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
from zharness.reference import memory, saving, universal
from zharness.reference.config import Settings
from zharness.reference.gathered import Ledger
from zharness.reference.gradients import Gradients
from zharness.reference.layout import Original, Owner, Owners
from zharness.reference.loss_scale import LossScale
from zharness.reference.optimizer import only_leaves, refuse_own_steps
from zharness.reference.packed import gather_all
from zharness.reference.parameters import Parameters
from zharness.reference.precision import OnOverflow
from zharness.reference.rescaling import Rescaling
from zharness.reference.state import Contents, TrainingState
from zharness.reference.together import together


class Phase(Enum):
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
        owners: Owners,
        comm: Comm,
        originals: Mapping[str, Original],
        parameters: Parameters,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        loss_scale: LossScale,
        ledger: Ledger,
    ) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = optimizer
        self.schedule = schedule
        self.comm = comm
        self.steps = 0
        self.skipped_steps = 0
        self._owners = owners
        self._originals = originals
        self._parameters = parameters
        self._gradients = gradients
        self._scale = loss_scale
        self._ledger = ledger
        self._phase = Phase.TRAINING
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._micro_batches = 0
        self._rescaling = Rescaling(settings, loss_scale, gradients)
        self._guard = refuse_own_steps(optimizer, parameters.leaves)
        kept = {"loss_scale": loss_scale if loss_scale.needed() else None, "schedule": schedule}
        stateful = {name: each for name, each in kept.items() if each is not None}
        self._state = TrainingState(module, originals, owners, parameters, optimizer, stateful, comm)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under the configured torch_autocast; the loss is computed outside of it."""
        self._need(Phase.TRAINING, Phase.NO_SYNC)
        precision = self.settings.precision
        with precision.forward(self._device.type):
            return self.module(*precision.arguments(args), **precision.arguments(kwargs))

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """``scale(loss).backward()``; the mean over ranks and micro-batches is taken where gradients are reduced."""
        self.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """``loss`` times the loss scale, where one is needed; call ``backward`` on that. ``retain_graph`` says nothing.

        An external scale (``override_loss_scale``) goes before torch_autocast's, and that before fp16's own. Raises
        UsageError unless ``loss`` is a tensor of one element.
        """
        self._need(Phase.TRAINING, Phase.NO_SYNC)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(f"a loss is a tensor of one element, got {got}; for out.backward(g) scale (out * g).sum()")
        return self._scale.scale(loss)

    def needs_scaler(self) -> bool:
        """Whether a backward of an unscaled loss would be wrong; such a one raises UsageError."""
        return self._scale.needed()

    def override_loss_scale(self, scale: float | None) -> None:
        """Use an external loss scale, which the caller moves; None returns to the configured one."""
        self._scale.override(scale)

    @property
    def loss_scale(self) -> float:
        """What ``scale`` multiplies by now."""
        return self._scale.value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up on this rank; a later one outside is reduced with them. Stages 0 and 1 only.

        Raises UsageError where gradients are sharded, since a shard has no room for what is not reduced; accumulate
        over ``step`` there. ``step`` inside the block raises it as well.
        """
        self._need(Phase.TRAINING)
        if self._owners.gradients is Owner.SHARDED:
            raise UsageError(
                f"no_sync at stage {self.settings.stage}: sharded gradients have no room for what is not reduced; "
                "set gradient_accumulation_steps and call step() after every micro-batch"
            )
        self._phase = Phase.NO_SYNC
        try:
            yield
        finally:
            if self._phase is Phase.NO_SYNC:  # and not closed meanwhile
                self._phase = Phase.TRAINING

    def step(self) -> None:
        """Count the micro-batch; at the boundary update the parameters and forget the gradients. Collective then.

        A step whose gradients are not finite on some rank changes no weight on any: it is skipped and counted under
        fp16 and (unless bf16.check_grad_overflow is false) bf16, and raises NonFiniteError otherwise.
        """
        self._need(Phase.TRAINING)
        self._micro_batches += 1
        if self._micro_batches < self.settings.accumulation_steps:
            return
        self._parameters.ready_to_step()
        only_leaves(self.optimizer, self._parameters.leaves)
        reduced = self._gradients.reduced()
        finite = self._rescaling.rescale(reduced)
        if finite:
            self._update(reduced)
        self.zero_grad()
        self.skipped_steps += not finite
        self._scale.update(not finite)
        if not finite and self.settings.precision.on_overflow is OnOverflow.RAISE:
            raise NonFiniteError(
                f"after step {self.steps} a gradient is not finite on some rank (norm {self.grad_norm()}): no weight "
                "was changed and the gradients are forgotten; look at the loss, the data and the learning rate"
            )

    def _update(self, reduced: Mapping[str, Tensor]) -> None:
        leaves = self._parameters.leaves
        try:
            for name, grad in reduced.items():
                leaves[name].grad = grad
            if reduced:
                self.optimizer.step()
        finally:
            for name in reduced:
                leaves[name].grad = None
        self._parameters.publish(reduced)
        self.steps += 1
        if self.schedule is not None:
            self.schedule.step()

    def _need(self, *phases: Phase) -> None:
        if self._phase not in phases:
            raise UsageError(f"the engine is {self._phase.value}; this call needs it {phases[0].value}")

    def zero_grad(self) -> None:
        """Forget every gradient, reduced or not, and the micro-batches that they came from.

        The module's and the optimizer's own ``zero_grad`` cannot: they do not see the gradients that are reduced.
        """
        self._gradients.forget()
        self._scale.forget()
        self._micro_batches = 0

    def grad_norm(self) -> float | None:
        """The norm of the last step's gradients, unscaled and before clipping; None where no step needed it."""
        return self._rescaling.norm

    def full_grads(self) -> dict[str, Tensor]:
        """The reduced gradients so far, unscaled, original names and shapes, on CPU. Collective."""
        return {name: grad / self._scale.value for name, grad in self._gradients.full().items()}

    def full_params(self) -> dict[str, Tensor]:
        """The current weights, original names and shapes, on CPU. Collective."""
        return self._parameters.full()

    def gathered(
        self, parameters: Iterable[str | nn.Parameter] | None = None, source: int = 0
    ) -> AbstractContextManager[dict[str, Tensor]]:
        """A block in which full weights may be edited: by name in the dictionary it gives, or as module attributes.

        ``parameters`` are names or the model's Parameters, all of them when None. Afterwards every rank has what rank
        ``source`` made of them, masters included; after an exception, on any rank, nobody has any edit. Collective at
        both ends, at every stage. Raises UsageError for an unknown parameter, and where another rank raised.
        """
        return self._parameters.gathered(parameters, source)

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """A block whose forwards and backwards may use other parameters on other ranks, as branches on data do.

        What a rank does not use counts as zero in the mean. Without it, stage 3 asks the same reads of every rank, each
        a collective (two, inside the block: the first says which), and stage 2 as many backwards, those of reentrant
        checkpoints among them. Collective at its end. Raises UsageError where another rank raised inside it, and for
        another such block, or a step, inside it; at every stage.
        """
        with self._parameters.uneven(), self._gradients.uneven():
            yield

    def full_masters(self) -> dict[str, Tensor]:
        """The optimizer's own copies of the weights, where it works in another dtype than the model. Collective."""
        return self._parameters.full_masters()

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter name, original shapes, on CPU; scalars such as ``step`` as they are."""
        leaves = self._parameters.leaves
        kept = {name: state for name, leaf in leaves.items() if (state := self.optimizer.state.get(leaf))}
        shards = {
            (name, key): (value, self._originals[name].layout)
            for name, state in kept.items()
            for key, value in state.items()
            if self._is_shard(value, leaves[name])
        }
        whole = gather_all(shards, self.comm)
        return {
            name: {
                key: whole[name, key] if (name, key) in whole else value.detach().to("cpu", copy=True)
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
            for name, state in kept.items()
        }

    def _is_shard(self, value: Any, leaf: Tensor) -> bool:
        sharded = self._owners.optimizer_state is Owner.SHARDED
        return sharded and isinstance(value, Tensor) and value.shape == leaf.shape

    def full_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict`` with whole parameters on CPU, for ``load_state_dict`` of a plain one. Collective.

        A tied weight is one tensor under all its names, as in the plain one. Buffers are this rank's, as is a copy of
        what modules' ``get_extra_state`` give.
        """
        whole = self.full_params()
        named = {id(original.parameter): whole[name] for name, original in self._originals.items()}
        return {
            name: named[id(value)] if id(value) in named else _copied(value)
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
        self._need(Phase.TRAINING)
        with together(self.comm):
            if self._micro_batches or self._waiting_gradients():
                raise CheckpointError("gradients wait for a step, and no checkpoint keeps them: call step or zero_grad")
            contents = self._state.contents(self.steps, self.skipped_steps)
            facts = {"contents": vars(contents)}
            own = {"extra_state": self._state.extra(), "client_state": dict(client_state or {})}
        tag = tag or f"global_step{self.steps}"
        return saving.save(Path(save_dir), tag, self._state.pieces(contents), facts, own, self.comm)

    def load_checkpoint(
        self, load_dir: Path | str, tag: str | None = None, load_module_only: bool = False
    ) -> tuple[Path, dict[str, Any]]:
        """Go on from ``load_dir/tag``, or from the latest; its path and this rank's ``client_state``.

        Any stage at any world size reads what any other wrote; what is each rank's own comes from rank 0 where this
        rank did not write. ``load_module_only`` takes parameters, buffers and extra state of modules alone. Gradients
        that wait are forgotten. Collective. Raises CheckpointError on every rank, with nothing loaded, for a checkpoint
        that is missing, damaged, carries code, or is of another model or optimizer.
        """
        self._need(Phase.TRAINING)
        found = saving.find(Path(load_dir), tag, self.comm)
        with together(self.comm):
            contents = Contents(**found.facts["contents"])
            self._state.check(contents, found.own["extra_state"], load_module_only)
            pieces = self._state.blank(contents, load_module_only)
        found.fill(pieces)
        self._go_on(contents, pieces, load_module_only)
        self._state.adopt_extra(found.own["extra_state"])
        return found.path, found.own["client_state"]

    def load_universal_checkpoint(self, path: Path | str, mpu: Any = None) -> tuple[Path, dict[str, Any]]:
        """Go on from a checkpoint of DeepSpeed's that its ``ds_to_universal`` converted; ``path`` and ``client_state``.

        ``mpu`` tells which tensor-parallel slice the model on this rank is. Takes weights, buffers, extra state of
        modules, Adam's moments, counts and settings, the loss scale, and the schedule where both sides have one.
        Collective. Raises CheckpointError on every rank, with nothing loaded, for one that is missing, incomplete,
        damaged, unsafe, or of another model.
        """
        self._need(Phase.TRAINING)
        with together(self.comm):
            found = universal.read(Path(path), self._state, mpu)
        self._go_on(found.contents, found.pieces)
        self._state.adopt_extra(found.extra)
        return Path(path), found.client_state

    def _go_on(self, contents: Contents, pieces: Mapping[str, Tensor], module_only: bool = False) -> None:
        self.zero_grad()
        self._state.adopt(contents, pieces, module_only)
        if not module_only:
            self.steps, self.skipped_steps = contents.steps, contents.skipped_steps

    def _waiting_gradients(self) -> list[Tensor]:
        local = (original.parameter.grad for original in self._originals.values())
        return [*self._gradients.held(), *(grad for grad in local if grad is not None)]

    def shards(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Per parameter, start and stop of each rank's flat elements; empty where the optimizer state is whole."""
        if self._owners.optimizer_state is Owner.WHOLE:
            return {}
        ranks = range(self.comm.world_size)
        return {name: tuple(map(original.layout.bounds, ranks)) for name, original in self._originals.items()}

    def held_bytes(self) -> dict[str, int]:
        """Bytes allocated on this rank for parameters, gradients and optimizer state (masters among it)."""
        return {kind: memory.storage_bytes(tensors) for kind, tensors in self._held().items()}

    def memory_report(self) -> dict[str, dict[str, int]]:
        """The same, of each kind the bytes in each dtype, as in ``{"parameters": {"bfloat16": 1024}}``."""
        return {kind: memory.by_dtype(tensors) for kind, tensors in self._held().items()}

    def _held(self) -> dict[str, list[Any]]:
        parameters = [original.parameter for original in self._originals.values()]
        state = [value for held in self.optimizer.state.values() for value in held.values()]
        return {
            "parameters": parameters,
            "gradients": [*self._gradients.held(), *(p.grad for p in parameters)],
            "optimizer_state": [*self._parameters.masters.values(), *state],
        }

    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters that are alive on this rank now; 0 between steps."""
        return self._ledger.bytes()

    def peak_gathered_bytes(self) -> int:
        """The most that ``gathered_bytes`` ever was, since ``reset_peak``."""
        return self._ledger.peak

    def reset_peak(self) -> None:
        self._ledger.peak = self._ledger.bytes()

    def close(self) -> None:
        """Take the hooks and the exchanged classes away. No collective: at stage 3 the parameters stay shards."""
        if self._phase is not Phase.CLOSED:
            self._phase = Phase.CLOSED
            self._guard.remove()
            self._scale.close()
            self._gradients.close()
            self._parameters.close()


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
