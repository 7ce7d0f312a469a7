"""Which smaller ones of anyone's model there are that still train."""

from __future__ import annotations

from itertools import islice

import torch

from zharness.errors import UsageError
from zharness.run.cell import blamed
from zharness.workload import model_spec
from zharness.workload.foreign import put_together, taken_apart
from zharness.workload.reduced import steps_down

TRIED = 40  # each is built and run once; those that leave least come first


def smaller_models(name: str) -> list[str]:
    """In a process of its own: names of smaller models of ``name``, those first that leave least of it."""
    path, changes = taken_apart(name)
    steps = islice(steps_down(model_spec(name).model(0)), TRIED)
    found = (put_together(path, {**changes, **step}) for step in steps)
    return [each for each in found if trains(each)]


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
    """How many modules of the model own parameters."""
    modules = model_spec(name).model(0).modules()
    return sum(any(True for _ in module.parameters(recurse=False)) for module in modules)
