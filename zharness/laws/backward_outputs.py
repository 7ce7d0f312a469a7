"""Define the laws of the group ``backward`` about containers of outputs, and about outputs of one autograd node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zharness.errors import EngineContractError
from zharness.law_kit.law import Variant
from zharness.law_kit.scenario_law import BACKWARD_FEATURES, scenario_law
from zharness.law_kit.scenarios import Participant, Scenario


class NamedTupleOutput(NamedTuple):
    """A model output that is a named tuple of two tensors."""

    output: Tensor
    extra: Tensor


@dataclass(frozen=True)
class DataclassOutput:
    """A model output that is a dataclass, which torch.utils._pytree treats as a leaf."""

    output: Tensor
    extra: Tensor
    count: int = 2


Pack = Callable[[Tensor, Tensor], Any]

# The containers in which a model may return its output, with the function that takes the output from the container.
OUTPUT_CONTAINERS: Mapping[str, tuple[Pack, Callable[[Any], Tensor]]] = {
    "tuple": (lambda output, extra: (output, extra), lambda packed: packed[0]),
    "list": (lambda output, extra: [extra.detach(), output], lambda packed: packed[1]),
    "dict": (lambda output, extra: {"output": output, "extra": extra, "none": None}, lambda packed: packed["output"]),
    "named_tuple": (NamedTupleOutput, lambda packed: packed.output),
    "dataclass": (DataclassOutput, lambda packed: packed.output),
    "nested": (
        lambda output, extra: {"deep": [(extra.argmax(), DataclassOutput(output, extra))]},
        lambda packed: packed["deep"][0][1].output,
    ),
}
BOTH = "both"


def note_types(pack: Pack) -> tuple[Pack, list[type]]:
    """Return a function that calls ``pack``, and the list of the types of the containers that ``pack`` has made.

    An engine may train a deep copy of the model. The copy calls the same function, because deepcopy copies no
    functions.
    """
    packed_types: list[type] = []

    def pack_and_note(output: Tensor, extra: Tensor) -> Any:
        """Return the container, and note its type."""
        packed = pack(output, extra)
        packed_types.append(type(packed))
        return packed

    return pack_and_note, packed_types


def require_type(packed: Any, packed_type: type) -> None:
    """Raise EngineContractError if the engine's container ``packed`` is not of the model's type ``packed_type``."""
    if type(packed) is not packed_type:
        raise EngineContractError(
            f"the model returned a {packed_type.__name__}, and the engine's forward a {type(packed).__name__}"
        )


def run_forward(participant: Participant, pack: Pack) -> Any:
    """Run the forward of a model that returns its output through ``pack``, and return the container.

    Raises EngineContractError if the engine returns a container of another type than the model.
    """
    pack_and_note, packed_types = note_types(pack)
    packed = participant.call(participant.inputs(), pack=pack_and_note)
    if packed_types:
        require_type(packed, packed_types[-1])
    return packed


def outputs(participant: Participant) -> None:
    """Train with a loss of one output in a container, or with a loss of both outputs in a named tuple."""
    if participant.variant == BOTH:
        packed = run_forward(participant, NamedTupleOutput)
        participant.tensor_backward(participant.loss(packed.output) + packed.extra.sum())
        return
    pack, unpack = OUTPUT_CONTAINERS[participant.variant]
    participant.tensor_backward(participant.loss(unpack(run_forward(participant, pack))))


# Ways to return two outputs of one autograd node. Each output has half of the columns.
SHARED_OUTPUTS: Mapping[str, Pack] = {
    "chunk": lambda output, extra: output.chunk(2, dim=-1),
    "split": lambda output, extra: torch.split(output, [8, 8], dim=-1),
    "unbind": lambda output, extra: output.view(*output.shape[:-1], 2, 8).unbind(dim=-2),
    "views": lambda output, extra: (output[..., :8], output[..., 8:]),
    "same_tensor": lambda output, extra: (output, output),
}
ONE_OF = "one_of_"


def shared_grad_fn(participant: Participant) -> None:
    """Train with two outputs of one autograd node. The loss uses both or, in half of the law variants, one output."""
    pack = SHARED_OUTPUTS[participant.variant.removeprefix(ONE_OF)]
    parts = participant.call(participant.inputs(), pack=pack)
    target = participant.get_batch(0).target[..., : parts[0].shape[-1]]
    used = parts[1:] if participant.variant.startswith(ONE_OF) else parts
    loss = sum((number + 1) * (part * target).sum() for number, part in enumerate(used))
    assert isinstance(loss, Tensor)
    participant.tensor_backward(loss)


LAWS = (
    scenario_law(
        "backward",
        Scenario(outputs),
        "gradients are plain PyTorch's for every container of outputs, whichever outputs the loss uses",
        kept_because="the only law that returns outputs in containers, some of them unused",
        features=BACKWARD_FEATURES,
        variants=tuple(map(Variant, (*OUTPUT_CONTAINERS, BOTH))),
    ),
    scenario_law(
        "backward",
        Scenario(shared_grad_fn),
        "gradients are plain PyTorch's for outputs of one autograd node, whichever outputs the loss uses",
        kept_because="the only outputs that share a grad_fn, where a hook for each output runs several times",
        features=BACKWARD_FEATURES,
        variants=tuple(Variant(prefix + name) for name in SHARED_OUTPUTS for prefix in ("", ONE_OF)),
    ),
)
