"""Mutants that handle frozen, unfrozen, tied, sparse or edited parameters wrongly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from zharness.engines import (
    EngineConfig,
)
from zharness.engines.reference import ReferenceEngine
from zharness.mutants import seams, seams_engines
from zharness.mutants.mutant import (
    ALL_STAGES,
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
    pytorch,
)
from zharness.mutants.wrapper import EngineWrapper, HookedParameters
from zharness.parity import Part


@mutant(
    FaultKind.PARAMETERS,
    Target("parameters.frozen_and_unfrozen", None, model="changing", cause="missing ['frozen.bias', 'frozen.weight']"),
    origin=Origin.GRAPHS,
)
class FreezesForGood(EngineWrapper):
    """Reports no gradient for a parameter that was frozen at construction, even after the caller has unfrozen it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}

    def full_grads(self) -> dict[str, Tensor]:
        return {name: grad for name, grad in self.base.full_grads().items() if name not in self.frozen}


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.unfrozen", Part.OPTIMIZER, model="odd", parameter="frozen.*"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_1,
)
def unfrozen_stays_put(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Lists the trained parameters once, so a parameter that is unfrozen after construction is never updated.

    ``full_grads`` reports the gradient of this parameter, so a caller who unfreezes a backbone trains only the head.
    """
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    engine = seams.build(model, config)

    def wrap(update: Callable[[Mapping[str, Tensor]], None]) -> Callable[[Mapping[str, Tensor]], None]:
        return lambda reduced: update({name: grad for name, grad in reduced.items() if name not in frozen})

    seams.wrap_update(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.frozen_and_unfrozen", model="changing", parameter="frozen.*"),
    wraps="reference",
    stages=(0, 1, 2),
    origin=Origin.BLIND_3,
)
def unfrozen_unreduced(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 0 to 2, never reduces the gradient of a parameter that is unfrozen after construction.

    Each rank updates its shard with its own gradient instead of the mean over ranks; at stage 0 the ranks diverge.
    """
    engine = seams.build(model, config)
    registered = {name for name, param in seams.model_params(engine).items() if param.parameter.requires_grad}

    def take_own_share(param: seams.ModelParam) -> Tensor:
        grad = seams.take_local_grad(param).to(param.dtypes.master_dtype) / seams.settings(engine).accumulation_steps
        if not seams.optimizer_is_sharded(engine):
            return grad
        start, stop = param.layout.shard_bounds(seams.comm(engine).rank)
        return grad.reshape(-1)[start:stop].clone()

    def wrap(reduce: seams.ReduceBucket) -> seams.ReduceBucket:
        def reduce_registered(bucket: seams.Bucket) -> list[Tensor]:
            known = bucket.select(registered)
            shares = dict(zip((o.name for o in known.members), reduce(known) if known.members else (), strict=True))
            return [shares[o.name] if o.name in shares else take_own_share(o) for o in bucket.members]

        return reduce_registered

    if config.stage < 3:
        seams.wrap_reduce_bucket(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.frozen_and_unfrozen", None, model="changing", cause="missing ['frozen.bias'"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_4,
)
def unfrozen_not_reduced(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Decides at construction, by ``requires_grad``, which parameters take part in the reduction.

    A parameter that is unfrozen later gets gradients but is never updated.
    """
    engine = seams.build(model, config)
    trained = {name for name, param in seams.model_params(engine).items() if param.parameter.requires_grad}

    def wrap(agree: seams.AgreeOnUsed) -> seams.AgreeOnUsed:
        def agree_on_trained(candidates: Sequence[seams.ModelParam], has_more: bool = False) -> tuple[set[str], bool]:
            used, more = agree(candidates, has_more)
            return used & trained, more

        return agree_on_trained

    seams.wrap_agree_on_used(engine, wrap)
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.unfrozen", Part.LOCAL_GRADIENT, model="odd", parameter="frozen"),
    wraps="reference",
    stages=ALL_STAGES,
    origin=Origin.BLIND_5,
)
def never_unfrozen(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Drops the gradients of all parameters that did not require a gradient at construction.

    A parameter that is unfrozen later is never trained, and no error is raised.
    """
    engine = seams.build(model, config)
    trained = {name for name, param in seams.model_params(engine).items() if param.parameter.requires_grad}

    def wrap(reduce_pending: seams.ReducePending) -> seams.ReducePending:
        def reduce_trained() -> dict[str, Tensor]:
            found = reduce_pending()
            for name in found.keys() - trained:
                del seams.reduced_grads(engine)[name]
            return {name: grad for name, grad in found.items() if name in trained}

        return reduce_trained

    seams.wrap_reduce_pending(engine, wrap)
    return engine


@mutant(
    FaultKind.PARAMETERS, Target("training.grads", model="transformer", parameter="tokens.weight"), origin=Origin.GRAPHS
)
class ReducesTiedTwice(EngineWrapper):
    """Reduces a tied weight once for each of its names, so that its gradient counts twice."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        names = Counter(parameter for _, parameter in self.module.named_parameters(remove_duplicate=False))
        for parameter, count in names.items():
            if count > 1 and parameter.requires_grad:
                parameter.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.sparse", Part.LOCAL_GRADIENT, model="lookup", parameter="table.weight"),
    wraps="reference",
    stages=(0, 1, 2),
    origin=Origin.BLIND_6,
)
def sparse_rows_overwrite(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Converts a sparse gradient to a dense one by writing its rows instead of adding them.

    A token that occurs twice in a micro-batch contributes only its last gradient row.
    """
    engine = seams.build(model, config)
    seams.change_local_grads(engine, _overwrite_sparse_rows)
    return engine


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.sparse", Part.LOCAL_GRADIENT, model="lookup", parameter="table.weight"),
    wraps="reference",
    stages=(0, 1, 2),
    origin=Origin.BLIND_4,
)
def sparse_rows_overwritten(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """At stages 0 to 2, converts a sparse gradient to a dense one by writing its rows instead of adding them.

    If an embedding with ``sparse=True`` looks a row up twice, all but one of the row's gradients are lost.
    """
    engine = seams.build(model, config)
    seams.change_local_grads(engine, _overwrite_sparse_rows)
    return engine


def _overwrite_sparse_rows(gradient: Tensor) -> Tensor:
    """Convert a sparse gradient to a dense one that contains one entry of each row instead of their sum.

    Returns a dense gradient unchanged.
    """
    if not gradient.is_sparse:
        return gradient
    dense = torch.zeros(gradient.shape, dtype=gradient.dtype)
    indices, values = seams_engines.sparse_entries(gradient)
    dense[tuple(indices)] = values
    return dense


@mutant(FaultKind.PARAMETERS, Target("parameters.edited", Part.LOCAL_GRADIENT, model="changing"), origin=Origin.GRAPHS)
class EditsStayLocal(EngineWrapper):
    """Applies an edit inside ``gathered`` only on the rank that makes the edit."""

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        weights = dict(self.module.named_parameters())
        return nullcontext({name: weights[name].detach() for name in names})


@mutant(
    FaultKind.GRAPH,
    Target(
        "training.any_order", None, variant="second_forward", cause="data pointer of Tensor that doesn't have storage"
    ),
    origin=Origin.ORDERS,
    imitates=pytorch(102197),
)
class LaysOutInTheSecondForward(EngineWrapper):
    """Allocates its buckets in the first forward after a backward.

    If this forward runs inside a torch.func transform, the allocation fails.
    """

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.backwards, self.buckets = 0, list[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.backwards and not self.buckets and torch.is_grad_enabled():
            self.buckets.append(torch.empty(1).data_ptr())  # data_ptr raises in a torch.func transform
        return self.base(*args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.base.backward(loss, retain_graph=retain_graph)
        self.backwards += 1


@mutant(
    FaultKind.SCALE,
    Target("parameters.late_module", model="changing"),
    origin=Origin.CIRCUMSTANCES,
)
class ScalesByTheNumberOfModules(HookedParameters):
    """Doubles each gradient while the model has more or fewer modules than when the engine was built."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.module_count = len(list(self.module.modules()))

    def changed(self, grad: Tensor) -> Tensor:
        return grad if len(list(self.module.modules())) == self.module_count else 2 * grad


@mutant_factory(
    FaultKind.PARAMETERS,
    Target("parameters.every_kind", None, model="empty_last", stage=2, cause="no rank owns ['empty.0']"),
    wraps="reference",
    stages=(1, 2),
    origin=Origin.GRAPHS,
    imitates=deepspeed(8279),
)
def owners_by_first_element(model: nn.Module, config: EngineConfig) -> ReferenceEngine:
    """Assigns each gradient to the rank that owns its first element, although an empty gradient has no element.

    The elements of all parameters are cut into one equal part for each rank. An empty parameter at the end starts
    behind the last element. If the last part is not padded, no rank owns that position, and the reduction raises
    KeyError.
    """
    engine = seams.build(model, config)
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ranks = seams.comm(engine).world_size
    part = max(1, -(-sum(sizes) // ranks))
    owners = {name: start // part for name, start in zip(names, accumulate(sizes, initial=0), strict=False)}

    def wrap(reduce: seams.ReduceBucket) -> seams.ReduceBucket:
        def reduce_owned(bucket: seams.Bucket) -> list[Tensor]:
            lost = [param.name for param in bucket.members if owners.get(param.name, 0) >= ranks]
            if lost:
                raise KeyError(f"no rank owns {lost}")
            return reduce(bucket)

        return reduce_owned

    seams.wrap_reduce_bucket(engine, wrap)
    return engine
