"""Choose the device of each rank, the backend of its process groups, and the device of plain PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

import torch

from zharness.device.determinism import use_deterministic_algorithms
from zharness.device.gpu_facts import find_gpu_problem, read_gpus
from zharness.device.gpu_memory import LEAST_SHARE_MIB, SHARE_VARIABLE, bound_memory, choose_share, smallest_free_mib
from zharness.environment import DEVICE_VARIABLE
from zharness.errors import UsageError

BACKEND_VARIABLE, POISON_VARIABLE = "ZHARNESS_BACKEND", "ZHARNESS_POISON"


class BackendName(Enum):
    """The backends of torch.distributed that ranks can use; ``staged_group.py`` implements ``staged``."""

    GLOO = "gloo"
    NCCL = "nccl"
    STAGED = "staged"


class Poison(Enum):
    """Whether a collective poisons its outputs until the caller waits, and then compares its inputs with copies."""

    ON = "on"
    OFF = "off"


def require_usable_gpus(processes: int) -> None:
    """Raise UsageError if ranks use GPUs and ``processes`` processes cannot compute there. Does not start CUDA.

    The function calls nvidia-smi, which takes a tenth of a second or more: call it once, before ranks start.
    """
    if is_gpu_requested():
        _refuse(find_gpu_problem(torch.version.cuda, torch.cuda.device_count(), read_gpus(), processes))


def require_visible_gpus() -> None:
    """Raise UsageError if ranks use GPUs and torch sees none. Starts neither CUDA nor nvidia-smi."""
    if is_gpu_requested():
        _refuse(find_gpu_problem(torch.version.cuda, torch.cuda.device_count(), (), 1))


def _refuse(problem: str) -> None:
    """Raise UsageError unless ``problem`` is empty."""
    if problem:
        raise UsageError(f"{DEVICE_VARIABLE} is cuda, but {problem}")


@contextmanager
def share_gpu_memory(processes: int) -> Iterator[None]:
    """Let ``processes`` ranks and judges share the GPUs' memory evenly, if they start inside the block.

    A share that the user has set in ``ZHARNESS_GPU_MIB`` is not changed.
    """
    is_chosen = not is_gpu_requested() or bool(os.environ.get(SHARE_VARIABLE))
    share = None if is_chosen else choose_share(read_gpus(), processes)
    if share is None:
        yield
        return
    os.environ[SHARE_VARIABLE] = str(share)
    try:
        yield
    finally:
        del os.environ[SHARE_VARIABLE]


def choose_job_count(world_size: int) -> int:
    """Return how many cells of ``world_size`` ranks run at a time: one per core, as many as the GPUs' memory allows.

    Beside its pooled ranks and its judge, a cell may have the same number of ranks again: ranks of the previous pool,
    which end with the last cell of that pool, or fresh ranks that repeat a failed cell.
    """
    cores = max(1, os.cpu_count() or 1)
    if not is_gpu_requested():
        return cores
    gpus = read_gpus()
    free = smallest_free_mib(gpus)
    if free is None:
        return cores
    processes = len(gpus) * (free // (gpus[0].context_mib + LEAST_SHARE_MIB))  # spread over GPUs as in choose_share
    return min(cores, max(1, processes // (2 * world_size + 1)))


def is_gpu_requested() -> bool:
    """Return whether the environment variable ``ZHARNESS_DEVICE`` is ``cuda``. Does not initialize CUDA.

    Raises UsageError unless the variable is ``cpu`` or ``cuda``, empty or not set.
    """
    return read_choice(DEVICE_VARIABLE, ("cpu", "cuda")) == "cuda"


def read_choice(variable: str, choices: tuple[str, ...]) -> str:
    """Return the value of an environment variable, by default the first of ``choices``.

    Raises UsageError for any other value.
    """
    value = os.environ.get(variable) or choices[0]
    if value not in choices:
        raise UsageError(f"{variable} is {value!r}; expected one of {', '.join(choices)}")
    return value


def read_poison() -> Poison:
    """Return the value of ``ZHARNESS_POISON``, by default ON. Raises UsageError for any other text."""
    return Poison(read_choice(POISON_VARIABLE, tuple(poison.value for poison in Poison)))


def compute_device_type() -> str:
    """Return the type of the device on which ranks and plain PyTorch compute: ``cpu`` or ``cuda``."""
    return "cuda" if is_gpu_requested() else "cpu"


def rank_device(rank: int) -> torch.device:
    """Return the device of ``rank``, and make it torch's current device if it is a GPU.

    If ``ZHARNESS_DEVICE`` is ``cuda``, ranks take the GPUs in turn, so that ranks share a GPU if there are fewer GPUs
    than ranks; otherwise all ranks use the CPU. The device depends on an environment variable, because probing for GPUs
    before a fork would make CUDA unusable in the forked ranks.
    """
    if not is_gpu_requested():
        return torch.device("cpu")
    device = torch.device("cuda", local_device_index(rank))
    torch.cuda.set_device(device)
    bound_memory(device)
    return device


def require_reproducible_kernels() -> None:
    """Let torch use only kernels of a GPU whose results are reproducible; call this before CUDA starts.

    By default, TF32 rounds the factors of convolutions to 11 bits, cuDNN may choose another kernel in every run,
    cuBLAS without a workspace of fixed size adds in another order on another stream, and scatters add in any order.
    """
    if is_gpu_requested():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        use_deterministic_algorithms()


def local_device_index(rank: int) -> int:
    """Return the index of the GPU of ``rank``, which other ranks share if there are fewer GPUs; on the CPU, ``rank``.

    This is the value of LOCAL_RANK, from which DeepSpeed, accelerate and Lightning take their device.
    """
    return rank % max(torch.cuda.device_count(), 1) if is_gpu_requested() else rank


def choose_backend(world_size: int) -> BackendName:
    """Return the backend of a world: that of ``ZHARNESS_BACKEND``, else gloo on the CPU, and NCCL or staged on GPUs.

    The default on GPUs is NCCL if there is one GPU for each rank, which NCCL needs, else staged. Raises UsageError for
    an unknown name, and for NCCL without enough GPUs.
    """
    read_poison()  # raises for a wrong value before a rank starts
    requested, count = os.environ.get(BACKEND_VARIABLE, ""), torch.cuda.device_count() if is_gpu_requested() else 0
    if not requested:
        if not is_gpu_requested():
            return BackendName.GLOO
        return BackendName.NCCL if world_size <= count else BackendName.STAGED
    backend = BackendName(read_choice(BACKEND_VARIABLE, tuple(name.value for name in BackendName)))
    if backend is BackendName.NCCL and world_size > count:
        raise UsageError(
            f"{BACKEND_VARIABLE} is nccl, which needs one GPU for each of {world_size} ranks, and ranks have {count} "
            f"GPUs; with {BACKEND_VARIABLE}=staged ranks share a GPU"
        )
    return backend


def on_compute_device() -> AbstractContextManager[object]:
    """Return a context in which torch creates tensors on the first GPU if ranks use GPUs, else on the CPU.

    Plain PyTorch then runs the kernels that the ranks run. Ranks do not use this context, because it would also affect
    the engine.
    """
    if not is_gpu_requested():
        return nullcontext()
    device = torch.device("cuda", 0)
    bound_memory(device)
    return device
