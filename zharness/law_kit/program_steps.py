"""Define how a program calls its model, so that the engine and plain PyTorch run the same code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zharness.law_kit.integer_steps import SIGN_STEPS
from zharness.law_kit.optimizers import ADAM, NESTEROV, SCHEDULE, TRAJECTORY_OPTIMIZERS
from zharness.workload import Batch, ModelSpec
from zharness.workload.programs import Act, LayerKind, Mark, Program, Verb

INTEGERS = "integers"  # the optimizer whose steps keep the weights of exact models integers

OPTIMIZERS = {
    **TRAJECTORY_OPTIMIZERS,
    "adam": replace(ADAM, schedule=SCHEDULE),
    "nesterov": replace(NESTEROV, schedule=SCHEDULE),
    INTEGERS: SIGN_STEPS,
}

EDITED_VALUE = 0.125  # an edit fills a weight with this value, which is exact in every dtype

EDITED_INTEGER = 1.0  # in a program whose weights stay integers

FORWARD_ACTS = (Act.FORWARD, Act.NO_GRAD, Act.INFERENCE, Act.EVALUATION, Act.EVALUATION_GRAD)

NO_GRAD_ACTS = (Act.NO_GRAD, Act.EVALUATION)

EVAL_MODE_ACTS = (Act.EVALUATION, Act.EVALUATION_GRAD)


def make_model_kwargs(program: Program, spec: ModelSpec, micro: int) -> dict[str, bool]:
    """Return keyword arguments that enable a part of the model in every second micro-batch.

    The dictionary is empty if the model has no such part.
    """
    if any(layer.kind is LayerKind.SOMETIMES for layer in program.walk()):
        return {"odd_micro_batch": micro % 2 == 1}
    return {} if program.layers or spec.name != "changing" else {"branch": micro % 2 == 1}


def get_edited_value(program: Program) -> float:
    """Return the number with which an edit fills a weight."""
    return EDITED_INTEGER if program.optimizer == INTEGERS else EDITED_VALUE


def apply_input_marks(batch: Batch, verb: Verb, rank: int, micro: int, program: Program) -> Batch:
    """Return the micro-batch of data coordinate ``rank`` with the changes that the marks (options) of ``verb`` specify.

    In a program whose weights stay integers, the number of rows is a power of two, so that a mean over them rounds
    nothing.
    """
    if Mark.FEW in verb.marks:
        # At least two rows: how a matrix-vector product rounds depends on the alignment of its weights in memory.
        rows = 2 + (rank + micro) % max(1, batch.num_samples - 2)
        if program.optimizer == INTEGERS:
            rows = max(1, batch.num_samples >> 1 + (rank + micro) % 2)
        batch = batch.map_tensors(lambda tensor: tensor[:rows])
    return replace(batch, inputs={"x": batch.inputs}) if Mark.KEYWORD in verb.marks else batch


def call_with_extra_kwargs(batch: Batch, call: Callable[..., Any], extra_kwargs: dict[str, bool]) -> Any:
    """Call the function ``call`` with the inputs of ``batch`` and with ``extra_kwargs``."""
    return batch.feed(lambda *args, **kwargs: call(*args, **kwargs, **extra_kwargs))


def get_grad_mode(act: Act) -> Any:
    """Return the context manager of a forward: ``inference_mode()``, ``no_grad()``, or a context without effect."""
    if act is Act.INFERENCE:
        return torch.inference_mode()
    return torch.no_grad() if act in NO_GRAD_ACTS else nullcontext()


def compute_input_grad(act: Act, call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """Return the gradient of the summed output with respect to the inputs, from autograd.grad or torch.func.grad."""
    if act is Act.TRANSFORM:
        grad: Tensor = torch.func.grad(lambda x: call(x).sum())(leaf.detach())
        return grad
    (found,) = torch.autograd.grad(call(leaf).sum(), leaf)
    return found


def choose_edited_parameter(spec: ModelSpec, seed: int, weights_version: int) -> str:
    """Return the name of the parameter that an edit fills. The next ``weights_version`` selects the next parameter."""
    names = [name for name, parameter in spec.model(seed).named_parameters() if parameter.requires_grad]
    return names[weights_version % len(names)]
