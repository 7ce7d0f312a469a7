"""Read the plan for tensor parallelism that a model of the transformers package ships (``tp_plan="auto"``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from zharness.errors import UsageError
from zharness.workload.synchronized_norm import has_synchronized_norm

SHOWN = 4  # paths in a line


def read_shipped_plan(name: str, model: nn.Module, size: int) -> dict[str, str]:
    """Return, by module name, how the plan of ``model``, built by the factory ``name``, splits it over tp of ``size``.

    Raises UsageError if the model has no plan, has heads that ``size`` does not divide, ties a weight of the plan, or
    has a SyncBatchNorm.
    """
    patterns = getattr(model, "tp_plan", None)
    if not patterns:
        raise UsageError(
            f"the model of {name} ships no plan for the axis tp: its attribute tp_plan is missing or empty; check it "
            "without --mesh"
        )
    if has_synchronized_norm(model):
        raise UsageError(
            f"the model of {name} has a SyncBatchNorm, which would count each row once for every rank along tp; check "
            "it without --mesh, or on --mesh rep2"
        )
    heads = getattr(getattr(model, "config", None), "num_key_value_heads", None) or size
    if heads % size:
        raise UsageError(f"the {heads} key-value heads of {name} cannot be split over tp{size}")
    modules = dict(model.named_modules())
    plan = {path: word for path, word in match_patterns(model) if is_splittable(modules.get(path))}
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module_name in plan:
        if id(modules[module_name].weight) in shared:
            raise UsageError(f"the plan of {name} splits {module_name}, whose weight is tied to an embedding")
    return plan


def is_splittable(module: nn.Module | None) -> bool:
    """Return whether zharness's engines can split such a module of a shipped plan; ``None`` stands for a parameter."""
    return isinstance(module, nn.Linear)


def match_patterns(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path of each module and parameter that a pattern of the shipped plan matches, with the plan's word."""
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
    patterns: Mapping[str, str] = model.tp_plan  # type: ignore[assignment]  # an attribute that nn.Module does not know
    for path in paths:
        for pattern, word in patterns.items():
            if fnmatchcase(path, pattern):
                yield path, word


def describe_unsplit_parts(model: nn.Module) -> str:
    """Return the parts of ``model``'s shipped plan that every rank keeps whole, or '' if all parts are split.

    transformers also plans parameters of experts (``packed_colwise``) and embeddings (``embedding_rowwise``), for which
    zharness's engines have no word. A module that is not split gives the same numbers, so no comparison would find it.
    """
    split = {path for path, module in model.named_modules() if is_splittable(module)}
    matches = match_patterns(model)
    unsplit = [f"{path} ({word})" for path, word in matches if not {path, path.rpartition(".")[0]} & split]
    return ", ".join(unsplit[:SHOWN]) + (f" and {len(unsplit) - SHOWN} more" if len(unsplit) > SHOWN else "")
