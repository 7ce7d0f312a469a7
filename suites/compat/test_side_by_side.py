"""The script that compares test files of DeepSpeed and PyTorch both ways: what it runs, reads and prints."""

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
    runs, tables = (load(f"both_ways.{name}", monkeypatch) for name in ("runs", "tables"))
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
    script = load("both_ways.pytorch", monkeypatch)
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
    assert bool(load("both_ways.pytorch", monkeypatch).RANK_CLASS.search(f"class TestIt({bases}):")) == starts


FILE_OF_DEEPSPEED = "class TestIt(DistributedTest): pass"


def test_the_script_writes_the_tables_of_both_projects_from_the_runs_that_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, runs = load("side_by_side", monkeypatch), load("both_ways.runs", monkeypatch)
    page = tmp_path / "page.md"
    page.write_text("", encoding="utf-8")
    for name, path, text in (
        ("deepspeed", "unit/comm/test_it.py", FILE_OF_DEEPSPEED),
        ("pytorch", "tensor/test_it.py", FILE_ON_GPUS),
    ):
        (tmp_path / name / path).parent.mkdir(parents=True)
        (tmp_path / name / path).write_text(text, encoding="utf-8")
        own = runs.FileRun(path, runs.Way.OWN, 2, 30.0, 9.0, 0, {"TestIt::test_it": ("passed", "")}, 600.0, 4)
        both = (own, replace(own, way=runs.Way.DROP_IN, cpu_seconds=2.0, processes=0))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(run.to_json() for run in both), encoding="utf-8")
        family = getattr(load(f"both_ways.{name}", monkeypatch), name.upper())
        blocks = load("both_ways.page", monkeypatch).Page(page, family)
        for summary in (*blocks.summaries, blocks.whole_summary):
            page.write_text(f"{page.read_text()}<summary>{summary}</summary>\n\n</details>\n", encoding="utf-8")
    projects = [f"--deepspeed={tmp_path / 'deepspeed'}", f"--pytorch={tmp_path / 'pytorch'}"]
    monkeypatch.setattr("sys.argv", ["", *projects, f"--records={tmp_path}", "--sample=2", f"--page={page}"])
    assert script.main() == 0
    tables = page.read_text(encoding="utf-8")
    assert tables.count("2 x or more: 1 of 1 files") == 2
    assert tables.index("| `comm/test_it.py`") < tables.index("| `tensor/test_it.py`")
    assert capsys.readouterr().out.count("4.5 x") == 4
    assert script.main() == 0, "the page has the files now, so that they do not run again"
    assert page.read_text(encoding="utf-8") == tables


def test_a_folder_without_the_files_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["", f"--pytorch={tmp_path}", f"--records={tmp_path}"])
    with pytest.raises(SystemExit, match="no test file of PyTorch"):
        load("side_by_side", monkeypatch).main()


def test_the_message_of_a_failure_is_the_exception_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = load("both_ways.recording", monkeypatch)
    traceback = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: planted\n\nTo execute this test'
    for start in ("RuntimeError: Process 2 exited with error code 10 and exception:", "Exception in worker process:"):
        crash = SimpleNamespace(message=f"{start}\n{traceback}")
        report = SimpleNamespace(passed=False, longrepr=SimpleNamespace(reprcrash=crash))
        assert recording.describe_problem(report) == "ValueError: planted"
