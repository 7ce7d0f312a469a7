"""A CUDA error of a rank is one line with the remedy; the messages are those of torch 2.11 on an H100."""

import pytest

from zharness.device.cuda_errors import describe_cuda_error
from zharness.world import Group, RankServer

ILLEGAL_ACCESS = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            ILLEGAL_ACCESS,
            "CUDA error: an illegal memory access was encountered (cudaErrorIllegalAddress); an earlier kernel of this "
            "rank failed: CUDA_LAUNCH_BLOCKING=1 stops at its launch, and compute-sanitizer names it",
        ),
        (
            "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
            "CUDA error: uncorrectable ECC error encountered; the GPU's memory is damaged, which no test can mend: "
            "'nvidia-smi -q -d ECC' counts its errors",
        ),
        (
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
            "CUDA error: out of memory; all ranks and cells share the GPU's memory: use fewer --jobs or a smaller "
            "--world-size",
        ),
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB",
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB; all ranks and "
            "cells share the GPU's memory: use fewer --jobs or a smaller --world-size",
        ),
        ("expected 3, got 4\nin two lines", "expected 3, got 4\nin two lines"),
    ],
)
def test_a_cuda_error_is_one_line_with_its_remedy(message: str, expected: str) -> None:
    assert describe_cuda_error(message) == expected


def raise_cuda_error() -> None:
    raise RuntimeError(ILLEGAL_ACCESS)


def test_the_cause_of_a_rank_has_the_remedy() -> None:
    with RankServer() as server:
        outcome = server.run(raise_cuda_error, world_size=2, timeout=60.0, group=Group.NONE)
    assert outcome.cause is not None
    assert outcome.cause.cause.startswith("RuntimeError: CUDA error: an illegal memory access")
    assert "CUDA_LAUNCH_BLOCKING=1" in outcome.cause.cause
    assert "\n" not in outcome.cause.cause
