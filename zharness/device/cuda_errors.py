"""Add the remedy to torch's messages of CUDA errors, and find the kernel whose assertion failed."""

from __future__ import annotations

import re

_SHARED_MEMORY = (
    "all ranks that run at a time share the GPU's memory: run fewer at a time (zharness check --jobs, pytest -n), "
    "or on fewer ranks"
)
# cuBLAS and cuDNN allocate memory without torch's allocator, and report a lack of memory by codes of their own.
_LIBRARY_MEMORY = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
# CUDA reports the error of a kernel in a later call, so the line that raised is not the line that launched the kernel.
_EARLIER_KERNEL = (
    "an earlier kernel of this rank failed: CUDA_LAUNCH_BLOCKING=1 stops at its launch, and compute-sanitizer names it"
)
# The beginnings of torch's messages, and their remedies. CUDA errors of calls other than kernels have no remedy here.
_REMEDIES = {
    "CUDA out of memory": _SHARED_MEMORY,
    "CUDA error: out of memory": _SHARED_MEMORY,
    **dict.fromkeys(_LIBRARY_MEMORY, _SHARED_MEMORY),
    "CUDA error: an illegal memory access": _EARLIER_KERNEL,
    "CUDA error: misaligned address": _EARLIER_KERNEL,
    "CUDA error: an illegal instruction": _EARLIER_KERNEL,
    "CUDA error: unspecified launch failure": _EARLIER_KERNEL,
    "CUDA error: device-side assert triggered": _EARLIER_KERNEL,
    "CUDA error: uncorrectable ECC error": "the GPU's memory is damaged, which no test can mend: "
    "'nvidia-smi -q -d ECC' counts its errors",
}


def add_cuda_remedy(message: str) -> str:
    """Return the message of a rank's exception; the first line of a CUDA error gets its remedy, if there is one."""
    remedy = next((remedy for start, remedy in _REMEDIES.items() if message.startswith(start)), "")
    first, newline, rest = message.partition("\n")
    return f"{first}; {remedy}{newline}{rest}" if remedy else message


# The text that CUDA prints to stderr for a failed assertion of a kernel, once for each thread of the GPU.
_ASSERTION = re.compile(
    r"^(?:\S*/)?(?P<file>[^/\s]+):(?P<line>\d+): (?P<kernel>.+): block: \[[\d,]+\], thread: \[[\d,]+\] "
    r"Assertion `(?P<what>.+)` failed",
    re.MULTILINE,
)


def name_failed_kernel(cause: str, stderr: str) -> str:
    """Return the kernel whose assertion failed, with the assertion and its place, if ``cause`` is a failed assertion.

    The text is empty for another cause, or if ``stderr`` names no kernel.
    """
    found = _ASSERTION.search(stderr) if "device-side assert triggered" in cause else None
    if found is None:
        return ""
    return f"the kernel {found['kernel']} found that `{found['what']}` is false ({found['file']}, line {found['line']})"
