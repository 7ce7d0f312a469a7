"""Make a user's model smaller by changing its configuration or by omitting some of its modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

# The smallest value of each size in a transformers configuration, by the key that most configurations accept for it.
MIN_SIZES = {
    "num_hidden_layers": 1,
    "num_decoder_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "d_kv": 8,
    "d_ff": 8,
    "vocab_size": 16,
    "max_position_embeddings": 8,
}
OMITTED = "out"  # the value of a module's path that omits the module
Changes = Mapping[str, str]


def shrink_factory_result(factory_result: Any, changes: Changes) -> Any:
    """Return the result of a user's factory with a smaller copy of its model.

    ``changes`` maps keys of the model's configuration to new values, and paths of modules to OMITTED.
    """
    model, *rest = factory_result if isinstance(factory_result, tuple) else (factory_result,)
    sizes = {key: int(value) for key, value in changes.items() if value != OMITTED}
    model = resize_model(model, sizes) if sizes else copy.deepcopy(model)
    for path in (key for key, value in changes.items() if value == OMITTED):
        omit_module(model, path)
    return (model, *rest) if isinstance(factory_result, tuple) else model


def resize_model(model: Any, sizes: Mapping[str, int]) -> Any:
    """Build a model of the same class as ``model`` with the configuration values ``sizes``.

    The new model keeps the dtype, the frozen parameters, the PEFT adapter and the activation checkpointing of
    ``model``.
    """
    base = unwrap_peft(model)
    config = copy.deepcopy(base.config)
    for key, value in sizes.items():
        setattr(config, key, value)
    smaller = type(base)(config)
    if base.dtype.is_floating_point:
        smaller.to(base.dtype)
    smaller.train(base.training)
    recompute = next((m for m in base.modules() if getattr(m, "gradient_checkpointing", False)), None)
    if recompute is not None:
        options = getattr(recompute._gradient_checkpointing_func, "keywords", {})
        smaller.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(options))
    if base is not model:
        from peft import get_peft_model

        (adapter,) = model.peft_config.values()
        return get_peft_model(smaller, copy.deepcopy(adapter))
    frozen = {name for name, parameter in base.named_parameters() if not parameter.requires_grad}
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return smaller


def unwrap_peft(model: Any) -> Any:
    """Return the model inside ``model`` if ``model`` is a PEFT wrapper, else ``model`` itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model


def omit_module(model: nn.Module, path: str) -> None:
    """Delete the module at ``path`` if its parent is a ModuleList; otherwise replace the module by nn.Identity.

    The names of the other modules do not change.
    """
    parent, _, name = path.rpartition(".")
    container = model.get_submodule(parent)
    if isinstance(container, nn.ModuleList):
        delattr(container, name)
    else:
        container.register_module(name, nn.Identity())


def shrink_candidates(model: nn.Module) -> Iterator[dict[str, str]]:
    """Yield changes that make ``model`` smaller, the largest reductions first."""
    config = getattr(unwrap_peft(model), "config", None)
    sizes = {key: getattr(config, key, None) for key in MIN_SIZES}
    above = {key: size for key, size in sizes.items() if isinstance(size, int) and size > MIN_SIZES[key]}
    if above:
        yield {key: str(MIN_SIZES[key]) for key in above}
        yield from ({key: str(MIN_SIZES[key])} for key in above)
        yield from ({key: str(size // 2)} for key, size in above.items() if size // 2 > MIN_SIZES[key])
    for path, container in model.named_modules():
        if isinstance(container, (nn.Sequential, nn.ModuleList)) and config is None:
            names = [name for name, child in container.named_children() if not isinstance(child, nn.Identity)]
            yield from module_runs(path, names)


def paths_with_parameters(model: nn.Module) -> Iterator[str]:
    """Yield the path of every module that has parameters, directly or in a submodule; outer modules come first."""
    for path, module in model.named_modules():
        if path and any(True for _ in module.parameters()):
            yield path


def module_runs(path: str, names: list[str]) -> Iterator[dict[str, str]]:
    """Yield changes that omit consecutive modules of a container, the longest runs of modules first.

    ``path`` is the container's path, and ``names`` are the names of its modules. At least one module remains.
    """
    prefix = f"{path}." if path else ""
    length = len(names) - 1
    while length > 0:
        last = len(names) - length
        for start in sorted({*range(0, last, max(1, length // 2)), last}):
            yield {f"{prefix}{name}": OMITTED for name in names[start : start + length]}
        length //= 2
