"""Split sequences over the axis cp with DeepSpeed's Ulysses.

Ulysses leaves four things to its caller, and this adapter does them. Each rank of a cp group runs the model on its part
of the sequence. Each rank draws its own random numbers for its part. The outputs of the parts are joined, so that every
rank has the whole loss. Attention runs in ``DistributedAttention``, which exchanges parts of the sequence for heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.protocol import EngineConfig
from zharness.errors import ConfigError
from zharness.mesh import CONTEXT
from zharness.workload.generators import fork_seeded_generators, have_drawn_since, read_generator_states
from zharness.workload.nested_tensors import map_tensors

SEQUENCE_DIM = 1  # of inputs, outputs, queries, keys and values; the first dimension is that of samples
HEADS_DIM = 2  # of queries, keys and values


class UlyssesAttention(nn.Module):
    """DeepSpeed's DistributedAttention with the call of the attention module that it replaces."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return this rank's part of the output, for its parts of query, key and value."""
        output: Tensor = self.attention(query, key, value, 0)  # 0 is the dimension of samples
        return output


class JoinParts(torch.autograd.Function):
    """Join the parts of a sequence that the ranks of a group have; every rank gets the whole sequence.

    All ranks compute the same loss from the whole sequence. So the gradient of a rank's part is this part of the rank's
    own gradient. A sum over ranks, as in the backward of torch's all_gather, would multiply it by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Return the parts of all ranks of ``group``, in the order of the ranks."""
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        with torch.autocast(part.device.type, enabled=False):  # the caller's autocast may refuse the parts' dtype
            return torch.cat(parts, dim=SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return this rank's part of the gradient."""
        part: Tensor = TakePart.apply(grads[0], ctx.group)  # type: ignore[no-untyped-call]
        return part, None


class TakePart(torch.autograd.Function):
    """Take this rank's part of a sequence. In backward, every rank gets the gradient of the whole sequence.

    The backward of attention already gives each part the gradient from the outputs of all other parts, so the gradients
    of the parts only have to be joined.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        """Return this rank's part."""
        ctx.group = group
        return take_part(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all parts."""
        whole: Tensor = JoinParts.apply(grads[0], ctx.group)  # type: ignore[no-untyped-call]
        return whole, None


def take_part(whole: Tensor, group: Any) -> Tensor:
    """Return the part of a sequence that this rank of ``group`` has.

    Raises ConfigError if the ranks do not divide it.
    """
    size = dist.get_world_size(group)
    if whole.shape[SEQUENCE_DIM] % size:
        raise ConfigError(f"a sequence of {whole.shape[SEQUENCE_DIM]} tokens cannot be split over cp{size}")
    return whole.chunk(size, dim=SEQUENCE_DIM)[dist.get_rank(group)].contiguous()


@contextmanager
def draw_for_part(place: int) -> Iterator[None]:
    """Seed torch's generators for the part number ``place`` inside the block, from the CPU generator's next number.

    All ranks of a sequence have the same seed, and would otherwise drop the same elements of each part. After the
    block, the CPU's generator has its earlier state; it is one number further if the block drew random numbers.
    """
    with torch.random.fork_rng(devices=[]):
        seed = int(torch.randint(1 << 30, ()))
    with fork_seeded_generators(seed + place):
        seeded = read_generator_states()
        yield
        has_drawn = have_drawn_since(seeded)
    if has_drawn:
        torch.randint(1 << 30, ())


@dataclass(frozen=True)
class SequenceParts:
    """Calls a model with this rank's part of each sequence, and joins the parts of its output.

    ``group`` has the ranks that split a sequence, and ``replaced`` the attention of ``model`` by name, before Ulysses.
    ``join`` returns the whole output for this rank's part and the group.
    """

    group: Any
    model: nn.Module
    replaced: Mapping[str, nn.Module]
    join: Callable[[Tensor, Any], Tensor] = JoinParts.apply

    def call(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the whole output of ``forward`` on the whole tensors ``args`` and ``kwargs``. This is a collective."""
        parts = [self._split(each) for each in args]
        named = {name: self._split(each) for name, each in kwargs.items()}
        with draw_for_part(dist.get_rank(self.group)):
            output = forward(*parts, **named)
        return map_tensors(output, lambda part: self.join(part, self.group) if part.dim() > SEQUENCE_DIM else part)

    def restore_attention(self) -> None:
        """Give the model its own attention back, which needs no other ranks."""
        for name, attention in self.replaced.items():
            replace_module(self.model, name, attention)

    def _split(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > SEQUENCE_DIM:
            return TakePart.apply(value, self.group)  # type: ignore[no-untyped-call]
        return value


def split_sequences(model: nn.Module, config: EngineConfig) -> tuple[SequenceParts | None, Any]:
    """Replace the attention modules of the plan by Ulysses, and return what splits sequences, and DeepSpeed's mpu.

    Returns None twice if the mesh has no axis cp. This is a collective. Raises ConfigError for a model without a plan.
    """
    size = config.mesh.size(CONTEXT)
    if size == 1:
        return None, None
    if not config.cp_plan:
        raise ConfigError("the config has the axis cp, but no cp_plan that names the model's attention")
    mpu = build_sequence_groups(size)
    attention_class: Any = importlib.import_module("deepspeed.sequence.layer").DistributedAttention
    group = mpu.get_sequence_parallel_group()
    replaced = {name: model.get_submodule(name) for name in config.cp_plan}
    for name, attention in replaced.items():
        replace_module(model, name, UlyssesAttention(attention_class(attention, group, HEADS_DIM, SEQUENCE_DIM)))
    return SequenceParts(group, model, replaced), mpu


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` into ``model`` under ``name``."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def build_sequence_groups(size: int) -> Any:
    """Return DeepSpeed's module of sequence-parallel groups of ``size`` neighbours; it keeps them for later engines.

    DeepSpeed also takes ``mesh_param``, or sizes in its JSON. With these it reduces gradients only over data
    parallelism, and not over the parts of a sequence. Raises ConfigError if an open engine has groups of another size.
    """
    mpu: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    if mpu._SEQUENCE_PARALLEL_GROUP is None:
        importlib.import_module("deepspeed").init_distributed(verbose=False)  # initialize is too late for groups
        mpu.initialize_sequence_parallel(size)
    elif mpu.get_sequence_parallel_world_size() != size:
        raise ConfigError(
            f"got cp{size} beside an open engine with cp{mpu.get_sequence_parallel_world_size()}; DeepSpeed has one "
            "size in a process, so close that engine first"
        )
    return mpu
