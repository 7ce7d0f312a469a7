"""Choose how a GPU multiplies float32 numbers: with all their 24 bits, or with factors rounded to TF32's 11."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from zharness.device.gpu_facts import NVIDIA_SMI_SECONDS

FIRST_CAPABILITY_WITH_TF32 = 8.0


class Float32Products(Enum):
    """The precision of the factors of float32 products; their sums are in float32 in both cases.

    TF32 keeps 10 bits of the significand behind the leading one, so that a factor has a relative error up to 2^-11
    (https://docs.nvidia.com/cuda/cublas/#floating-point-emulation-and-tf32; NVIDIA A100 white paper, figure 9).
    """

    FULL = "24 bits"
    TF32 = "11 bits"

    @property
    def factor_bits(self) -> int:
        """Return the number of bits of a factor's significand, the leading one included."""
        return 24 if self is Float32Products.FULL else 11

    @property
    def eps(self) -> float:
        """Return the distance from 1 to the next larger factor: twice the largest relative error of a factor."""
        return float(2.0 ** (1 - self.factor_bits))


@contextmanager
def multiply_with(products: Float32Products) -> Iterator[None]:
    """Let CUDA's products and convolutions of float32 have these factors inside the block, and reset both after it.

    A CPU has no TF32, and nothing changes there.
    """
    cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = cudnn.allow_tf32
    cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = products is Float32Products.TF32
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
        torch.set_float32_matmul_precision(precision)  # which matmul.allow_tf32 is another name of


def find_tf32_problem(uses_gpu: bool) -> str:
    """Return why this machine cannot run cells in tf32, with a remedy, or an empty string. Does not start CUDA."""
    if not uses_gpu:
        return "tf32 is a way in which GPUs multiply: add --device cuda (or ZHARNESS_DEVICE=cuda), or leave tf32 out"
    capability = min(read_compute_capabilities(), default=FIRST_CAPABILITY_WITH_TF32)
    if capability < FIRST_CAPABILITY_WITH_TF32:
        return (
            f"a GPU of compute capability {capability} has no TF32, which begins with "
            f"{FIRST_CAPABILITY_WITH_TF32}: leave tf32 out, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        )
    return ""


def read_compute_capabilities() -> tuple[float, ...]:
    """Return the compute capabilities that nvidia-smi tells, such as 9.0; empty if it tells none, as old ones do."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return ()
    lines = done.stdout.split() if done.returncode == 0 else []
    return tuple(float(line) for line in lines if line.replace(".", "", 1).isdigit())
