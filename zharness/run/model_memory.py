"""Estimate the memory that the laws need for a user's model, from a model that is built without memory."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import nn

from zharness.engines.torch_engine import LOW_PRECISION_DTYPES
from zharness.errors import UsageError
from zharness.laws.registry import find_laws
from zharness.run.plan import ClaimsLookup, Request, select_stages
from zharness.torch_private import build_without_memory
from zharness.workload import ModelSpec
from zharness.workload.user_model import call_factory, resolve_factory
from zharness.world.limits import KEPT_HEAP_BYTES, available_memory, limit_process_memory, process_memory_left
from zharness.world.orphans import die_with_parent

GIB = 2**30
PROCESS_BYTES = int(0.35 * GIB)  # the memory of a process that imported torch and an engine, without a model
# Copies of the model in memory at once, counted from the code. A rank has the factory's model, a copy of the initial
# state, a copy that is being recorded, and the weights and gradients of two engines; in the dtype of the optimizer, two
# moments of both engines and, for low precision, their master weights. The judge has weights, local gradients and
# evidence, and in float64 the expected values and their bounds. Cells of a GPT-2 with 10 M parameters took less than
# this. A frozen parameter has no gradients, optimizer state, master weights or expected updates: its only float64 copy
# is the copy of the weights on which the judge runs plain PyTorch (convert_to_float64 in zharness/parity/baseline.py).
# A buffer is copied as often as a frozen parameter.
RANK_COPIES, RANK_OPTIMIZER_COPIES, RANK_MASTER_COPIES = 7, 4, 2
JUDGE_COPIES, JUDGE_FLOAT64_COPIES = 5, 2
# If an engine has kernels of its own, the judge needs more memory for tier C. In float64: the gradient and its unit for
# each rank, and, while these are computed, two sums over samples and the model and gradient of one sample. In the
# model's dtype: the gradients of eight runs of plain PyTorch, and the gradients of the samples of one of these runs (4
# of a micro-batch of transformers).
CALIBRATED_COPIES, CALIBRATED_FLOAT64_COPIES, CALIBRATED_FLOAT64_COPIES_OF_A_RANK = 12, 4, 2
KEPT_COPIES = 2  # a model and its gradients, which the process has freed but not yet used again
RANK_FROZEN_COPIES, JUDGE_FROZEN_COPIES, JUDGE_FROZEN_FLOAT64_COPIES = 5, 4, 1
FLOAT32_BYTES, FLOAT64_BYTES = 4, 8
IGNORE_OPTION = "--ignore-memory-limit"
IGNORE_HINT = f"`zharness model {IGNORE_OPTION}`, or verify(..., ignore_memory_limit=True), runs the laws nevertheless"
# Packages of models: their import takes seconds, runs no tensor operation and starts no thread.
MODEL_PACKAGES = ("transformers", "peft", "torchvision", "timm", "diffusers")
OUT_OF_MEMORY = "can't allocate memory"  # c10/core/impl/alloc_cpu.cpp


@dataclass(frozen=True)
class ModelSize:
    """The number of elements of a model's parameters, their bytes, and whether cells lower their dtype.

    ``frozen_parameters`` and ``frozen_bytes`` count the parameters that do not require a gradient. ``buffers`` and
    ``buffer_bytes`` are the elements and bytes of the model's buffers, which the parameters do not include.
    ``is_calibrated`` is true if the gradients of an engine's own kernels are compared by tier C.
    """

    parameters: int
    parameter_bytes: int
    has_masters: bool = False
    frozen_parameters: int = 0
    frozen_bytes: int = 0
    buffers: int = 0
    buffer_bytes: int = 0
    is_calibrated: bool = False

    @classmethod
    def measure(cls, model: nn.Module, dtype: str) -> ModelSize:
        """Return the size of ``model``, which is trained in ``dtype``; a tied parameter or buffer counts once."""
        parameters, buffers = list(model.parameters()), list(model.buffers())
        frozen = [p for p in parameters if not p.requires_grad]
        return cls(
            sum(p.numel() for p in parameters),
            sum(p.numel() * p.element_size() for p in parameters),
            dtype in LOW_PRECISION_DTYPES,
            sum(p.numel() for p in frozen),
            sum(p.numel() * p.element_size() for p in frozen),
            sum(b.numel() for b in buffers),
            sum(b.numel() * b.element_size() for b in buffers),
        )

    @property
    def trained_parameters(self) -> int:
        """Return the number of elements that require a gradient."""
        return self.parameters - self.frozen_parameters

    @property
    def trained_bytes(self) -> int:
        """Return the bytes of the parameters that require a gradient."""
        return self.parameter_bytes - self.frozen_bytes

    def rank_bytes(self) -> int:
        """Return the memory of one rank, in bytes."""
        optimizer_bytes = max(self.trained_bytes, FLOAT32_BYTES * self.trained_parameters)
        copies = RANK_OPTIMIZER_COPIES + (RANK_MASTER_COPIES if self.has_masters else 0)
        weights = RANK_COPIES * self.trained_bytes + RANK_FROZEN_COPIES * (self.frozen_bytes + self.buffer_bytes)
        return weights + copies * optimizer_bytes + self.reserved_bytes() + PROCESS_BYTES

    def judge_bytes(self, world_size: int = 2) -> int:
        """Return the memory, in bytes, of the judge, which trains plain PyTorch and compares tensors."""
        copies, wide_copies = JUDGE_COPIES, JUDGE_FLOAT64_COPIES
        if self.is_calibrated:
            copies += CALIBRATED_COPIES
            wide_copies += CALIBRATED_FLOAT64_COPIES + CALIBRATED_FLOAT64_COPIES_OF_A_RANK * world_size
        weights = copies * self.trained_bytes + JUDGE_FROZEN_COPIES * (self.frozen_bytes + self.buffer_bytes)
        unchanged = JUDGE_FROZEN_FLOAT64_COPIES * (self.frozen_parameters + self.buffers)
        wide = wide_copies * self.trained_parameters + unchanged
        return weights + FLOAT64_BYTES * wide + self.reserved_bytes() + PROCESS_BYTES

    def reserved_bytes(self) -> int:
        """Return the freed memory that one process keeps for its next allocations, in bytes."""
        return min(KEPT_HEAP_BYTES, KEPT_COPIES * self.trained_bytes)

    def estimate_memory(self, world_size: int, jobs: int = 1) -> int:
        """Estimate the peak memory, in bytes, of the processes of ``jobs`` cells that run at a time."""
        return jobs * (world_size * self.rank_bytes() + self.judge_bytes(world_size))


@dataclass(frozen=True)
class SizeEstimate:
    """The size of a model that was built without memory, or the reason why its factory cannot run without memory.

    Both are missing if the factory does not return a model; the full build then reports the error. ``modules`` are the
    names of the modules of ``MODEL_PACKAGES`` that the factory imported, in the order of import.
    """

    size: ModelSize | None
    reason: str = ""
    modules: tuple[str, ...] = ()


def needs_calibration(request: Request, claims: ClaimsLookup) -> bool:
    """Return whether a law of ``request`` compares gradients of the engine's own kernels, which needs more memory."""
    (engine,) = request.engines
    known = select_stages(engine, (), claims)
    stages = [stage for stage in request.stages or known if stage in known]
    laws = [law for law in find_laws(request.patterns) if law.is_calibrated or law.only_own_kernels]
    return bool(laws) and any(stage in claims(engine, stage).on_mesh(request.mesh).own_kernels for stage in stages)


