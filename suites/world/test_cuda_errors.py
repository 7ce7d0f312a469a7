"""A CUDA error of a rank has the remedy in its first line; the messages are those of torch 2.11 on an H100."""

import sys

import pytest

from zharness.device.cuda_errors import add_cuda_remedy, name_failed_kernel
from zharness.world import GroupMode, RankServer

ILLEGAL_ACCESS = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
"""
MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB"


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (ILLEGAL_ACCESS, "CUDA_LAUNCH_BLOCKING=1 stops at its launch"),
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors", "nvidia-smi -q -d ECC"),
        ("CUDA error: out of memory\nCUDA kernel errors", "share the GPU's memory"),
        (MEMORY, "share the GPU's memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "share the GPU's memory"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "share the GPU's memory"),
    ],
)
def test_a_cuda_error_has_its_remedy_in_the_first_line(message: str, remedy: str) -> None:
    first, *rest = add_cuda_remedy(message).splitlines()
    assert first.startswith(message.splitlines()[0] + "; ")
    assert remedy in first
    assert rest == message.splitlines()[1:]


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`",
        "CUDA error: operation not permitted when stream is capturing",
        f"assert {ILLEGAL_ACCESS!r} in output",
        "expected 3, got 4\nin two lines",
    ],
)
def test_any_other_message_is_unchanged(message: str) -> None:
    assert add_cuda_remedy(message) == message


def raise_cuda_error() -> None:
    raise RuntimeError(ILLEGAL_ACCESS)


def test_the_cause_of_a_rank_has_the_remedy() -> None:
    with RankServer() as server:
        outcome = server.run(raise_cuda_error, world_size=2, timeout=60.0, group=GroupMode.NONE)
    assert outcome.cause is not None
    assert outcome.cause.cause.startswith("RuntimeError: CUDA error: an illegal memory access")
    assert "CUDA_LAUNCH_BLOCKING=1" in outcome.cause.cause


ASSERTED = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [0,0,0], thread: [32,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed.\n"
)
ASSERT = "CUDA error: device-side assert triggered"
KERNEL = "the kernel indexSelectLargeIndex found that `srcIndex < srcSelectDimSize` is false (Indexing.cu, line 1553)"


def test_a_failed_assertion_names_its_kernel() -> None:
    assert name_failed_kernel(f"RuntimeError: {ASSERT}", f"earlier\n{ASSERTED}{ASSERTED}") == KERNEL
    assert name_failed_kernel(f"RuntimeError: {ASSERT}", "earlier") == ""
    assert name_failed_kernel("RuntimeError: CUDA error: an illegal memory access", ASSERTED) == ""


def fail_assertion() -> None:
    sys.stderr.write(ASSERTED)
    raise RuntimeError(ASSERT)


def test_the_cause_of_a_rank_names_the_kernel() -> None:
    with RankServer() as server:
        outcome = server.run(fail_assertion, world_size=1, timeout=60.0, group=GroupMode.NONE)
    assert outcome.cause is not None
    assert outcome.cause.cause.endswith(f"; {KERNEL}")
