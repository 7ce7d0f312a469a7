"""Which smaller ones of anyone's model there are that still train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from zharness.errors import UsageError
from zharness.run.cell import blamed
from zharness.workload import model_spec
from zharness.workload.foreign import put_together, taken_apart
from zharness.workload.reduced import OUT, modules_with_parameters, steps_down

TRIED = 40  # each is built and run once; those that leave least come first


def smaller_models(name: str) -> list[str]:
    """In a process of its own: names of smaller models of ``name``, those first that leave least of it."""
    path, changes = taken_apart(name)
    steps = islice(steps_down(model_spec(name).model(0)), TRIED)
    found = (put_together(path, {**changes, **step}) for step in steps)
    return [each for each in found if trains(each)]


def models_without_modules(name: str) -> list[str]:
    """In a process of its own: ``name`` without all modules that the rest does without, and without each of them."""
    path, changes = taken_apart(name)

    def without(modules: Sequence[str]) -> str:
        return put_together(path, {**changes, **dict.fromkeys(modules, OUT)})

    spare: list[str] = []
    for each in islice(modules_with_parameters(model_spec(name).model(0)), TRIED):
        inside = any(each.startswith(f"{outer}.") for outer in spare)
        if not inside and trains(without([*spare, each])):
            spare.append(each)
    return [without(some) for some in ([spare, *([each] for each in spare)] if len(spare) > 1 else [spare]) if some]


def trains(name: str) -> bool:
    """Whether plain PyTorch makes a forward and a backward of the model: modules left out may have been needed."""
    try:
        with blamed(name):
            spec = model_spec(name)
            batch = spec.micro_batch(0, 0, 0)
            loss = spec.loss(batch.through(spec.model(0)), batch.target)
            loss.backward()  # type: ignore[no-untyped-call]
            return bool(torch.isfinite(loss))
    except UsageError:
        return False


def owners_of_parameters(name: str) -> int:
    """How many modules of the model own parameters that no module before them owns.

    An adapter of PEFT's is one with the layer that it is around: they make one output of one input.
    """
    seen: set[int] = set()

    def owned(module: nn.Module) -> int:
        adapter = isinstance(getattr(module, "base_layer", None), nn.Module)
        new = {id(each) for each in module.parameters(recurse=adapter)} - seen
        seen.update(new)
        return bool(new) + (0 if adapter else sum(owned(child) for child in module.children()))

    return owned(model_spec(name).model(0))
