"""What makes a comparison worthless or unlike: torch's functions replaced, other settings, memory that is shared.

An engine may replace a function of torch for its whole process (DeepSpeed's stage 3 does so with
``torch.nn.functional.linear``, and it outlives the engine). A baseline that ran there would be held against itself.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zharness.errors import HarnessFault, UsageError

# Where the functions live that an engine, a model or an optimizer computes with.
TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
TORCH_NAMESPACES: Mapping[str, Any] = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.Tensor": Tensor,
    "torch.autograd": torch.autograd,
    "torch.nn.Module": nn.Module,
    **{f"torch.nn.{kind.__name__}": kind for kind in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.Conv2d)},
    **{f"torch.optim.{kind.__name__}": kind for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)},
}
# What the transformers package adds, under a name that torch has not and calls nowhere.
ALLOWED_ADDITIONS = ("torch.nn.Module.smart_apply",)
# A function that is compiled code is torch's own or a library's, and nobody puts one there instead of another.
COMPILED_TYPES = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Python's own, which torch hands on under its names: decorators and types.
STANDARD_MODULES = ("typing", "typing_extensions", "functools", "contextlib", "collections", "abc")


@dataclass(frozen=True)
class ProcessConditions:
    """What numbers of a process depend on beside the code: settings by name, and torch's replaced functions."""

    settings: Mapping[str, str]
    replacements: tuple[str, ...]

    def describe_differences(self, other: ProcessConditions) -> list[str]:
        """In words what is another here than in ``other``, where a function replaced is worth a word anyway."""
        differing = [
            f"{name} is {value}, for the baseline {other.settings[name]}"
            for name, value in self.settings.items()
            if other.settings.get(name, value) != value
        ]
        return [*(f"the engine's process has {function}" for function in self.replacements), *differing]


def read_process_conditions() -> ProcessConditions:
    """Those of this process, now."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    settings = {
        "the number of threads": torch.get_num_threads(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the default dtype": torch.get_default_dtype(),
        "flushing of subnormals": float(torch.tensor(1e-40) * 1.0) == 0.0,
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled() or not cuda,
        "TF32 in products": cuda and torch.backends.cuda.matmul.allow_tf32,
        "TF32 in convolutions": cuda and torch.backends.cudnn.allow_tf32,
        "kernels chosen by their speed": cuda and torch.backends.cudnn.benchmark,
    }
    return ProcessConditions({name: str(value) for name, value in settings.items()}, tuple(find_replaced_functions()))


def find_replaced_functions() -> Iterator[str]:
    """Functions of torch that are not torch's: ``torch.nn.functional.linear replaced by deepspeed.x.y (file)``."""
    for owner, holder in TORCH_NAMESPACES.items():
        if vars(holder) == _clean_namespaces.get(owner):
            continue
        found = list(find_foreign_functions(owner, holder))
        if not found:  # else what has replaced them would be kept alive here
            _clean_namespaces[owner] = dict(vars(holder))
        yield from found


# What owners held when all of it was torch's: the same objects need no second look, at 2,000 names in every cell.
_clean_namespaces: dict[str, dict[str, Any]] = {}


def find_foreign_functions(namespace: str, holder: Any) -> Iterator[str]:
    """Those of one owner."""
    for name, value in vars(holder).items():
        if isinstance(value, COMPILED_TYPES):  # most of them
            continue
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if not callable(function) or isinstance(function, type) or is_from_torch(function):
            continue
        if f"{namespace}.{name}" not in ALLOWED_ADDITIONS:
            yield f"{namespace}.{name} replaced by {describe_function(function)}"


def is_from_torch(function: Any) -> bool:
    """Whether a function's code lies in torch, or in C."""
    if isinstance(function, types.FunctionType):
        # A wrapper keeps the name of what it wraps, and its own code: the file cannot be pretended.
        file = function.__code__.co_filename
        return file.startswith(TORCH_FOLDER) or os.path.basename(file).removesuffix(".py") in STANDARD_MODULES
    if isinstance(function, COMPILED_TYPES) or inspect.ismethoddescriptor(function):
        return True
    return type(function).__module__.split(".")[0] in ("torch", "builtins", *STANDARD_MODULES)


def describe_function(function: Any) -> str:
    """Module, name and file."""
    module, name = (getattr(function, key, "") for key in ("__module__", "__qualname__"))
    code = getattr(function, "__code__", None)
    return f"{module}.{name}" + (f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})" if code else "")


def require_clean_torch(conditions: ProcessConditions) -> None:
    """Raises HarnessFault where this process, which is to run the baseline, is not torch as it was released."""
    if conditions.replacements:
        raise HarnessFault(
            f"the baseline cannot run here: {'; '.join(conditions.replacements)}; "
            "run it in a process in which nothing has replaced torch's functions"
        )


def require_no_shared_memory(engine: nn.Module, baseline: nn.Module) -> None:
    """Raises UsageError where a parameter or buffer of the baseline lies in the same memory as one of the engine's."""
    taken = {tensor.untyped_storage().data_ptr(): name for name, tensor in named_tensors(engine)}
    taken.pop(0, None)  # storage without memory: meta tensors, and weights that are sharded away
    for name, tensor in named_tensors(baseline):
        other = taken.get(tensor.untyped_storage().data_ptr())
        if other is not None:
            raise UsageError(
                f"the baseline's {name} shares its memory with the engine's {other}, so the one is "
                "compared with itself; give the baseline a copy.deepcopy of the model, made before the engine takes it"
            )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, those on meta left out."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            yield name, tensor.detach()
