"""Define functions and constants that several laws of the group ``access`` use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zharness.engines.protocol import Absent, AccumulationOwner, Engine, Feature, OptimizerSpec, Piece
from zharness.engines.tensor_access import SupportsReadOut
from zharness.errors import EngineContractError
from zharness.law_kit.law import Law
from zharness.law_kit.optimizers import ADAMW
from zharness.law_kit.rank_context import RankContext
from zharness.parity import Tier
from zharness.workload.generators import draw_on_cpu

SIMILAR, ALIGNED = "similar", "aligned"
ACCUMULATION_STEPS = 2  # a power of two, by which a division is exact
CLIP = 2.0**-6  # far below the norm of the gradients, so that it clips
# With these settings every entry of the state is a multiple of the gradients by a power of two.
MOMENTUM_SGD = OptimizerSpec(name="sgd", args={"lr": 0.5, "momentum": 0.5})
EXACT_ADAM = OptimizerSpec(name="adam", args={"lr": 2.0**-6, "betas": (0.5, 0.75), "eps": 2.0**-10})
STATE_KEYS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq")}
STATE_OPTIMIZERS = {"momentum": MOMENTUM_SGD, "adam": EXACT_ADAM, "groups": ADAMW}


class Kind(Enum):
    """The kinds of tensors that an engine reads and replaces by the name of a parameter."""

    GRAD = "grad"
    PARAM = "param"
    STATE = "state"


OWNER_FEATURES = {
    AccumulationOwner.CALLER: Feature.CALLER_ACCUMULATION,
    AccumulationOwner.ENGINE: Feature.ENGINE_ACCUMULATION,
}


def access_law(
    name: str, statement: str, observe: Callable[..., None], judge: Callable[..., Any], **law_fields: Any
) -> Law:
    """Build a law of the group ``access``. ``law_fields`` are values for further fields of Law."""
    fields = {"tier": Tier.STAGED, "models": (SIMILAR,), **law_fields}
    return Law(name=f"access.{name}", statement=statement, observe=observe, judge=judge, **fields)


def trained_names(engine: Engine) -> list[str]:
    """Return the names of the parameters that require a gradient, in the order of the model."""
    return [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def read_all(names: Iterable[str], read: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Call ``read`` with each name, in reverse order, and return the tensors by name; results of None are left out.

    An engine fills its buffers in the order of the model, so another order finds an engine that depends on this order.
    """
    read_tensors = {name: read(name) for name in reversed(list(names))}
    return {name: tensor for name, tensor in read_tensors.items() if tensor is not None}


def write_copy(write: Callable[[Tensor], None], value: Tensor) -> None:
    """Call ``write`` with a copy of ``value``, and then overwrite the copy, as a caller may do.

    A matrix is passed with the strides of a transposed tensor.
    """
    copy = value.t().clone(memory_format=torch.contiguous_format).t() if value.dim() == 2 else value.clone()
    write(copy)
    copy.fill_(torch.nan)


def read_state(engine: SupportsReadOut, names: Iterable[str], optimizer: OptimizerSpec) -> dict[str, Tensor]:
    """Read the optimizer's state by name and key, and return a flat dictionary with keys ``parameter/key``."""
    paths = [f"{name}/{key}" for name in names for key in STATE_KEYS[optimizer.name]]
    return read_all(paths, lambda path: engine.read_optimizer_state(*path.rsplit("/", 1)))


def optimizer_weights(engine: Engine) -> dict[str, Tensor]:
    """Return the trained weights that the optimizer updates: master weights, or the parameters themselves."""
    masters = engine.observe().masters
    weights = engine.full_params() if isinstance(masters, Absent) else masters
    names = trained_names(engine)
    missing = [name for name in names if name not in weights]
    if missing:
        raise EngineContractError(f"observe().masters has no weight of {', '.join(missing)}")
    return {name: weights[name] for name in names}


def new_values(like: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return random tensors with the shapes and dtypes of ``like``. Their values are exact in bf16.

    The values are in {1, 2, 3, 4, 6, 8} times a power of two and a sign; another ``seed`` gives other values.
    """
    values = {}
    with draw_on_cpu():
        generator = torch.Generator().manual_seed(seed)
        magnitudes = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0, 8.0])
        for index, (name, tensor) in enumerate(like.items()):
            drawn = magnitudes[torch.randint(len(magnitudes), tuple(tensor.shape), generator=generator)]
            signs = 1 - 2 * torch.randint(2, tuple(tensor.shape), generator=generator)
            values[name] = (drawn * signs * 2.0 ** (index % 3 - 2)).to(tensor.device, tensor.dtype)
    return values


def own_shard(engine: Engine, name: str, value: Tensor, like: Tensor) -> Tensor:
    """Return the elements of ``value`` that ``layout()`` assigns to this rank, zero-padded to the size of ``like``."""
    layout = engine.layout().get(name, (Piece(dist.get_rank(), 0, value.numel()),))
    pieces = [value.flatten()[piece.start : piece.stop] for piece in layout if piece.rank == dist.get_rank()]
    elements = torch.cat([value.new_empty(0), *pieces])
    return torch.cat([elements, elements.new_zeros(like.numel() - elements.numel())]).to(like.dtype)


def accumulation_window(boundary: int) -> range:
    """Return the numbers of the micro-batches of accumulation window number ``boundary``, counted from 0."""
    return range(boundary * ACCUMULATION_STEPS, (boundary + 1) * ACCUMULATION_STEPS)


def train_micro_batch(ctx: RankContext, engine: Engine, step: int) -> None:
    """Run forward and backward of micro-batch ``step``, and record the loss."""
    engine.backward(ctx.loss(engine, step))
