"""The options --device and --backend of ``zharness check``."""

from __future__ import annotations

import os

import pytest

from suites.warm import programs
from zharness.cli.options import requested_device
from zharness.device import BACKEND_VARIABLE, DEVICE_VARIABLE

LAWS = ("training.grads", "training.clip_and_norm", "torch_func.grad", "parameters.every_kind")


@pytest.mark.parametrize("engine", ["reference", "fsdp2", "ddp", "zero1"])
def test_laws_hold_over_the_staged_backend(engine: str) -> None:
    done = programs.run(
        "-m", "zharness", "check", *LAWS, "--engine", engine, "--backend", "staged", "--model", "mlp,odd"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass" in done.stdout


def test_a_request_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    with requested_device("", "staged"):
        assert (os.environ[DEVICE_VARIABLE], os.environ[BACKEND_VARIABLE]) == ("cpu", "staged")
    assert os.environ[DEVICE_VARIABLE] == "cpu"
    assert BACKEND_VARIABLE not in os.environ
