"""Anyone's model made smaller: by its configuration, or without some of its modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

# Of a configuration of the transformers package, by the names that its attribute maps share, and how small each gets.
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
OMITTED = "out"  # of a module: it is left out
Changes = Mapping[str, str]


def shrink_factory_result(factory_result: Any, changes: Changes) -> Any:
    """What a factory returned, its model made smaller: a configuration's key to its value, a module's path to OUT."""
    model, *rest = factory_result if isinstance(factory_result, tuple) else (factory_result,)
    sizes = {key: int(value) for key, value in changes.items() if value != OMITTED}
    model = resize_model(model, sizes) if sizes else copy.deepcopy(model)
    for path in (key for key, value in changes.items() if value == OMITTED):
        omit_module(model, path)
    return (model, *rest) if isinstance(factory_result, tuple) else model


def resize_model(model: Any, sizes: Mapping[str, int]) -> Any:
    """A model of the same class in the sizes given, PEFT's adapters and the same checkpointing around it."""
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
        kept = getattr(recompute._gradient_checkpointing_func, "keywords", {})
        smaller.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(kept))
    if base is not model:
        from peft import get_peft_model

        (adapter,) = model.peft_config.values()
        return get_peft_model(smaller, copy.deepcopy(adapter))
    frozen = {name for name, parameter in base.named_parameters() if not parameter.requires_grad}
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return smaller


def unwrap_peft(model: Any) -> Any:
    """The model that PEFT wrapped; any other is its own."""
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model


def omit_module(model: nn.Module, path: str) -> None:
    """A module of a list is gone, any other becomes nn.Identity: the others keep their names."""
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    if isinstance(holder, nn.ModuleList):
        delattr(holder, name)
    else:
        holder.register_module(name, nn.Identity())


def shrink_candidates(model: nn.Module) -> Iterator[dict[str, str]]:
    """Ways to make ``model`` smaller: those that leave least of it first."""
    config = getattr(unwrap_peft(model), "config", None)
    sizes = {key: getattr(config, key, None) for key in MIN_SIZES}
    above = {key: size for key, size in sizes.items() if isinstance(size, int) and size > MIN_SIZES[key]}
    if above:
        yield {key: str(MIN_SIZES[key]) for key in above}
        yield from ({key: str(MIN_SIZES[key])} for key in above)
        yield from ({key: str(size // 2)} for key, size in above.items() if size // 2 > MIN_SIZES[key])
    for path, holder in model.named_modules():
        if isinstance(holder, (nn.Sequential, nn.ModuleList)) and config is None:
            there = [name for name, each in holder.named_children() if not isinstance(each, nn.Identity)]
            yield from module_runs(path, there)


def paths_with_parameters(model: nn.Module) -> Iterator[str]:
    """Paths of modules that own parameters, in themselves or further in, the outermost first."""
    for path, module in model.named_modules():
        if path and any(True for _ in module.parameters()):
            yield path


def module_runs(path: str, names: list[str]) -> Iterator[dict[str, str]]:
    """Runs of a sequence's modules to leave out, the longest first; one module stays."""
    prefix = f"{path}." if path else ""
    length = len(names) - 1
    while length > 0:
        last = len(names) - length
        for start in sorted({*range(0, last, max(1, length // 2)), last}):
            yield {f"{prefix}{name}": OMITTED for name in names[start : start + length]}
        length //= 2
