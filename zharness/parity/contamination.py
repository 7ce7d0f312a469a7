"""Detect conditions that invalidate a comparison: replaced functions of torch, different settings, shared memory.

An engine may replace a function of torch for its whole process. For example, DeepSpeed's stage 3 replaces
``torch.nn.functional.linear``, and the replacement stays after the engine is closed. If the baseline ran in such a
process, the engine's code would be compared with itself.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zharness.device import is_gpu_requested
from zharness.device.float32_products import is_tf32_in_convolutions, is_tf32_in_products, read_matmul_precision
from zharness.errors import HarnessFault, UsageError

# The namespaces of functions that an engine, a model or an optimizer computes with.
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
# Added by the transformers package under a name that torch does not use.
ALLOWED_ADDITIONS = ("torch.nn.Module.smart_apply",)
# Compiled functions are torch's own or a library's; replacements are written in Python.
COMPILED_TYPES = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Decorators and types of the standard library that torch re-exports.
STANDARD_MODULES = ("typing", "typing_extensions", "functools", "contextlib", "collections", "abc")


@dataclass(frozen=True)
class ProcessConditions:
    """The conditions on which a process's numbers depend: settings of torch, and replaced functions of torch.

    ``settings`` maps the name of each setting to its value; ``replacements`` describes each replaced function, and
    ``nondeterministic`` names operators that ran on a GPU and for which torch has no deterministic algorithm.
    """

    settings: Mapping[str, str]
    replacements: tuple[str, ...]
    nondeterministic: tuple[str, ...] = ()

    def describe_differences(self, other: ProcessConditions) -> list[str]:
        """Describe each function that is replaced in this process, and each setting that differs from ``other``."""
        differing = [
            f"{name} is {value} in the engine's process and {other.settings[name]} in the baseline's"
            for name, value in self.settings.items()
            if other.settings.get(name, value) != value
        ]
        return [
            *(f"in the engine's process, {function}" for function in self.replacements),
            *differing,
            *describe_nondeterminism("the engine's", self.nondeterministic),
        ]


def describe_nondeterminism(owner: str, operators: Sequence[str]) -> list[str]:
    """Return a sentence about the operators that had no deterministic algorithm in a process, or nothing."""
    if not operators:
        return []
    return [f"in {owner} process, torch has no deterministic algorithm for {', '.join(operators)}"]


def read_process_conditions() -> ProcessConditions:
    """Return the settings and the replaced functions of torch in this process."""
    cuda = is_gpu_requested()
    settings = {
        "the number of threads": torch.get_num_threads(),
        "the precision of float32 products": read_matmul_precision(),
        "the default dtype": torch.get_default_dtype(),
        "flushing of subnormals": float(torch.tensor(1e-40) * 1.0) == 0.0,
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled() or not cuda,
        "TF32 in products": cuda and is_tf32_in_products(),
        "TF32 in convolutions": cuda and is_tf32_in_convolutions(),
        "kernels chosen by their speed": cuda and torch.backends.cudnn.benchmark,
    }
    return ProcessConditions({name: str(value) for name, value in settings.items()}, tuple(find_replaced_functions()))


def find_replaced_functions() -> Iterator[str]:
    """Describe replaced functions of torch, as in ``torch.nn.functional.linear is replaced by deepspeed.x (file)``."""
    for owner, holder in TORCH_NAMESPACES.items():
        if vars(holder) == _clean_namespaces.get(owner):
            continue
        found = list(find_foreign_functions(owner, holder))
        if not found:  # the cache would keep a replacement alive
            _clean_namespaces[owner] = dict(vars(holder))
        yield from found


# The contents of namespaces without replacements; while they are unchanged, their 2,000 names are not tested again.
_clean_namespaces: dict[str, dict[str, Any]] = {}


def find_foreign_functions(namespace: str, holder: Any) -> Iterator[str]:
    """Yield a description of each function in torch's namespace ``namespace`` whose code is not part of torch."""
    for name, value in vars(holder).items():
        if isinstance(value, COMPILED_TYPES):  # most functions
            continue
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if not callable(function) or isinstance(function, type) or is_from_torch(function):
            continue
        if f"{namespace}.{name}" not in ALLOWED_ADDITIONS:
            yield f"{namespace}.{name} is replaced by {describe_function(function)}"


def is_from_torch(function: Any) -> bool:
    """Return whether a function is part of torch or of the standard library, or is compiled."""
    if isinstance(function, types.FunctionType):
        # functools.wraps copies names but not the code object, so its file is reliable.
        file = function.__code__.co_filename
        return file.startswith(TORCH_FOLDER) or os.path.basename(file).removesuffix(".py") in STANDARD_MODULES
    if isinstance(function, COMPILED_TYPES) or inspect.ismethoddescriptor(function):
        return True
    return type(function).__module__.split(".")[0] in ("torch", "builtins", *STANDARD_MODULES)


def describe_function(function: Any) -> str:
    """Return the module, name, file and line of a function as text."""
    module, name = (getattr(function, key, "") for key in ("__module__", "__qualname__"))
    code = getattr(function, "__code__", None)
    return f"{module}.{name}" + (f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})" if code else "")


def require_clean_torch(conditions: ProcessConditions) -> None:
    """Raise HarnessFault if ``conditions`` list a replaced function of torch, which the baseline would call."""
    if conditions.replacements:
        raise HarnessFault(
            f"the baseline cannot run here: {'; '.join(conditions.replacements)}; "
            "run it in a process in which nothing has replaced torch's functions"
        )


def require_no_shared_memory(engine: nn.Module, baseline: nn.Module) -> None:
    """Raise UsageError if a parameter or buffer of the baseline shares memory with one of the engine."""
    engine_names = {tensor.untyped_storage().data_ptr(): name for name, tensor in named_tensors(engine)}
    engine_names.pop(0, None)  # storage without memory: meta tensors and freed (sharded) weights
    for name, tensor in named_tensors(baseline):
        other = engine_names.get(tensor.untyped_storage().data_ptr())
        if other is not None:
            raise UsageError(
                f"the baseline's {name} shares memory with the engine's {other}, so the engine would "
                "be compared with itself; use a copy.deepcopy as the baseline, made before the engine wraps the model"
            )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each parameter and buffer that is not on the meta device."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_meta:
            yield name, tensor.detach()
