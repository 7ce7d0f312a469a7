"""Cells in tf32: where they run, when exact models stay exact, and what a rounded factor does to both tiers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from zharness.cell import Cell
from zharness.device import DEVICE_VARIABLE, float32_products
from zharness.device.float32_products import Float32Products, find_tf32_problem, keep_precision, multiply_with
from zharness.law_kit.dtypes import choose_products
from zharness.mutants.tf32 import RoundedFactors
from zharness.parity.baseline import Baseline, convert_to_float64, run_local
from zharness.parity.calibration import calibrate
from zharness.parity.certificate import certify_exactness, round_to_bits
from zharness.workload import MODELS, ModelSpec, model_spec

# Not the models that the certificate is not about: of two dtypes, without elements, or with sparse gradients.
UNCERTIFIED = {"adapted", "empty_last", "odd", "odd_context", "odd_routed", "odd_empty", "lookup"}
EXACT = sorted(name for name, spec in MODELS.items() if spec.exact and not spec.pp_plan and name not in UNCERTIFIED)
LONG_FACTORS = {"tokens", "parallel_tokens", "stateful_exact"}  # logits are sharp, and a batch norm divides
TF32 = Float32Products.TF32
ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn

{way}


def factory():
    return nn.Linear(8, 4), lambda generator: torch.randn(4, 8, generator=generator), lambda output, _: output.sum()
"""


def in_tf32(spec: ModelSpec, world_size: int = 2) -> Baseline:
    return Baseline(spec, seed=5, data_size=world_size, products=TF32)


@contextmanager
def scaled(spec: ModelSpec, factor: int) -> Iterator[ModelSpec]:
    """Yield ``spec`` with its weights times ``factor``."""

    def build() -> nn.Module:
        model = spec.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        return model

    yield replace(spec, build=build)


WAYS = (
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
)


def read_precision() -> tuple[object, ...]:
    operators = [operator.fp32_precision for operator in float32_products.find_operators_with_precision()]
    return float32_products.read_matmul_precision(), *operators


@pytest.mark.parametrize("way", ["pass", *WAYS])
def test_the_settings_are_tf32_inside_the_block_alone(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    with keep_precision():
        exec(way, {"torch": torch})  # noqa: S102 - one of WAYS
        before = read_precision()
        with multiply_with(TF32):
            assert torch.backends.cuda.matmul.allow_tf32
            assert torch.backends.cudnn.allow_tf32
            with multiply_with(Float32Products.FULL):
                assert not torch.backends.cuda.matmul.allow_tf32
                assert not torch.backends.cudnn.allow_tf32
            assert torch.backends.cuda.matmul.allow_tf32
        after = read_precision()
    assert after[1:] == before[1:]
    assert after[0] == before[0] or str(before[0]).startswith("fp32_precision")  # both APIs agree then


@pytest.mark.parametrize("way", WAYS)
def test_a_model_may_set_the_precision_in_every_way_of_torch(way: str, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL.format(way=way))
    command = ["model", "my_model:factory", "--stage", "1", "--only", "training.grads"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "zharness", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cell_in_tf32_has_tensors_of_fp32_and_a_seed_of_its_own() -> None:
    cell = Cell.parse("training.grads[reference-zero3-w2-tf32-mlp]")
    assert (cell.storage_dtype, choose_products(cell.dtype)) == ("fp32", TF32)
    full = replace(cell, dtype="fp32")
    assert choose_products(full.dtype) is Float32Products.FULL
    assert cell.seed() != full.seed()


def test_a_cpu_and_an_old_gpu_refuse_tf32(tmp_path, monkeypatch) -> None:
    assert find_tf32_problem(uses_gpu=False).startswith("tf32 is a way in which GPUs multiply: add --device cuda")
    command = tmp_path / "nvidia-smi"
    command.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    old, new, silent = (
        f"{index}, a GPU, 580.1, Default, 80994, 81559, {told}\\n" for index, told in enumerate(("7.5", "9.0", "[N/A]"))
    )
    cases = (
        (old + new, "0,1", "compute capability 7.5 has no TF32"),
        (old + new, "1", ""),  # the remedy
        (new, "", ""),
        (silent, "", ""),
    )
    for told, visible, problem in cases:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        command.write_text(f"#!/bin/sh\nprintf '{told}'\n")
        assert problem in find_tf32_problem(uses_gpu=True)
        assert bool(problem) is bool(find_tf32_problem(uses_gpu=True))


def test_a_number_is_rounded_to_the_bits_of_a_factor() -> None:
    numbers = torch.tensor([1.0, 2047.0, 2049.0, -2051.0, 0.0, 3 * 2.0**-140, 1 + 2.0**-11])
    rounded = torch.tensor([1.0, 2047.0, 2048.0, -2052.0, 0.0, 3 * 2.0**-140, 1.0])
    assert torch.equal(round_to_bits(numbers, 11), rounded)


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_model_in_tf32_is_certified_where_its_factors_are_short(name: str) -> None:
    full = Baseline(model_spec(name), seed=5, data_size=2)
    baseline = replace(full, products=TF32)
    assert certify_exactness(full, range(1), torch.float32)
    with RoundedFactors():
        is_certified = bool(certify_exactness(baseline, range(1), torch.float32))
        found = baseline.run_rank(0, 0)
    wide = run_local(*convert_to_float64(baseline.build_module(), baseline.batch(0, 0)), baseline.objective)
    is_exact = all(torch.equal(found.grads[key].double(), grad) for key, grad in wide.grads.items())
    assert is_certified is (name not in LONG_FACTORS)
    assert is_exact or not is_certified


@pytest.mark.parametrize("factor", [3, 5])
def test_an_exact_model_with_longer_factors_is_not_certified(factor: int) -> None:
    with scaled(model_spec("exact"), factor) as spec:
        full, short = replace(in_tf32(spec, 1), products=Float32Products.FULL), in_tf32(spec, 1)
        assert certify_exactness(full, range(1), torch.float32), "float32 has the bits"
        found = certify_exactness(short, range(1), torch.float32)
        with RoundedFactors():
            assert not certify_exactness(short, range(1), torch.float32, short.objective) or found
    assert bool(found) is (factor == 3)
    assert factor == 3 or "the 11 bits of tf32 do not hold every factor" in found.reason


def test_the_calibration_of_torchs_kernels_follows_the_bits_of_the_factors() -> None:
    full = Baseline(model_spec("mlp"), seed=0, data_size=1)
    short = replace(full, products=TF32)
    assert (full.eps, short.eps) == (2.0**-23, 2.0**-10)
    assert replace(short, dtype=torch.bfloat16).eps == 2.0**-7
    with RoundedFactors():
        limits = calibrate(short, 0).limits
    assert limits.max_error > 100 * calibrate(full, 0).limits.max_error
