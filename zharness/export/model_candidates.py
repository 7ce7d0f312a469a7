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

MAX_CANDIDATES = 40  # variants that are built and run once each, the smallest first


def smaller_models(name: str) -> list[str]:
    """Return the names of smaller variants of the user's model ``name`` that still train, the smallest first.

    The function runs in a child process.
    """
    path, changes = parse_user_model_name(name)
    steps = islice(shrink_candidates(model_spec(name).model(0)), MAX_CANDIDATES)
    candidates = (format_user_model_name(path, {**changes, **step}) for step in steps)
    return [candidate for candidate in candidates if can_train(candidate)]


def models_without_modules(name: str) -> list[str]:
    """Return the names of variants of the user's model ``name`` from which modules were removed.

    The first variant lacks all modules that can be removed together, and each of the others lacks one of these modules.
    The function runs in a child process.
    """
    path, changes = parse_user_model_name(name)

    def remove_modules(modules: Sequence[str]) -> str:
        return format_user_model_name(path, {**changes, **dict.fromkeys(modules, OMITTED)})

    removable: list[str] = []
    for module_path in islice(paths_with_parameters(model_spec(name).model(0)), MAX_CANDIDATES):
        inside = any(module_path.startswith(f"{outer}.") for outer in removable)
        if not inside and can_train(remove_modules([*removable, module_path])):
            removable.append(module_path)
    return [
        remove_modules(modules)
        for modules in ([removable, *([path] for path in removable)] if len(removable) > 1 else [removable])
        if modules
    ]


def can_train(name: str) -> bool:
    """Return whether plain PyTorch can run a forward and a backward of the variant ``name``.

    A variant cannot be trained if it lacks modules that its forward needs.
    """
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
    """Count the modules of the model ``name`` that own at least one parameter which no earlier module owns.

    A PEFT adapter and the layer that it wraps count as one module, since together they compute one output from one
    input.
    """
    seen: set[int] = set()

    def count_owners(module: nn.Module) -> int:
        """Return the number of owners in ``module``, and add their parameters to ``seen``."""
        adapter = isinstance(getattr(module, "base_layer", None), nn.Module)
        new = {id(parameter) for parameter in module.parameters(recurse=adapter)} - seen
        seen.update(new)
        return bool(new) + (0 if adapter else sum(count_owners(child) for child in module.children()))

    return count_owners(model_spec(name).model(0))
