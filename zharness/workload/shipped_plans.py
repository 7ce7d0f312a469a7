"""Read the plan for tensor parallelism that a model of the transformers package ships (``tp_plan="auto"``)."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from zharness.errors import UsageError
from zharness.workload.synchronized_norm import has_synchronized_norm


def read_shipped_plan(name: str, model: nn.Module, size: int) -> dict[str, str]:
    """Return by module name how ``model``, of the factory ``name``, says that the axis tp of ``size`` splits it.

    Raises UsageError if the model has no plan, has heads that ``size`` does not divide, ties a weight of the plan, or
    has a SyncBatchNorm.
    """
    patterns = getattr(model, "tp_plan", None)
    if not patterns:
        raise UsageError(
            f"the model of {name} ships no plan for the axis tp (tp_plan), as many models of transformers do; "
            "check it without --mesh"
        )
    if has_synchronized_norm(model):
        raise UsageError(
            f"the model of {name} has a SyncBatchNorm, which would count each row once for every rank along tp; check "
            "it without --mesh, or on --mesh rep2"
        )
    heads = getattr(getattr(model, "config", None), "num_key_value_heads", None) or size
    if heads % size:
        raise UsageError(f"the {heads} key-value heads of {name} cannot be split over tp{size}")
    modules = {module_name: module for module_name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plan = {
        module_name: word
        for module_name in modules
        for pattern, word in patterns.items()
        if fnmatchcase(module_name, pattern)
    }
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module_name in plan:
        if id(modules[module_name].weight) in shared:
            raise UsageError(f"the plan of {name} splits {module_name}, whose weight is tied to an embedding")
    return plan
