"""Choose how a GPU multiplies float32 numbers: with all their 24 bits, or with factors rounded to TF32's 11."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from zharness.device import is_gpu_requested
from zharness.device.gpu_facts import read_gpus

FIRST_CAPABILITY_WITH_TF32 = 8.0
MATMUL_PRECISIONS = ("highest", "high", "medium")


class Float32Products(Enum):
    """The precision of the factors of float32 products; their sums are in float32 in both cases.

    TF32 keeps 10 bits of the significand behind the leading one, so that a factor has a relative error up to 2^-11,
    and up to 2^-10 in kernels that pass float32 to tensor cores, which ignore the other bits
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
        """Return the distance from 1 to the next larger factor: the largest relative error of a truncated factor."""
        return float(2.0 ** (1 - self.factor_bits))


@contextmanager
def multiply_with(products: Float32Products) -> Iterator[None]:
    """In the block, let CUDA's float32 products and convolutions use factors of this precision; reset it afterwards.

    A CPU has no TF32: unless ranks use GPUs, no setting is read or changed.
    """
    if not is_gpu_requested():
        yield
        return
    with keep_precision():
        allows_tf32 = products is Float32Products.TF32
        torch.set_float32_matmul_precision("high" if allows_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = allows_tf32
        for operator in find_convolutions():  # False alone lets torch.backends.fp32_precision decide
            operator.fp32_precision = "tf32" if allows_tf32 else "ieee"
        yield


@contextmanager
def keep_precision() -> Iterator[None]:
    """Reset the precision of float32 products and convolutions after the block, for both APIs of torch that set it."""
    precision = read_matmul_precision()
    before = [(operator, operator.fp32_precision) for operator in find_operators_with_precision()]
    allows_tf32 = is_tf32_in_convolutions()
    try:
        yield
    finally:
        if precision in MATMUL_PRECISIONS:
            torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allows_tf32
        for operator, value in before:
            operator.fp32_precision = value


def find_operators_with_precision() -> list[Any]:
    """Return torch's operators whose precision ``fp32_precision`` sets; releases before 2.9 have none."""
    backends = torch.backends
    operators = [
        backends,  # the other operators have its precision until their own precision is set
        backends.cuda.matmul,
        getattr(backends.mkldnn, "matmul", None),
        *find_convolutions(),
    ]
    return [operator for operator in operators if hasattr(operator, "fp32_precision")]


def find_convolutions() -> list[Any]:
    """Return cuDNN's operators whose precision ``fp32_precision`` sets; releases before 2.9 have none."""
    cudnn = torch.backends.cudnn
    return [getattr(cudnn, name) for name in ("conv", "rnn") if hasattr(cudnn, name)]


def read_matmul_precision() -> str:
    """Return torch's precision of float32 products: highest, high or medium, or the value of ``fp32_precision``.

    After ``fp32_precision`` was set, torch raises an error if the precision is read by its older API.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return f"fp32_precision {torch.backends.cuda.matmul.fp32_precision}"


def is_tf32_in_products() -> bool:
    """Return whether CUDA may round the factors of float32 products to TF32."""
    return _is_tf32(torch.backends.cuda.matmul, torch.backends.cuda.matmul)


def is_tf32_in_convolutions() -> bool:
    """Return whether cuDNN may round the factors of float32 convolutions to TF32."""
    return _is_tf32(getattr(torch.backends.cudnn, "conv", None), torch.backends.cudnn)


def _is_tf32(operator: Any, older: Any) -> bool:
    """Return whether ``operator`` uses TF32; in releases before 2.9, the setting is ``allow_tf32`` of ``older``."""
    if hasattr(operator, "fp32_precision"):
        return bool(operator.fp32_precision == "tf32")
    return bool(older.allow_tf32)


def find_tf32_problem(uses_gpu: bool) -> str:
    """Return why this machine cannot run cells in tf32, with a remedy, or an empty string. Does not start CUDA."""
    if not uses_gpu:
        return "tf32 is a way in which GPUs multiply: add --device cuda (or ZHARNESS_DEVICE=cuda), or leave tf32 out"
    told = [gpu.capability for gpu in read_gpus() if gpu.capability is not None]
    capability = min(told, default=FIRST_CAPABILITY_WITH_TF32)
    if capability < FIRST_CAPABILITY_WITH_TF32:
        return (
            f"a GPU of compute capability {capability} has no TF32, which begins with "
            f"{FIRST_CAPABILITY_WITH_TF32}: leave tf32 out, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        )
    return ""
