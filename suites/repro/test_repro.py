"""Reproductions of real bugs on the installed release, on a broken one, and when a script fails otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zharness.errors import UsageError
from zharness.releases import repros as repro
from zharness.releases.repros import Verdict

HEADER = '''"""A made-up bug.

id: 1
engine: deepspeed
symptom: none
reported: nowhere
affects: >=0.18.3,<=0.19.5
fixed: 0.19.6
broken: 0.18.8
ranks: 2
law: training.grads
signature: the expected error
ok: repro: nothing wrong OK.
"""
'''


def script(folder: Path, body: str = "", header: str = HEADER) -> repro.Repro:
    path = folder / "deepspeed_1_made_up.py"
    path.write_text(header + body)
    return repro.parse(path)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A zombie has ended; only its parent has not asked yet.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_7352_is_reproduced_on_the_installed_release() -> None:
    result = repro.run(repro.find("7352"))
    assert result.verdict is Verdict.REPRODUCED, result.output
    assert "The size of tensor a (0) must match the size of tensor b (16)" in result.evidence
    assert result.as_expected


def test_7913_is_absent_from_the_installed_release() -> None:
    result = repro.run(repro.find("#7913"))
    assert result.verdict is Verdict.NOT_REPRODUCED, result.output
    assert result.evidence == "repro: grad_and_value over zero3_linear_wrap (LinearFunctionForZeroStage3) OK."
    assert result.as_expected


def test_7913_is_reproduced_on_a_release_before_its_fix() -> None:
    found = repro.find("7913")
    assert found.sides() == (None, "0.18.8")
    result = repro.run(found, "0.18.8")
    assert result.verdict is Verdict.REPRODUCED, result.output
    assert "must override the setup_context staticmethod" in result.evidence
    assert result.release == "0.18.8"
    assert result.as_expected


@pytest.mark.parametrize(
    ("body", "evidence"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("raise RuntimeError('the expected error')", "RuntimeError: the expected error"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "Signal 11 (SIGSEGV)"),
        ("print('all is well')", "all is well"),
    ],
    ids=["import", "signature without the marker", "signal", "silence"],
)
def test_a_script_that_ends_otherwise_is_no_reproduction(tmp_path: Path, body: str, evidence: str) -> None:
    result = repro.run(script(tmp_path, body))
    assert result.verdict is Verdict.FAILED_OTHERWISE, result.output
    assert evidence in result.evidence
    assert not result.as_expected


def test_a_script_past_its_deadline_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repro, "_GRACE_SECONDS", 2.0)
    body = f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join({str(tmp_path)!r}, "pid" + os.environ["RANK"]), "w").write(str(os.getpid()))
while True:
    signal.pause()
"""
    result = repro.run(script(tmp_path, body), seconds=15.0)
    assert result.verdict is Verdict.FAILED_OTHERWISE
    assert result.evidence == "did not end within 15 s"
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    assert not [pid for pid in pids if alive(pid)]


def test_the_marker_needs_the_signature_beside_it(tmp_path: Path) -> None:
    made_up = script(tmp_path)
    assert repro.judge(made_up, 1, f"x\n{repro.MARKER}the expected error!\ny")[0] is Verdict.REPRODUCED
    assert repro.judge(made_up, 1, f"{repro.MARKER}another error\nthe expected error")[0] is Verdict.FAILED_OTHERWISE
    assert repro.judge(made_up, 0, "repro: nothing wrong OK.")[0] is Verdict.NOT_REPRODUCED
    assert repro.judge(made_up, 1, "repro: nothing wrong OK.")[0] is Verdict.FAILED_OTHERWISE
    assert repro.judge(made_up, 0, "repro: nothing wrong OK. Or is there?")[0] is Verdict.FAILED_OTHERWISE


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.18.2", None),
        ("0.18.3", Verdict.REPRODUCED),
        ("0.19.5", Verdict.REPRODUCED),
        ("0.19.6", Verdict.NOT_REPRODUCED),
        ("0.19.10", Verdict.NOT_REPRODUCED),
        ("1.0.0+cpu", Verdict.NOT_REPRODUCED),
    ],
)
def test_the_header_says_what_a_release_should_show(tmp_path: Path, release: str, expected: Verdict | None) -> None:
    assert script(tmp_path).expected(release) is expected


def test_an_open_bug_is_expected_on_every_later_release() -> None:
    assert repro.find("7352").expected("99.0") is Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        ("law: training.grads\n", "", "lacks the lines law:"),
        ("ranks: 2", "ranks: two", "got ranks: two"),
        ("affects: >=0.18.3,<=0.19.5", "affects: older ones", "got affects: older ones"),
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, line: str, instead: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        script(tmp_path, header=HEADER.replace(line, instead))


def test_an_engine_of_torch_runs_on_the_installed_torch_alone(tmp_path: Path) -> None:
    of_torch = script(tmp_path, header=HEADER.replace("engine: deepspeed", "engine: fsdp1"))
    with pytest.raises(UsageError, match=r"got fsdp1 of torch 2\.4\.0, but torch .* environment of its own"):
        repro.run(of_torch, "2.4.0")


def test_an_unknown_reproduction_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown reproduction '1234'; allowed: 7352, 7913"):
        repro.find("1234")


def test_a_package_without_its_checkout_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="part of a checkout"):
        repro.catalogue(tmp_path)


def test_every_script_stands_alone() -> None:
    for found in repro.catalogue():
        text = found.path.read_text()
        assert "zharness" not in text, f"{found.path.name} must run where only torch and {found.engine} are installed"
        assert f"--nproc_per_node={found.ranks} repro/{found.path.name}" in text
        assert found.path.name.startswith(f"{found.engine}_{found.id}_")
        assert os.linesep.join(("", f'SIGNATURE = "{found.signature}"')) in text
