"""Build torch.optim optimizers and learning-rate schedules from an OptimizerSpec, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from zharness.engines.protocol import OptimizerSpec
from zharness.errors import UsageError

# torch's elementwise optimizers: updating a shard gives the shard of the updated tensor.
ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW),
        *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.SGD,
    )
}
# torch's optimizers that need whole matrices: updating a shard does not give the shard of the updated matrix.
MATRIX: dict[str, type[torch.optim.Optimizer]] = (
    {"muon": torch.optim.Muon} if hasattr(torch.optim, "Muon") else {}  # since 2.9
)


def param_groups(params: Mapping[str, Tensor], spec: OptimizerSpec) -> list[dict[str, Any]]:
    """Return torch.optim's parameter groups: first the unmatched parameters, then one group for each pattern."""
    rest = dict(params)
    groups: list[dict[str, Any]] = []
    for group in spec.groups:
        names = [name for name in rest if fnmatchcase(name, group.pattern)]
        if names:
            groups.append({"params": [rest.pop(name) for name in names], **group.overrides})
    first_group = [{"params": list(rest.values())}] if rest else []
    return first_group + groups


def build(params: Mapping[str, Tensor], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """Build the optimizer of ``spec`` over ``params``, which maps names to tensors.

    Raises UsageError for an unknown optimizer.
    """
    return optimizer_class(spec.name)(param_groups(params, spec), **spec.args)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return torch.optim's class for the lower-case ``name``. Raises UsageError for an unknown name."""
    known = {**ELEMENTWISE, **MATRIX}
    if name not in known:
        raise UsageError.unknown_name("optimizer", name, sorted(known))
    return known[name]


def reason_not_in_torch(spec: OptimizerSpec) -> str:
    """Return the reason why the installed torch's optimizer takes no argument of ``spec``, or '' if it takes all.

    Raises UsageError for an unknown optimizer.
    """
    parameters = signature(optimizer_class(spec.name)).parameters
    unknown = [name for name in spec.args if name not in parameters]
    return f"{spec.name} of torch {torch.__version__} takes no {', '.join(unknown)}" if unknown else ""


def schedule(optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> torch.optim.lr_scheduler.LambdaLR:
    """Build the schedule of ``spec`` as a LambdaLR; call its ``step()`` after each optimizer step."""
    factors = spec.schedule

    def factor(step: int) -> float:
        return factors[min(step, len(factors) - 1)]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
