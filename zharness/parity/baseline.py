"""Define the baseline: the plain model, run for each rank in turn in a process that never imports an engine.

Every cell runs the baseline again, although cells that differ only in engine and stage need the same numbers: in the
median cell the baseline takes 6 % of the time (scripts/cost_of_comparing.py). For large models of users
``baseline_cache.py`` keeps results between runs. Exact scenarios (zharness/law_kit/scenarios.py) and certificates are
cached, because they run the baseline in float64 as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zharness.device.float32_products import Float32Products
from zharness.workload import Batch, ModelSpec
from zharness.workload.synchronized_norm import has_synchronized_norm, run_jointly

T = TypeVar("T")
Objective = Callable[[Any, Batch], Tensor]
LossWeighting = Callable[[Tensor, int], Tensor]  # (loss, rank) -> the tensor that backward starts from


class CastCache(Enum):
    """When torch.autocast casts a weight. This decides in which dtype the gradients of the weight's uses are summed."""

    ONCE = "once for all uses, whose gradients are summed in the dtype of the cast"
    EACH_USE = "anew for each use, whose gradients are summed in the dtype of the weight"


@dataclass(frozen=True)
class LocalResult:
    """The loss (a scalar) and the gradients of one rank's micro-batch, before they are reduced over ranks.

    ``parts`` has, for each gradient that autograd added up from several parts, these parts in order. It is empty if the
    parts were not recorded.
    """

    loss: Tensor
    grads: Mapping[str, Tensor]
    parts: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def trained_dtype(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which cells of ``dtype`` train a parameter of dtype ``own``: fp32 cells keep float64."""
    return own if own is torch.float64 and dtype is torch.float32 else dtype


@dataclass(frozen=True)
class Baseline:
    """The plain model of ``spec``, with weights initialized from ``seed``, and ``data_size`` micro-batches a step.

    Batches, and parameters that require a gradient, are converted to ``dtype`` (``trained_dtype``). Backward runs on
    the loss times ``loss_scale``, and the gradients are then divided by ``loss_scale`` (in float32, unless the scale is
    1). ``autocast`` is the dtype of the ``torch.autocast`` context in which the forward runs; the loss is computed
    outside of this context. ``autocast_backward`` is the dtype of the autocast context in which backward runs. None
    means that autocast is off. ``cast_cache`` says when both contexts cast a weight. ``products`` says how a GPU
    multiplies float32 numbers; the caller of a method sets this mode with ``multiply_with``.
    """

    spec: ModelSpec
    seed: int
    data_size: int
    dtype: torch.dtype = torch.float32
    loss_scale: float = 1.0
    autocast: torch.dtype | None = None
    autocast_backward: torch.dtype | None = None
    cast_cache: CastCache = CastCache.ONCE
    products: Float32Products = Float32Products.FULL

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of the model's parameters in module order; each tied parameter is listed once."""
        return tuple(self.parameter_dtypes)

    @property
    def parameter_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtype of each parameter in the model that ``spec`` builds, before any conversion to ``dtype``."""
        return read_parameter_dtypes(self.spec, self.seed)

    @property
    def eps(self) -> float:
        """Return the distance from 1 to the next larger factor that a product can have, in ``dtype`` or TF32."""
        own = torch.finfo(self.dtype).eps
        return max(own, self.products.eps) if self.dtype is torch.float32 else own

    @property
    def joins_ranks(self) -> bool:
        """Return whether a rank's loss depends on the micro-batches of other ranks, by a SyncBatchNorm."""
        return self.data_size > 1 and is_joined_model(self.spec, self.seed)

    def run_ranks(self, run: Callable[[int], T]) -> list[T]:
        """Return ``run(rank)`` for all ranks, in rank order; a SyncBatchNorm sees the rows of all ranks."""
        if self.joins_ranks:
            return run_jointly([partial(run, rank) for rank in range(self.data_size)])
        return [run(rank) for rank in range(self.data_size)]

    def run_for(self, rank: int, run: Callable[[int], T]) -> T:
        """Return ``run(rank)``; the other ranks run too if a SyncBatchNorm needs their rows."""
        return self.run_ranks(run)[rank] if self.joins_ranks else run(rank)

    def build_module(self, params: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Build a new plain model; copy the weights ``params`` into it unless ``params`` is None.

        The keys of ``params`` are the names in ``named_parameters()``, so each tied parameter appears once.
        """
        model = self.spec.model(self.seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.detach().to(trained_dtype(parameter.dtype, self.dtype))
        if params is not None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(params[name])
        return model

    def batch(self, rank: int, step: int) -> Batch:
        """Return the micro-batch of ``rank`` at micro-step ``step``, converted to the baseline's dtype."""
        return self.spec.micro_batch(self.seed, rank, step).to(self.dtype)

    def compute_output(self, model: nn.Module, batch: Batch) -> Any:
        """Run the forward of ``model`` on a micro-batch, under autocast if the baseline uses autocast."""
        with autocast_context(self.autocast, self.cast_cache):
            return batch.feed(model)

    def objective(self, output: Any, batch: Batch) -> Tensor:
        """Return the loss that ``spec`` defines for a model output and its micro-batch."""
        return self.spec.loss(output, batch.target)

    def run_rank(
        self,
        rank: int,
        step: int,
        params: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        weigh: LossWeighting | None = None,
    ) -> LocalResult:
        """Return the loss and the gradients of one rank's micro-batch; the gradients are not reduced over ranks.

        If ``weigh`` is given, backward starts from ``weigh(loss, rank)``, but the returned loss is the one before
        ``weigh``.
        """
        return self.run_for(rank, partial(self._run_local, step, params, objective, weigh))

    def _run_local(
        self,
        step: int,
        params: Mapping[str, Tensor] | None,
        objective: Objective | None,
        weigh: LossWeighting | None,
        rank: int,
    ) -> LocalResult:
        """Run one rank's micro-batch in this thread, as ``run_rank`` describes."""
        model, batch = self.build_module(params), self.batch(rank, step)
        loss = (objective or self.objective)(self.compute_output(model, batch), batch)
        weighed = loss if weigh is None else weigh(loss, rank)
        with autocast_context(self.autocast_backward, self.cast_cache):
            result = run_backward(model, weighed, self.loss_scale)
        return LocalResult(loss.detach(), result.grads)

    def run_forward(self, rank: int, step: int, params: Mapping[str, Tensor] | None = None) -> LocalResult:
        """Return the loss of one rank's micro-batch, in the grad mode of the caller and without gradients.

        torch's recurrent layers have other kernels under no_grad, which round differently.
        """

        def run(rank: int) -> LocalResult:
            """Run the forward of one rank's micro-batch."""
            model, batch = self.build_module(params), self.batch(rank, step)
            return LocalResult(self.objective(self.compute_output(model, batch), batch).detach(), {})

        return self.run_for(rank, run)

    def run_all_ranks(
        self,
        step: int = 0,
        params: Mapping[str, Tensor] | None = None,
        objective: Objective | None = None,
        weigh: LossWeighting | None = None,
    ) -> list[LocalResult]:
        """Return the results of ``run_rank`` for all ranks, in rank order."""
        return self.run_ranks(partial(self._run_local, step, params, objective, weigh))


def autocast_context(dtype: torch.dtype | None, cast_cache: CastCache = CastCache.ONCE) -> torch.autocast:
    """Return a ``torch.autocast`` context in ``dtype``; the context is disabled if ``dtype`` is None."""
    cache_enabled = cast_cache is CastCache.ONCE
    device_type = torch.get_default_device().type
    return torch.autocast(device_type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=cache_enabled)


@lru_cache(maxsize=64)
def read_parameter_dtypes(spec: ModelSpec, seed: int) -> Mapping[str, torch.dtype]:
    """Return the dtype of each parameter of the model that ``spec`` builds for ``seed``.

    ``seed`` is part of the cache's key, so that a user's model factory is never called with a seed other than the
    cell's.
    """
    return {name: parameter.dtype for name, parameter in spec.model(seed).named_parameters()}


@lru_cache(maxsize=64)
def is_joined_model(spec: ModelSpec, seed: int) -> bool:
    """Return whether the model that ``spec`` builds for ``seed`` normalizes over the rows of all ranks."""
    return has_synchronized_norm(spec.model(seed))


def run_local(model: nn.Module, batch: Batch, objective: Objective, loss_scale: float = 1.0) -> LocalResult:
    """Run one forward and backward of ``model`` and return the loss and the gradients.

    The gradients of ``model`` have to be None before the call.
    """
    return run_backward(model, objective(batch.feed(model), batch), loss_scale)


def run_backward(model: nn.Module, loss: Tensor, loss_scale: float = 1.0) -> LocalResult:
    """Run backward on ``loss * loss_scale`` and return the loss with the unscaled gradients of ``model``.

    The gradients of ``model`` have to be None before the call.
    """
    torch.autograd.backward(loss if loss_scale == 1 else loss * torch.tensor(loss_scale))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if loss_scale != 1:
        grads = {name: grad.float() / loss_scale for name, grad in grads.items()}
    return LocalResult(loss.detach(), grads)


def convert_to_float64(model: nn.Module, batch: Batch, take_abs: bool = False) -> tuple[nn.Module, Batch]:
    """Return float64 copies of ``model`` and ``batch``.

    If ``take_abs`` is set, every number in the copies is replaced by its absolute value, and modules that choose one of
    several parameters cover every choice.
    """
    wide = copy.deepcopy(model).double()
    # Mixture-of-experts models of transformers multiply with a grouped kernel by default, which has no float64.
    set_experts = getattr(wide, "set_experts_implementation", None)
    if set_experts is not None and getattr(wide.config, "_experts_implementation", None) is not None:
        set_experts("eager")
    batch = batch.map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    if take_abs:
        batch = batch.map_tensors(torch.abs)
        with torch.no_grad():
            for parameter in wide.parameters():
                parameter.abs_()
        for module in wide.modules():
            cover_choices = getattr(module, "cover_choices", None)
            if cover_choices is not None:
                cover_choices()
    return wide, batch
