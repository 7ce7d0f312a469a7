"""`zharness doctor`: what it inspects, and which findings are problems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from zharness.doctor import command, process, ranks
from zharness.doctor.finding import Finding, Severity, format_bytes, make_finding
from zharness.doctor.machine import inspect_devices, inspect_release_cache, inspect_shared_memory, parse_cpu_quota
from zharness.parity.contamination import ProcessConditions
from zharness.world import RankServer, limits
from zharness.world.limits import available_memory, cgroup_memory_left


def test_the_command_looks_at_everything_and_finds_no_problem_here(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "zharness", "doctor", "--json"],
        capture_output=True, text=True, env={**os.environ, "ZHARNESS_CACHE": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    found = {each["what"]: each for each in json.loads(run.stdout)}
    assert run.returncode == 0, run.stdout
    assert found["2 ranks"]["state"] == "ok"
    assert found["functions of torch"]["found"] == "none was replaced"
    assert {"python", "torch", "engine fsdp2", "cores", "memory", "open files", "processes", "shared memory"} <= {
        *found
    }
    assert {"loopback interface", "gloo", "nccl", "devices", "cache of releases", "fork", "CUDA"} <= {*found}
    assert {"number of threads", "TF32 in products", "deterministic kernels"} <= {*found}


def test_a_problem_fails_the_command_and_a_warning_does_not() -> None:
    fine, warned = (
        make_finding("a", 1, Severity.WARNING, False, "do"),
        make_finding("b", 2, Severity.WARNING, True, "do this"),
    )
    broken = make_finding("c", 3, Severity.PROBLEM, True, "do that")
    assert command.exit_code([fine, warned]) == 0
    assert command.exit_code([fine, broken]) == 1
    output = command.render_findings([fine, warned, broken])
    assert "-> do this" in output
    assert "-> do that" in output
    assert output.endswith("1 problems, 1 warnings")


def never_return() -> float:
    threading.Event().wait()
    return 0.0


def test_ranks_that_do_not_come_in_time_are_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine two ranks may finish before their server looks at the time for the first time.
    monkeypatch.setattr(ranks, "sum_over_ranks", never_return)
    found = ranks.inspect_two_ranks(timeout=0.0)
    assert found.severity is Severity.PROBLEM
    assert "loopback" in found.remedy


def test_ranks_that_cannot_be_started_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RankServer) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(RankServer, "__init__", refuse)
    assert ranks.inspect_two_ranks() == Finding(
        "2 ranks", Severity.PROBLEM, "did not start: no more processes", ranks.REMEDY
    )


def test_a_function_of_torch_that_somebody_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: None)
    (found,) = (each for each in process.inspect_torch_settings() if each.title == "functions of torch")
    assert found.severity is Severity.PROBLEM
    assert "torch.nn.functional.linear is replaced by" in found.observation


def test_replaced_functions_are_all_told() -> None:
    assert process.inspect_replaced_functions(
        ProcessConditions({}, ("a is replaced by b", "c is replaced by d"))
    ).observation == ("a is replaced by b; c is replaced by d")


def test_the_limits_of_a_control_group_are_read_in_both_versions(tmp_path: Path) -> None:
    assert parse_cpu_quota("max 100000") is None
    assert parse_cpu_quota("150000 100000") == 1.5
    assert cgroup_memory_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert cgroup_memory_left(tmp_path) is None
    (tmp_path / "memory.max").write_text("105\n")
    assert cgroup_memory_left(tmp_path) == 100
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 2\nactive_file 1\n")
    assert cgroup_memory_left(tmp_path) == 103, "cached files are given up for new processes"
    old = tmp_path / "old" / "memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (old / "memory.usage_in_bytes").write_text("7\n")
    assert cgroup_memory_left(tmp_path / "old") is None


def test_what_the_control_group_leaves_bounds_the_memory_that_ranks_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cgroup_memory_left", lambda: 4 * limits.RANK_BYTES)
    assert available_memory() == 4 * limits.RANK_BYTES
    assert limits.largest_world_size() == (4, "free memory")


def test_what_is_missing_is_told_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inspect_shared_memory(tmp_path / "none").severity is Severity.WARNING
    monkeypatch.setenv("ZHARNESS_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert inspect_devices().severity is Severity.PROBLEM
    (tmp_path / "release").write_bytes(b"1" * 2048)
    assert "2 KiB" in inspect_release_cache(tmp_path).observation
    assert inspect_release_cache(tmp_path / "not" / "there").severity is Severity.OK


def test_sizes_are_told_in_the_unit_that_fits() -> None:
    assert [format_bytes(5), format_bytes(1536), format_bytes(3 * 2**20), format_bytes(5 * 2**40)] == [
        "5 B",
        "1.5 KiB",
        "3 MiB",
        "5120 GiB",
    ]
