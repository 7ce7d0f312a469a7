"""The training engine: forward, backward, boundary, step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from zharness.comm import Comm
from zharness.reference.config import Settings
from zharness.reference.gathered import Ledger
from zharness.reference.gradients import Gradients
from zharness.reference.layout import Original, Owner, Owners, gather
from zharness.reference.parameters import Parameters


class Engine:
    """ZeRO over one module: every verb is the plain one, on parts of the whole.

    A training step is: forward (stage 3 gathers what is read), backward (stages 2 and 3 reduce on the way), then
    ``step``, which at the boundary reduces what is left, clips, updates this rank's elements and shares them.

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
        ledger: Ledger,
    ) -> None:
        self.module = module
        self.settings = settings
        self.optimizer = optimizer
        self.comm = comm
        self.steps = 0
        self._owners = owners
        self._originals = originals
        self._parameters = parameters
        self._gradients = gradients
        self._ledger = ledger
        self._micro_batches = 0
        self._norm: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Exactly ``loss.backward()``: the mean over ranks and micro-batches is taken where gradients are reduced."""
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` itself: fp32 needs no loss scale."""
        return loss

    def step(self) -> None:
        """Count the micro-batch; at the boundary update the parameters and forget the gradients. Collective then."""
        self._micro_batches += 1
        if self._micro_batches < self.settings.accumulation_steps:
            return
        self._parameters.refuse_lost_edits()
        reduced = self._gradients.reduced()
        self._norm = None if self.settings.clip is None else self._gradients.clip(self.settings.clip)
        leaves = self._parameters.leaves
        try:
            for name, grad in reduced.items():
                leaves[name].grad = grad
            self.optimizer.step()
        finally:
            for name in reduced:
                leaves[name].grad = None
        self._parameters.publish(reduced)
        self.zero_grad()
        self.steps += 1

    def zero_grad(self) -> None:
        """Forget every gradient, reduced or not, and the micro-batches that they came from."""
        self._gradients.forget()
        self._micro_batches = 0

    def grad_norm(self) -> float | None:
        """The norm before clipping of the last step; None where gradient_clipping is off or no step was made."""
        return self._norm

    def full_grads(self) -> dict[str, Tensor]:
        """The reduced gradients so far, original names and shapes, on CPU. Collective."""
        return self._gradients.full()

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

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter name, original shapes, on CPU; scalars such as ``step`` as they are."""
        return {
            name: {key: self._whole(value, name) for key, value in state.items() if isinstance(value, Tensor)}
            for name, leaf in self._parameters.leaves.items()
            if (state := self.optimizer.state.get(leaf))
        }

    def _whole(self, value: Tensor, name: str) -> Tensor:
        leaf = self._parameters.leaves[name]
        if self._owners.optimizer_state is Owner.SHARDED and value.shape == leaf.shape:
            value = gather(value, self._originals[name].layout, self.comm)
        return value.detach().to("cpu", copy=True)

    def shards(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Per parameter, start and stop of each rank's flat elements; empty where the optimizer state is whole."""
        if self._owners.optimizer_state is Owner.WHOLE:
            return {}
        ranks = range(self.comm.world_size)
        return {name: tuple(map(original.layout.bounds, ranks)) for name, original in self._originals.items()}

    def held_bytes(self) -> dict[str, int]:
        """Bytes allocated on this rank for parameters, gradients and optimizer state, counted from their storages."""
        parameters = [original.parameter for original in self._originals.values()]
        state = [value for held in self.optimizer.state.values() for value in held.values()]
        return {
            "parameters": _storage_bytes(parameters),
            "gradients": _storage_bytes([*self._gradients.held(), *(p.grad for p in parameters)]),
            "optimizer_state": _storage_bytes(state),
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
        self._gradients.close()
        self._parameters.close()


def _storage_bytes(values: Iterable[Any]) -> int:
    """Bytes behind the tensors among ``values``; storages that several of them share count once."""
    storages = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
