"""The script that compares test files of PyTorch both ways: what it runs, reads and prints."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from suites.meta.documents import ROOT


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module(name)


def test_a_reason_has_no_path_of_the_module_that_lacks_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, tables = (load(f"deepspeed_files.{name}", monkeypatch) for name in ("runs", "tables"))
    message = "ImportError: cannot import name 'a' from 'torch.b' (/usr/lib/python3/site-packages/torch/b.py)"
    run = runs.FileRun("test_b.py", runs.Way.OWN, 0, 1.0, 1.0, 2, {runs.COLLECTION: ("failed", message)})
    assert tables.find_reason(run) == "ImportError: cannot import name 'a' from 'torch.b'"


FILE_ON_GPUS = """
from torch.testing._internal.common_cuda import TEST_CUDA
from torch.testing._internal.common_fsdp import FSDPTest, MLP
from torch.testing._internal.distributed._tensor.common_dtensor import with_comms

@unittest.skipIf(not TEST_CUDA, "no CUDA")
class TestIt(FSDPTest):
    def test_it(self):
        torch.cuda.manual_seed(0)
        model = DDP(MLP(2).cuda(), device_ids=[self.rank])
        mesh = init_device_mesh("cuda", (torch.cuda.device_count(),))
        torch.ones(1, device=f"cuda:{self.rank}")
"""


def test_a_file_of_pytorch_is_ported_to_the_cpu_and_its_imports_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("side_by_side", monkeypatch)
    text = script.swap_imports(script.port_to_cpu(FILE_ON_GPUS))
    for line in (
        "from zharness.compat.pytorch.common_fsdp import FSDPTest, MLP",
        "from zharness.compat.pytorch.common_dtensor import with_comms",
        '@unittest.skipIf(False, "no CUDA")',
        "        torch.manual_seed(0)",
        "        model = DDP(MLP(2).cpu())",
        '        mesh = init_device_mesh("cpu", (torch.cpu.device_count(),))',
        '        torch.ones(1, device="cpu")',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("bases", "starts"), [("FSDPTest", True), ("FSDPTestMultiThread", False), ("DTensorOpTestBase", False)]
)
def test_a_file_without_a_class_that_starts_ranks_is_listed_and_not_run(
    bases: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bool(load("side_by_side", monkeypatch).RANK_CLASS.search(f"class TestIt({bases}):")) == starts


def test_the_script_prints_the_table_of_the_runs_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, runs = load("side_by_side", monkeypatch), load("deepspeed_files.runs", monkeypatch)
    (tmp_path / "test_it.py").write_text(FILE_ON_GPUS, encoding="utf-8")
    run = runs.FileRun("test_it.py", runs.Way.OWN, 0, 30.0, 9.0, 0, {"TestIt::test_it": ("passed", "")}, 600.0, 4)
    both = (run, replace(run, way=runs.Way.DROP_IN, cpu_seconds=2.0, processes=0))
    (tmp_path / "runs.jsonl").write_text("\n".join(run.to_json() for run in both), encoding="utf-8")
    arguments = ["--root", str(tmp_path), "--jsonl", str(tmp_path / "runs.jsonl"), "--only-tables", "test_it.py"]
    monkeypatch.setattr("sys.argv", ["side_by_side.py", *arguments])
    assert script.main() == 0
    assert "2 x or more: 1 of 1 files" in capsys.readouterr().out


def test_the_message_of_a_failure_is_the_exception_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = load("deepspeed_files.recording", monkeypatch)
    traceback = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: planted\n\nTo execute this test'
    for start in ("RuntimeError: Process 2 exited with error code 10 and exception:", "Exception in worker process:"):
        crash = SimpleNamespace(message=f"{start}\n{traceback}")
        report = SimpleNamespace(passed=False, longrepr=SimpleNamespace(reprcrash=crash))
        assert recording.describe_problem(report) == "ValueError: planted"
