"""Do the work that a schedule of torch leaves to the caller: tied weights, the norm and parameter names over stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zharness.engines.torch_access import local_tensor
from zharness.engines.torch_gathers import gather_full_tensor
from zharness.errors import ConfigError


def refuse_tied_weights(model: nn.Module, names: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError if two stages have a weight in common, because ``fully_shard`` makes one for each stage.

    ``names`` has the modules of each stage.
    """
    owners: dict[int, int] = {}
    for stage, modules in enumerate(names):
        for module in modules:
            for name, param in model.get_submodule(module).named_parameters():
                if owners.setdefault(id(param), stage) != stage:
                    raise ConfigError(
                        f"the weight {module}.{name} of stage {stage} is tied to one of stage {owners[id(param)]}; "
                        "fully_shard makes a parameter of its own for each stage, so that they would drift apart"
                    )


@contextmanager
def keep_ties(model: nn.Module) -> Iterator[None]:
    """Tie weights again that ``parallelize_module`` unties inside the block: it makes a parameter for each use."""
    uses: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(param, []).append(name)
    yield
    for param, names in uses.items():
        split = [name for name in names if model.get_parameter(name) is not param]
        for name in names if split else ():
            path, _, last = name.rpartition(".")
            model.get_submodule(path).register_parameter(last, model.get_parameter(split[0]))


def describe_part(param: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype of this rank's part of a parameter."""
    return local_tensor(param.detach()).shape, param.dtype


class TiedWeights:
    """The weights that stages on several ranks of a pipeline have in common; each rank trains a copy of its own.

    The gradient of such a weight is the sum of the gradients of all copies; an all-reduce after each batch computes it.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        """Find the tied weights. This is a collective of ``group``, the ranks of one pipeline."""
        kinds: list[Mapping[str, tuple[torch.Size, torch.dtype]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(kinds, {name: describe_part(p) for name, p in params.items()}, group=group)
        owners: dict[str, list[int]] = {}
        for rank, owned in enumerate(kinds):
            for name in owned:
                owners.setdefault(name, []).append(rank)
        self._params, self._group = params, group
        self._owners = {name: ranks for name, ranks in owners.items() if len(ranks) > 1}
        self._kinds = {name: kinds[ranks[0]][name] for name, ranks in self._owners.items()}
        self._earlier_grads: dict[str, Tensor | None] = {}

    def begin_batch(self) -> None:
        """Set the gradients of earlier batches aside, because they are summed over the copies already."""
        own = [name for name in self._owners if name in self._params]
        self._earlier_grads = {name: self._params[name].grad for name in own}
        for name in own:
            self._params[name].grad = None

    def end_batch(self) -> None:
        """Add up the gradients of all copies, and those of earlier batches. This is a collective."""
        used = self._find_used()
        for name in self._owners:
            param = self._params.get(name)
            if param is not None and param.grad is None and name in used:
                param.grad = torch.zeros_like(param)
            grad = self._zeros(name) if param is None or param.grad is None else param.grad
            if name in used:
                dist.all_reduce(local_tensor(grad), group=self._group)
            if param is not None:
                kept = self._earlier_grads[name]
                param.grad = kept if name not in used else grad if kept is None else kept + grad

    def _find_used(self) -> set[str]:
        """Return the names of the tied weights that have a gradient on any rank. This is a collective."""
        own = [name for name in self._owners if name in self._params and self._params[name].grad is not None]
        found: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(found, own, group=self._group)
        return {name for names in found for name in names}

    def _zeros(self, name: str) -> Tensor:
        """Return the zeros that a rank without the weight, or without a gradient of it, adds to the sum."""
        shape, dtype = self._kinds[name]
        return torch.zeros(shape, dtype=dtype, device=next(iter(self._params.values())).device)

    def is_counted(self, name: str) -> bool:
        """Return whether this rank counts the weight in sums over stages: only the first rank with the weight does."""
        return self._owners.get(name, [dist.get_rank(self._group)])[0] == dist.get_rank(self._group)


def clip_over_stages(
    params: Mapping[str, nn.Parameter], limit: float, tied: TiedWeights, group: dist.ProcessGroup
) -> float:
    """Clip the gradients to the global norm ``limit`` over all stages, and return the norm that they had.

    Each stage computes the norm of its own gradients by ``get_total_norm``, as torchtitan does. This is a collective.
    """
    grads = [param.grad for name, param in params.items() if param.grad is not None and tied.is_counted(name)]
    squares = gather_full_tensor(torch.nn.utils.get_total_norm(grads)).square()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(params.values(), limit, norm)
    return float(norm)


def build_named_tree(params: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that has each tensor under its name in the model, which is also its name in a checkpoint.

    If two stages have a weight in common, it has the name of its first use on every rank, so that an engine with other
    stages can load it, too.
    """
    root = nn.Module()
    for name, tensor in {**params, **buffers}.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        if name in params:
            parent.register_parameter(last, params[name])
        else:
            parent.register_buffer(last, tensor)
    return root
