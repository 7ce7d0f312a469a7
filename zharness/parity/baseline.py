"""The baseline: the plain, unwrapped model, run for every rank in turn in a process of its own.

It is run anew for every cell, though cells that differ in engine and stage alone ask for the same numbers: building
and running it takes 6 % of a cell's time at the median (scripts/cost_of_comparing.py), and no more could be saved.
Exact plays (zharness/law_kit/scenarios.py) and certificates, which run it in float64 as well, are computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zharness.workload import Batch, ModelSpec

Objective = Callable[[Any, Batch], Tensor]
LossWeighting = Callable[[Tensor, int], Tensor]  # of a loss and its rank, what backward starts from


@dataclass(frozen=True)
class LocalResult:
    """What one rank's micro-batch gives on its own: a scalar loss and the gradient of every parameter that has one."""

    loss: Tensor
    grads: Mapping[str, Tensor]


@dataclass(frozen=True)
class Baseline:
    """The model of ``spec`` in the initial weights of ``seed``, for ``world_size`` ranks.

    Trained parameters and batches are in ``dtype``. Backward runs on the loss times ``loss_scale``, and the gradients
    of ``Local`` are divided by it, in float32 where it is not 1. Forwards run under torch.autocast in ``autocast``,
    where that is given, and the loss outside of it; backwards under that in ``autocast_backward``.
    """

    spec: ModelSpec
    seed: int
    world_size: int
    dtype: torch.dtype = torch.float32
    loss_scale: float = 1.0
    autocast: torch.dtype | None = None
    autocast_backward: torch.dtype | None = None

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The model's parameters in the order of its modules; tied ones once."""
        return tuple(self.parameter_dtypes)

    @property
    def parameter_dtypes(self) -> Mapping[str, torch.dtype]:
        """The model's own, by parameter, whatever trained ones are converted to."""
        return read_parameter_dtypes(self.spec, self.seed)

    def build_module(self, params: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A fresh plain model, in ``params`` (original names; tied parameters once) where they are given."""
        model = self.spec.model(self.seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.detach().to(self.dtype)
        if params is not None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(params[name])
        return model

    def batch(self, rank: int, step: int) -> Batch:
        """The micro-batch that ``rank`` sees at micro-step ``step``."""
        return self.spec.micro_batch(self.seed, rank, step).to(self.dtype)

    def compute_output(self, model: nn.Module, batch: Batch) -> Any:
        """What ``model`` makes of a micro-batch."""
        with autocast_context(self.autocast):
            return batch.feed(model)

    def objective(self, output: Any, batch: Batch) -> Tensor:
        """The loss of ``spec``."""
        return self.spec.loss(output, batch.target)

    def run_rank(
        self,
        rank: int,
        step: int,
        params: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        weigh: LossWeighting | None = None,
    ) -> LocalResult:
        """Loss and gradients of one rank's micro-batch, not reduced with anyone's.

        Where there is ``weigh``, the gradients are those of ``weigh(loss, rank)``, and the loss is still the whole one.
        """
        model, batch = self.build_module(params), self.batch(rank, step)
        loss = (objective or self.objective)(self.compute_output(model, batch), batch)
        weighed = loss if weigh is None else weigh(loss, rank)
        with autocast_context(self.autocast_backward):
            found = run_backward(model, weighed, self.loss_scale)
        return LocalResult(loss.detach(), found.grads)

    def run_all_ranks(
        self,
        step: int = 0,
        params: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        weigh: LossWeighting | None = None,
    ) -> list[LocalResult]:
        """``local`` for every rank, in rank order."""
        return [self.run_rank(rank, step, params, objective, weigh) for rank in range(self.world_size)]


def autocast_context(dtype: torch.dtype | None) -> torch.autocast:
    """A block under torch.autocast in ``dtype``; None: under none."""
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


@lru_cache(maxsize=64)
def read_parameter_dtypes(spec: ModelSpec, seed: int) -> Mapping[str, torch.dtype]:
    """``Baseline.dtypes`` of a model built for it: that of ``seed``, which anyone's factory has made already."""
    return {name: parameter.dtype for name, parameter in spec.model(seed).named_parameters()}


def run_local(model: nn.Module, batch: Batch, objective: Objective, loss_scale: float = 1.0) -> LocalResult:
    """One forward and backward of ``model``, whose gradients must be None before."""
    return run_backward(model, objective(batch.feed(model), batch), loss_scale)


def run_backward(model: nn.Module, loss: Tensor, loss_scale: float = 1.0) -> LocalResult:
    """``loss`` and the gradients of ``model``, which must be None before; backward runs on the scaled loss."""
    torch.autograd.backward(loss if loss_scale == 1 else loss * torch.tensor(loss_scale))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if loss_scale != 1:
        grads = {name: grad.float() / loss_scale for name, grad in grads.items()}
    return LocalResult(loss.detach(), grads)


def convert_to_float64(model: nn.Module, batch: Batch, take_abs: bool = False) -> tuple[nn.Module, Batch]:
    """``model`` and ``batch`` in float64; with ``magnitudes``, every number replaced by its absolute value."""
    wide = copy.deepcopy(model).double()
    choose = getattr(wide, "set_experts_implementation", None)  # of a mixture of experts of the transformers package:
    if choose is not None and getattr(wide.config, "_experts_implementation", None) is not None:
        choose("eager")  # the product of matrices that it takes by default does not know float64
    batch = batch.map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    if take_abs:
        batch = batch.map_tensors(torch.abs)
        with torch.no_grad():
            for parameter in wide.parameters():
                parameter.abs_()
    return wide, batch