def estimate_size(name: str, dtype: str) -> SizeEstimate:
    """Call the factory ``name`` with tensors that have no memory, and return the size of its model.

    The factory runs in a child process, so that objects that the factory stores do not stay in this process. Raises
    UsageError if the factory cannot be imported.
    """
    factory = resolve_factory(name)  # before the fork, because the import is needed again
    return run_in_child(lambda: build_fake(name, factory, dtype))


def build_fake(name: str, factory: Callable[[], Any], dtype: str) -> SizeEstimate:
    """Build the model without memory and measure it.

    ``model.bfloat16()`` cannot convert fake tensors in place, and an operation cannot mix meta tensors with tensors
    that have memory, so both kinds are tried. If both fail, the reason is that of the fake tensors.
    """
    reasons = []
    for without_memory in (build_without_memory(), torch.device("meta")):
        try:
            with without_memory:
                size = ModelSize.measure(call_factory(name, factory).model, dtype)
            return SizeEstimate(size, modules=find_model_modules())
        except Exception as error:  # noqa: BLE001 - a factory may raise anything; the full build reports the error
            if isinstance(error, UsageError) and error.__cause__ is None:
                return SizeEstimate(None)  # the factory did not return a model, so there is nothing to measure
            cause = error.__cause__ or error
            lines = str(cause).strip().splitlines() or [""]
            reasons.append(f"{type(cause).__name__}: {lines[0]}"[:200])
    return SizeEstimate(None, reasons[0], find_model_modules())


