"""How one verb of a program calls the model, on the engine and on plain PyTorch alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zharness.law_kit.optimizers import ADAM, NESTEROV, SCHEDULE, TRAJECTORY_OPTIMIZERS
from zharness.workload import Batch, ModelSpec
from zharness.workload.programs import Act, LayerKind, Mark, Program, Verb

OPTIMIZERS = {
    **TRAJECTORY_OPTIMIZERS,
    "adam": replace(ADAM, schedule=SCHEDULE),
    "nesterov": replace(NESTEROV, schedule=SCHEDULE),
}

EDITED_VALUE = 0.125  # what an edit fills a weight with, exact in every dtype

FORWARD_ACTS = (Act.FORWARD, Act.NO_GRAD, Act.INFERENCE, Act.EVALUATION, Act.EVALUATION_GRAD)

NO_GRAD_ACTS = (Act.NO_GRAD, Act.EVALUATION)

EVAL_MODE_ACTS = (Act.EVALUATION, Act.EVALUATION_GRAD)


def make_model_kwargs(program: Program, spec: ModelSpec, micro: int) -> dict[str, bool]:
    """The keyword that a model is called with of which a part is used in every second micro-batch."""
    if any(layer.kind is LayerKind.SOMETIMES for layer in program.walk()):
        return {"odd": micro % 2 == 1}
    return {} if program.layers or spec.name != "changing" else {"branch": micro % 2 == 1}


def apply_input_marks(batch: Batch, verb: Verb, rank: int, micro: int) -> Batch:
    """A micro-batch of ``rank`` as the marks of ``verb`` have it."""
    if Mark.FEW in verb.marks:
        # Not one alone: a product with a vector rounds otherwise where its weights begin at another address.
        rows = 2 + (rank + micro) % max(1, batch.num_samples - 2)
        batch = batch.map_tensors(lambda tensor: tensor[:rows])
    return replace(batch, inputs={"x": batch.inputs}) if Mark.KEYWORD in verb.marks else batch


def call_with_extra_kwargs(batch: Batch, call: Callable[..., Any], extra_kwargs: dict[str, bool]) -> Any:
    """What ``call`` makes of the inputs, with ``words`` beside them."""
    return batch.feed(lambda *args, **kwargs: call(*args, **kwargs, **extra_kwargs))


def get_grad_mode(act: Act) -> Any:
    """What a forward runs in."""
    if act is Act.INFERENCE:
        return torch.inference_mode()
    return torch.no_grad() if act in NO_GRAD_ACTS else nullcontext()


def compute_input_grad(act: Act, call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """The gradient of the summed output with respect to the inputs, by autograd.grad or by torch.func.grad."""
    if act is Act.TRANSFORM:
        grad: Tensor = torch.func.grad(lambda x: call(x).sum())(leaf.detach())
        return grad
    (found,) = torch.autograd.grad(call(leaf).sum(), leaf)
    return found


def choose_edited_parameter(spec: ModelSpec, seed: int, weights_version: int) -> str:
    """The parameter that an edit of the weights of ``era`` writes: each time another one."""
    names = [name for name, parameter in spec.model(seed).named_parameters() if parameter.requires_grad]
    return names[weights_version % len(names)]
