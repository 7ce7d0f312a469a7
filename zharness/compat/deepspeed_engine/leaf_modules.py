"""Stand in for ``deepspeed.utils``' functions that mark leaf modules.

DeepSpeed's stage 3 fetches all parameters of a leaf module at once, so that ranks may use different ones. The reference
engine fetches a parameter when it is read; a model with a mark runs inside its ``uneven()``, which allows the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_FLAG = "_z3_leaf"  # DeepSpeed's own name of the attribute


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether ``model`` itself is marked as a leaf module."""
    return bool(getattr(model, _FLAG, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that are marked as leaf modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark ``model`` itself as a leaf module, or remove the mark."""
    setattr(model, _FLAG, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given as types or names, and return them. Raises ValueError if none match."""
    return _set_flags(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of modules of these classes, and return the modules. Raises ValueError if none match."""
    return _set_flags(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names in ``named_modules()``; return them and the names that do not exist."""
    modules = dict(model.named_modules())
    found = {name: [modules[name]] if name in modules else [] for name in module_names}
    return _set_found(found, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end with one of these suffixes; return them and the suffixes without a match."""
    found = {
        suffix: [module for name, module in model.named_modules() if name.endswith(suffix)]
        for suffix in module_name_suffixes
    }
    return _set_found(found, flag, raise_if_not_found)


def _set_found(
    found: dict[str, list[nn.Module]], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    """Set the marks of all ``found`` modules; return them once each, and the keys that found none."""
    missing = [key for key, modules in found.items() if not modules]
    if missing and raise_if_not_found:
        raise ValueError(f"No modules named {missing} found in the model")
    matched = list(dict.fromkeys(module for modules in found.values() for module in modules))
    for module in matched:
        set_z3_leaf_module(module, flag)
    return matched, missing


def _set_flags(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    """Set the marks of the modules of ``classes`` and return these modules."""
    matched = [module for module in model.modules() if any(_is_instance(module, wanted) for wanted in classes)]
    if not matched and raise_if_not_found:
        raise ValueError(f"No modules of type {list(classes)} found in model {model}")
    for module in matched:
        set_z3_leaf_module(module, flag)
    return matched


def _is_instance(module: nn.Module, wanted: type | str) -> bool:
    """Return whether ``module`` is of the type ``wanted``, or of the class with that name, qualified or not."""
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}")