def find_model_modules() -> tuple[str, ...]:
    """Return the names of the imported modules of ``MODEL_PACKAGES``, in the order of import."""
    return tuple(name for name in list(sys.modules) if name.partition(".")[0] in MODEL_PACKAGES)


def run_in_child(function: Callable[[], SizeEstimate]) -> SizeEstimate:
    """Return ``function()`` of a forked child; if the child ends without a result, return that as the reason."""
    source, target = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(source)
        with os.fdopen(target, "wb") as pipe:
            send_and_exit(function, pipe, parent)
    os.close(target)
    with os.fdopen(source, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(content) if content else SizeEstimate(None, "the process ended")  # noqa: S301 - our own child


def send_and_exit(function: Callable[[], SizeEstimate], pipe: BinaryIO, parent: int) -> None:
    """Write the pickled result of ``function()`` to ``pipe`` and end this process without its exit handlers."""
    try:
        die_with_parent(parent)
        pickle.dump(function(), pipe)
        pipe.flush()
    except BaseException:  # noqa: BLE001 - a factory may call sys.exit; a fork must never return to its parent's code
        traceback.print_exc()
    finally:
        os._exit(0)


def build_within_memory(
    spec: ModelSpec, seed: int, dtype: str, world_size: int, ignore_memory_limit: bool = False
) -> nn.Module:
    """Build a model with a factory that may allocate only the free memory, and require that all processes fit.

    With ``ignore_memory_limit`` the factory may try to allocate more, and no process has to fit. Raises UsageError if
    the memory does not suffice for the factory or for the laws.
    """
    free = available_memory()
    try:
        with nullcontext() if ignore_memory_limit else limit_process_memory(free):
            model = spec.model(seed)
    except (UsageError, RuntimeError, MemoryError) as error:
        if isinstance(error.__cause__ or error, MemoryError) or OUT_OF_MEMORY in str(error):
            hint = "" if ignore_memory_limit else f"; {IGNORE_HINT}"
            raise UsageError(
                f"{spec.name}: the factory needs more memory than the {free / GIB:.1f} GiB that are free; use fewer "
                f"layers, or a machine with more memory{hint}"
            ) from error
        raise
    if not ignore_memory_limit:
        require_fitting(spec.name, ModelSize.measure(model, dtype), world_size)
    return model


def require_fitting(name: str, size: ModelSize, world_size: int) -> None:
    """Raise UsageError if a model of this size does not fit into the free memory, or a rank does not fit its limit."""
    reason = explain_current_limit(size, world_size)
    if reason:
        raise UsageError(f"{name}: {reason}; {IGNORE_HINT}")


def explain_current_limit(size: ModelSize, world_size: int) -> str:
    """Explain why a model of this size does not fit now, or return an empty string if it does."""
    return explain_too_large(size, world_size, available_memory(), process_memory_left())


def explain_too_large(size: ModelSize, world_size: int, free_bytes: float, process_bytes: float | None = None) -> str:
    """Explain why a model does not fit into ``free_bytes``, or return an empty string if the model fits.

    ``process_bytes`` is the memory that the limits of the shell allow one process, or None.
    """
    needed, judge_bytes = size.estimate_memory(world_size), size.judge_bytes(world_size)
    largest = max(size.rank_bytes(), judge_bytes)
    buffers = f" and {size.buffer_bytes / GIB:.1f} GiB of buffers" if size.buffer_bytes >= GIB / 10 else ""
    model = f"a model of {size.parameter_bytes / GIB:.1f} GiB{buffers}"
    if process_bytes is not None and largest > process_bytes:
        return (
            f"{model} needs about {largest / GIB:.1f} GiB in one rank, but the limits of this shell (ulimit -d, ulimit "
            f"-v) allow {process_bytes / GIB:.1f} GiB; raise them, or use fewer layers"
        )
    if needed <= free_bytes:
        return ""
    return (
        f"{model} needs about {needed / GIB:.1f} GiB on {world_size} ranks (each up to {size.rank_bytes() / GIB:.1f} "
        "GiB: weights, gradients, optimizer state of two engines and copies; the judge "
        f"{judge_bytes / GIB:.1f} GiB, float64 among them), but only {free_bytes / GIB:.1f} GiB are free; use "
        "fewer ranks, fewer layers, or a machine with more memory"
    )
