"""A model that does not fit into memory is refused before it is built, whatever sets the limit."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from suites.meta.documents import ROOT
from zharness import engines
from zharness.errors import UsageError
from zharness.releases.rank_environment import prepare_rank_environment
from zharness.run import Request
from zharness.run.check_loop import RunOptions
from zharness.run.model_check import RunnerLanes
from zharness.run.model_facts import measure_model
from zharness.run.model_memory import (
    GIB,
    MODEL_PACKAGES,
    ModelSize,
    build_within_memory,
    estimate_size,
    explain_too_large,
    needs_calibration,
)
from zharness.workload import model_spec
from zharness.world import limits
from zharness.world.limits import KEPT_HEAP_BYTES, keep_freed_memory
from zharness.world.server import RankEnvironment, run

LARGE = "suites.model.large"
REFUSED = "expected no law to run"


def run_model(
    factory: str, before: Callable[[], None] = lambda: None, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `zharness model` on a factory of ``large.py`` in a process that calls ``before`` first."""
    return subprocess.run(
        [sys.executable, "-m", "zharness", "model", f"{LARGE}:{factory}", "--stage", "0", "--jobs", "1", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=before,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_model_of_terabytes_is_refused_before_it_is_built() -> None:
    done = run_model("many_layers")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "a model of 6400." in done.stderr
    assert "use fewer ranks, fewer layers" in done.stderr
    assert "law" not in done.stdout, REFUSED
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert largest < 4 * GIB, "not one of its layers was built"


def test_a_limit_of_the_shell_refuses_a_rank_that_is_too_large() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (4 * GIB, 4 * GIB))

    done = run_model("of_half_a_gib", limit)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "a model of 0.5 GiB needs about 6.0 GiB in one rank, but the limits of this shell" in done.stderr
    assert "--ignore-memory-limit" in done.stderr, "the sentence names the way out"


def test_a_user_may_run_a_model_that_seems_too_large() -> None:
    """Run a model of 64 MiB: only the estimate and the limit are compared; the test before this has the large one."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (GIB * 3 // 4, GIB * 3 // 4))

    done = run_model("of_64_mib", limit, ("--ignore-memory-limit", "--only", "training.forward_alone"))
    warning = next(line for line in done.stderr.splitlines() if line.startswith("WARNING"))
    assert "needs about 1.2 GiB in one rank, but the limits of this shell" in warning
    assert "; 1 cell, about" in done.stderr, "the law is announced after the warning"


def test_frozen_parameters_have_no_gradients_optimizer_state_or_master_weights() -> None:
    size = estimate_size(f"{LARGE}:adapter_on_frozen_layers", "bf16").size
    assert size is not None
    assert (size.trained_parameters, size.frozen_bytes) == (8 << 12, 24 << 25)
    assert size.estimate_memory(2) < 15 * GIB, "with moments and master weights for all of them it was 39 GiB"
    trained = ModelSize(size.parameters, size.parameter_bytes, has_masters=True)
    assert trained.estimate_memory(2) > 39 * GIB
    assert size.judge_bytes() > size.frozen_parameters * 8, "the judge copies frozen weights to float64 as well"


def test_a_buffer_is_copied_as_often_as_a_frozen_weight() -> None:
    size = estimate_size(f"{LARGE}:with_large_buffers", "fp32").size
    assert size is not None
    assert (size.buffers, size.buffer_bytes) == (1 << 20, 1 << 22)
    bare = replace(size, buffers=0, buffer_bytes=0)
    frozen = replace(bare, parameters=bare.parameters + (1 << 20), parameter_bytes=bare.parameter_bytes + (1 << 22))
    frozen = replace(frozen, frozen_parameters=1 << 20, frozen_bytes=1 << 22)
    assert size.estimate_memory(2) == frozen.estimate_memory(2) > bare.estimate_memory(2)
    assert "a model of 0.0 GiB and 2.0 GiB of buffers" in explain_too_large(replace(size, buffer_bytes=2 * GIB), 2, 0)


@contextmanager
def make_cgroup(limit_bytes: int) -> Iterator[Callable[[], None]]:
    """Make a cgroup that allows ``limit_bytes``, and yield a function by which a process enters it.

    Skips the test if this user may not make a cgroup.
    """
    version_1 = limits.CGROUP_ROOT / "memory"
    folder = (version_1 if version_1.exists() else limits.CGROUP_ROOT) / f"zharness-test-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if version_1.exists() else "memory.max")
    try:
        folder.mkdir()
        limit.write_text(str(limit_bytes))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"this user cannot make a cgroup with a limit: {error}")

    def enter() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    yield enter
    folder.rmdir()


def test_a_limit_of_the_cgroup_refuses_the_model() -> None:
    with make_cgroup(4 * GIB) as enter:
        done = run_model("of_half_a_gib", enter)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "GiB on 2 ranks (each up to 6.0 GiB" in done.stderr
    assert "but only 3." in done.stderr
    assert "GiB are free" in done.stderr


def test_a_model_that_is_let_in_stays_within_the_limit_of_the_cgroup() -> None:
    """Run the law with most files, those of two engines, in a cgroup with little more than what is announced."""
    announced = ModelSize(1 << 20, 1 << 22).estimate_memory(2)
    with make_cgroup(announced + GIB // 2) as enter:
        done = run_model("of_4_mib", enter, ("--only", "state.resume"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"at most {announced / GIB:.1f} GiB, and 0.2 GiB of temporary files" in done.stderr


def test_the_limits_of_this_process_s_cgroup_and_of_those_above_it_apply(tmp_path: Path) -> None:
    inner, membership = tmp_path / "outer" / "inner", tmp_path / "membership"
    inner.mkdir(parents=True)
    membership.write_text("5:cpu,cpuacct:/other\n0::/outer/inner\n")
    for folder, limit, used in ((inner, "max", "10"), (tmp_path / "outer", "100", "30"), (tmp_path, "1000", "30")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
    assert limits.cgroup_memory_left(tmp_path, membership) == 70
    (inner / "memory.max").write_text("50")
    assert limits.cgroup_memory_left(tmp_path, membership) == 40
    old = tmp_path / "memory" / "mine"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("25")
    (old / "memory.usage_in_bytes").write_text("5")
    membership.write_text("4:memory:/mine\n")
    assert limits.cgroup_memory_left(tmp_path, membership) == 20


def test_a_factory_that_reads_its_weights_is_measured_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = estimate_size(f"{LARGE}:reading_its_weights", "fp32")
    assert estimate.size is None
    assert "DataDependentOutputException" in estimate.reason
    monkeypatch.setattr("zharness.run.model_memory.available_memory", lambda: GIB // 4)
    with pytest.raises(UsageError, match=r"the factory needs more memory than the 0\.2 GiB that are free"):
        measure_model(f"{LARGE}:reading_its_weights", "fp32", "")
    monkeypatch.setattr("zharness.run.model_memory.available_memory", lambda: 2 * GIB)
    with pytest.raises(UsageError, match=r"a model of 0\.5 GiB needs about"):
        measure_model(f"{LARGE}:reading_its_weights", "fp32", "")


def test_a_factory_without_memory_is_not_told_to_ignore_the_limit_again() -> None:
    def raise_out_of_memory() -> nn.Module:
        raise MemoryError

    spec = replace(model_spec("exact"), name="huge", build=raise_out_of_memory)
    with pytest.raises(UsageError, match=r"the factory needs more memory .* --ignore-memory-limit"):
        build_within_memory(spec, 0, "fp32", 2)
    with pytest.raises(UsageError, match=r"or a machine with more memory$"):
        build_within_memory(spec, 0, "fp32", 2, ignore_memory_limit=True)


def test_a_model_that_its_factory_converts_is_measured_before_it_is_built() -> None:
    estimate = estimate_size(f"{LARGE}:converted", "bf16")
    assert estimate.size is not None, estimate.reason
    assert estimate.size.parameter_bytes == 2 * estimate.size.parameters > 8 * GIB
    assert estimate.size.has_masters


def test_a_factory_that_ends_its_process_has_no_estimate() -> None:
    assert estimate_size(f"{LARGE}:ending_its_process", "fp32").reason == "the process ended"


def test_the_estimate_leaves_nothing_in_the_process() -> None:
    assert estimate_size(f"{LARGE}:reuse_layer", "fp32").size == ModelSize(26, 104)
    assert measure_model(f"{LARGE}:reuse_layer", "fp32", "").size == ModelSize(26, 104)


class AllocatorFacts(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "hblks")), ("rest", ctypes.c_int * 6))


def count_mappings_of_a_copy() -> int:
    """Return how many mappings of its own malloc makes for a copy of a tensor."""
    read = ctypes.CDLL(None).mallinfo
    read.restype = AllocatorFacts
    tensor = torch.ones(1 << 21)
    before = read().hblks
    copied = tensor.clone()
    return int(read().hblks) - int(before) + 0 * len(copied)


def count_mappings_by_default_and_after_keeping_memory() -> tuple[int, int]:
    # malloc raises its default when it frees a mapping, as the process that this one is a fork of may have done.
    ctypes.CDLL(None).mallopt(limits.M_MMAP_THRESHOLD, 128 * 2**10)
    default = count_mappings_of_a_copy()
    keep_freed_memory()
    return default, count_mappings_of_a_copy()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo"), reason="only glibc has mallinfo")
def test_freed_memory_is_kept_for_the_next_copy() -> None:
    ((default, kept),) = run(count_mappings_by_default_and_after_keeping_memory)
    assert (default, kept) == (1, 0)


def test_the_estimate_names_the_modules_that_every_process_would_import() -> None:
    pytest.importorskip("transformers")
    (modules,) = run(name_modules_of_gpt2)
    assert "transformers.models.gpt2.modeling_gpt2" in modules
    assert not any(name.startswith(("suites", "torch.")) for name in modules)
    assert estimate_size(f"{LARGE}:adapter_on_frozen_layers", "fp32").modules == tuple(
        name for name in sys.modules if name.partition(".")[0] in MODEL_PACKAGES
    )


def name_modules_of_gpt2() -> tuple[str, ...]:
    return estimate_size("suites.model.tiny_real:gpt2", "fp32").modules


def is_imported(_model: str, name: str) -> bool:
    return name in sys.modules


def test_judges_inherit_the_modules_that_are_imported_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "imported_ahead_of_the_judge"
    (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with RunnerLanes(RunOptions(jobs=1), "reference", prepare_rank_environment) as lanes:
        (first,) = lanes.take(1)
        assert not first.call_in_judge(is_imported, "", name)
        lanes.import_ahead((name, "a_module_that_does_not_exist"))
        assert lanes.take(1) != [first]
        assert lanes.take(1)[0].call_in_judge(is_imported, "", name)
        second = lanes.take(1)
        lanes.import_ahead((name, "a_module_that_does_not_exist"))
        assert lanes.take(1) == second, "nothing new was imported"
    sys.modules.pop(name)
    of_a_release = RunnerLanes(
        RunOptions(jobs=1), "reference", lambda _engine: RankEnvironment(("/a/release",), module="a_package")
    )
    with of_a_release:
        of_a_release.import_ahead((name,))
    assert name not in sys.modules, "the release may bring its own packages"


@pytest.mark.exhaustive
def test_packages_of_models_start_no_thread_when_they_are_imported() -> None:
    code = (
        "import os, torch; count = lambda: len(os.listdir('/proc/self/task')); before = count()\n"
        "import transformers.models.gpt2.modeling_gpt2, peft; assert count() == before"
    )
    pytest.importorskip("transformers")
    if Path("/proc/self/task").exists():
        subprocess.run([sys.executable, "-c", code], check=True)


def test_masters_and_float64_copies_count() -> None:
    full, low = ModelSize(1 << 28, 1 << 30), ModelSize(1 << 28, 1 << 29, has_masters=True)
    assert low.reserved_bytes() == KEPT_HEAP_BYTES
    assert ModelSize(1 << 20, 1 << 22).reserved_bytes() == 2 << 22, "a small model frees no more than it has"
    assert full.rank_bytes() - low.rank_bytes() == 7 * (1 << 29) - 2 * (1 << 30)
    assert full.judge_bytes() - low.judge_bytes() == 5 * (1 << 29), "float64 copies depend on elements alone"
    assert full.estimate_memory(4) - full.estimate_memory(2) == 2 * full.rank_bytes()
    calibrated = replace(full, is_calibrated=True)
    assert calibrated.judge_bytes() - full.judge_bytes() == (12 * 4 + 8 * 8) * full.parameters
    assert calibrated.judge_bytes(4) - calibrated.judge_bytes(2) == 4 * 8 * full.parameters
    assert not explain_too_large(full, 2, 1e12)
    assert "GiB are free" in explain_too_large(full, 2, 1e9)
    assert "limits of this shell" in explain_too_large(full, 2, 1e12, 1e9)


def test_kernels_of_an_engine_need_more_memory_where_their_laws_run() -> None:
    def claims(_engine: str, stage: int) -> engines.Capabilities:
        return replace(engines.Capabilities(frozenset({2, 3})), own_kernels={3: "its own linear"} if stage == 3 else {})

    request = Request((), ("my_engine:MyEngine",))
    assert needs_calibration(request, claims)
    assert needs_calibration(replace(request, patterns=("model",)), claims)
    assert not needs_calibration(replace(request, stages=(2,)), claims)
    assert not needs_calibration(replace(request, patterns=("state",)), claims)
