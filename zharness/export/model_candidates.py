"""Find smaller variants of a user's model that still train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from zharness.errors import UsageError
from zharness.run.observe_and_judge import raise_as_usage_error
from zharness.workload import model_spec
from zharness.workload.shrink_model import OMITTED, paths_with_parameters, shrink_candidates
from zharness.workload.user_model import format_user_model_name, parse_user_model_name

MAX_CANDIDATES = 40  # built and run once each, smallest first


def smaller_models(name: str) -> list[str]:
    """Return the names of smaller variants of ``name``, smallest first. Runs in a child process."""
    path, changes = parse_user_model_name(name)
    steps = islice(shrink_candidates(model_spec(name).model(0)), MAX_CANDIDATES)
    found = (format_user_model_name(path, {**changes, **step}) for step in steps)
    return [each for each in found if can_train(each)]


def models_without_modules(name: str) -> list[str]:
    """Return ``name`` without all removable modules, and without each one of them. Runs in a child process."""
    path, changes = parse_user_model_name(name)

    def remove_modules(modules: Sequence[str]) -> str:
        return format_user_model_name(path, {**changes, **dict.fromkeys(modules, OMITTED)})

    removable: list[str] = []
    for each in islice(paths_with_parameters(model_spec(name).model(0)), MAX_CANDIDATES):
        inside = any(each.startswith(f"{outer}.") for outer in removable)
        if not inside and can_train(remove_modules([*removable, each])):
            removable.append(each)
    return [
        remove_modules(some)
        for some in ([removable, *([each] for each in removable)] if len(removable) > 1 else [removable])
        if some
    ]


def can_train(name: str) -> bool:
    """Return whether plain PyTorch runs a forward and a backward of the model, which may lack modules that it needs."""
    try:
        with raise_as_usage_error(name):
            spec = model_spec(name)
            batch = spec.micro_batch(0, 0, 0)
            loss = spec.loss(batch.feed(spec.model(0)), batch.target)
            loss.backward()  # type: ignore[no-untyped-call]
            return bool(torch.isfinite(loss))
    except UsageError:
        return False


def count_parameter_owners(name: str) -> int:
    """Count the modules that own parameters which no earlier module owns.

    A PEFT adapter and the layer that it wraps count as one, since they compute one output from one input.
    """
    seen: set[int] = set()

    def count_owners(module: nn.Module) -> int:
        adapter = isinstance(getattr(module, "base_layer", None), nn.Module)
        new = {id(each) for each in module.parameters(recurse=adapter)} - seen
        seen.update(new)
        return bool(new) + (0 if adapter else sum(count_owners(child) for child in module.children()))

    return count_owners(model_spec(name).model(0))
