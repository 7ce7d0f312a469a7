"""Choose the modules that FSDP1 wraps and to which FSDP2 applies ``fully_shard``: one group of parameters for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from zharness.errors import ConfigError

LEAF, BLOCK, ROOT = "leaf", "block", "root"
GROUPING_OPTIONS = {
    "grouping": "'leaf' (default): one group per module that owns parameters; 'block': one per member of a ModuleList "
    "or Sequential; 'root': a single group",
    "in_root": "names of modules that belong to the root's group, as its forward reads their weights; default []",
}


def select_group_modules(model: nn.Module, grouping: str, in_root: Sequence[str] = ()) -> list[nn.Module]:
    """Return the modules below ``model`` that get a parameter group; all other parameters are in the root's group.

    FSDP unshards a group around the forward of its module. Therefore a module that owns parameters includes its
    submodules (its forward may read their weights without calling them, as MultiheadAttention reads out_proj.weight),
    a container without forward is not a group, and tied parameters are in the root's group. ``in_root`` names modules
    that get no group. Raises ConfigError for an unknown grouping or module name.
    """
    if grouping not in (LEAF, BLOCK, ROOT):
        raise ConfigError.unknown_name("grouping", grouping, [LEAF, BLOCK, ROOT])
    modules = dict(model.named_modules())
    for name in in_root:
        if name not in modules:
            raise ConfigError.unknown_name("module in in_root", name, sorted(filter(None, modules)))
    if grouping == ROOT:
        return []
    excluded = {id(modules[name]) for name in in_root}
    owners = Counter(id(param) for module in model.modules() for param in direct_parameters(module))
    tied = frozenset(key for key, count in owners.items() if count > 1)
    if grouping == BLOCK:
        selected = {id(module): module for module in topmost_blocks(model, tied)}
    else:
        selected = {id(module): module for child in model.children() for module in topmost_owners(child, tied)}
    return [module for key, module in selected.items() if key not in excluded]


def topmost_owners(module: nn.Module, tied: frozenset[int]) -> Iterator[nn.Module]:
    """Yield the topmost modules from ``module`` down that own parameters and contain none of ``tied``.

    ``tied`` has the ids of tied parameters.
    """
    owned = direct_parameters(module)
    has_forward = type(module).forward is not nn.Module.forward
    if owned and has_forward and not any(id(param) in tied for param in module.parameters()):
        yield module
    else:
        for child in module.children():
            yield from topmost_owners(child, tied)


def topmost_blocks(module: nn.Module, tied: frozenset[int]) -> Iterator[nn.Module]:
    """Yield the topmost members of ModuleLists and Sequentials that have parameters, but none of ``tied``.

    ``tied`` has the ids of tied parameters.
    """
    for child in module.children():
        params = [id(param) for param in child.parameters()]
        is_block = isinstance(module, (nn.ModuleList, nn.Sequential)) and type(child).forward is not nn.Module.forward
        if is_block and params and not tied.intersection(params):
            yield child
        else:
            yield from topmost_blocks(child, tied)


def direct_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that ``module`` registers itself, without those of submodules."""
    return list(module.parameters(recurse=False))
