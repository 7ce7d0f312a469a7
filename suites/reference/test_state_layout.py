"""Parts of DeepSpeed's universal checkpoints: tensor parallelism, step counts, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn

from zharness.errors import CheckpointError
from zharness.law_kit.rank_actions import run_on_rank_0
from zharness.laws.state.refuse_pickle import PickledCommand
from zharness.laws.state.universal import write_universal_checkpoint
from zharness.reference import Engine, initialize
from zharness.reference.checkpoints.universal import TensorParallelSlice

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

two_ranks = pytest.mark.world_size(2)
GROUP = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1e-6, "weight_decay": 0.25}


def build_engine(stage: int = 3, net: Callable[[], nn.Module] = lambda: nn.Linear(3, 5), kind: str = "AdamW") -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    return initialize(model=net(), config=config)[0]


def numbers(out: int = 5) -> dict[str, dict[str, Tensor]]:
    def count(*shape: int) -> Tensor:
        return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1

    shapes = {"weight": (out, 3), "bias": (out,)}
    return {
        name: {"fp32": count(*s), "exp_avg": count(*s) * 2, "exp_avg_sq": count(*s) * 4} for name, s in shapes.items()
    }


def written(folder: Path, flat: bool = False, out: int = 5) -> Path:
    if dist.get_rank() == 0:
        write_universal_checkpoint(folder / "u", numbers(out), [GROUP], 3, flat)
    dist.barrier()
    return folder / "u"


def collect_state(engine: Engine) -> dict[str, Tensor]:
    state = engine.full_optimizer_state()
    return {**engine.full_params(), **{f"{n}/{k}": v for n, entry in state.items() for k, v in entry.items()}}


def assert_refused(engine: Engine, path: Path, words: str) -> None:
    before = collect_state(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load_universal_checkpoint(path, Mpu())
    after = collect_state(engine)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Mpu:
    """A model-parallel unit with Megatron's method names."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def get_tensor_model_parallel_rank(self) -> int:
        return self.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.size


class OldMpu:
    """A model-parallel unit with the other method names."""

    def get_model_parallel_rank(self) -> int:
        return 1

    def get_slice_parallel_world_size(self) -> int:
        return 2


def test_both_kinds_of_mpu_work_and_a_missing_one_warns_and_means_size_1() -> None:
    assert (
        TensorParallelSlice.from_mpu(Mpu(1, 2)) == TensorParallelSlice.from_mpu(OldMpu()) == TensorParallelSlice(1, 2)
    )
    with pytest.warns(UserWarning, match="no mpu is given"):
        assert TensorParallelSlice.from_mpu(None) == TensorParallelSlice(0, 1)
    with pytest.raises(CheckpointError, match="get_slice_parallel_rank"):
        TensorParallelSlice.from_mpu(object())


@pytest.mark.parametrize(
    ("saved", "shape", "wanted"),
    [
        ({"cat_dim": 0}, (2, 4), [[8, 9, 10, 11], [12, 13, 14, 15]]),
        ({"cat_dim": 1}, (4, 2), [[2, 3], [6, 7], [10, 11], [14, 15]]),
        ({"cat_dim": 0, "param_n_sub_params": 2}, (2, 4), [[4, 5, 6, 7], [12, 13, 14, 15]]),
        ({"cat_dim": 0, "vocab_tensor": True}, (3, 4), [[12, 13, 14, 15], [0, 0, 0, 0], [0, 0, 0, 0]]),
        ({}, (4, 4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
    ],
    ids=["columns", "rows", "sub-parameters", "vocabulary", "replicated"],
)
def test_the_second_of_two_tensor_parallel_ranks_gets_its_slice(
    saved: dict[str, Any], shape: tuple[int, ...], wanted: list[list[int]]
) -> None:
    full = torch.arange(16.0).view(4, 4)
    assert TensorParallelSlice(1, 2).slice_param("w", full, saved, shape).tolist() == wanted


def test_a_slice_of_another_shape_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"'w' has shape \(2, 4\) .*tensor-parallel rank 1 of 2, and \(3, 4\) in this model"
    ):
        TensorParallelSlice(1, 2).slice_param("w", torch.ones(4, 4), {}, (3, 4))


@pytest.mark.world_size(1, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tensor_parallel_slice_is_sharded_like_any_other_parameter(stage: int, shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path, out=10)
    run_on_rank_0(lambda: (path / "mp_rank_00_model_states.pt").rename(path / "mp_rank_01_model_states.pt"))
    engine = build_engine(stage)
    engine.load_universal_checkpoint(path, OldMpu())
    for name, entry in numbers(10).items():
        assert torch.equal(engine.full_params()[name], entry["fp32"][5:])
        state = engine.full_optimizer_state()[name]
        assert torch.equal(state["exp_avg"], entry["exp_avg"][5:])
        assert torch.equal(state["exp_avg_sq"], entry["exp_avg_sq"][5:])
        assert state["step"].item() == 3
    group = engine.optimizer.param_groups[0]
    assert {key: group[key] for key in GROUP} == GROUP


@two_ranks
def test_steps_have_to_be_equal_and_a_missing_count_keeps_the_engines(shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path)
    engine = build_engine()
    step = path / "zero" / "bias" / "step.pt"
    run_on_rank_0(lambda: torch.save(torch.tensor(4.0), step))
    assert_refused(engine, path, r"steps \[3.0, 4.0\] .* are not equal")
    run_on_rank_0(lambda: torch.save(None, step))
    assert_refused(engine, path, r"steps \[3.0, None\] .* are not equal")
    run_on_rank_0(lambda: torch.save(None, path / "zero" / "weight" / "step.pt"))
    assert_refused(engine, path, "no step count for 'weight', and this engine has not stepped it")
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    engine.load_universal_checkpoint(path, Mpu())
    assert {state["step"].item() for state in engine.full_optimizer_state().values()} == {2}


@two_ranks
@pytest.mark.parametrize("flat", [False, True], ids=["stages 1 and 2", "stage 3"])
def test_a_missing_part_or_another_models_is_named(flat: bool, shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path, flat)
    model = next(path.glob("*_model_states.pt")).name
    engine = build_engine()
    for piece, words in (
        ("zero/optimizer_state.pt", "optimizer_state.pt, the optimizer's global state, is missing: convert"),
        ("zero/weight/exp_avg.pt", "weight/exp_avg.pt is missing"),
        ("zero/weight/fp32.pt", "weight/fp32.pt is missing"),
        (model, r"model_states.pt in .* are not complete"),
    ):
        run_on_rank_0(lambda p=piece: (path / p).rename(path / "aside"))
        assert_refused(engine, path, words)
        run_on_rank_0(lambda p=piece: (path / "aside").rename(path / p))
    assert_refused(build_engine(net=lambda: nn.Linear(3, 6)), path, "'weight' has shape|elements")
    assert_refused(
        build_engine(net=lambda: nn.Linear(3, 5, bias=False)), path, "this model does not have its parameter 'bias'"
    )
    assert_refused(build_engine(net=lambda: nn.BatchNorm1d(5)), path, "it has no buffer 'running_mean' ")
    assert_refused(build_engine(kind="SGD"), path, "use Adam")
    assert_refused(engine, shared_tmp_path, "no universal checkpoint in .* run ds_to_universal")
    run_on_rank_0(lambda: shutil.rmtree(path / "zero" / "weight"))
    assert_refused(engine, path, "weight/.*pt is missing")


@two_ranks
def test_code_in_any_file_is_refused_and_never_runs(shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path)
    engine, marker = build_engine(), shared_tmp_path / "ran"
    files = sorted(path.rglob("*.pt"))
    for file in files:
        content = file.read_bytes()
        run_on_rank_0(lambda f=file: torch.save({"param": PickledCommand(marker)}, f))
        assert_refused(engine, path, rf"{file.name} is refused: it contains {os.mkdir.__module__}.mkdir")
        run_on_rank_0(lambda f=file, w=content: f.write_bytes(w))
        run_on_rank_0(lambda f=file, w=content: f.write_bytes(w[: len(w) // 2]))
        assert_refused(engine, path, f"{file.name} is damaged")
        run_on_rank_0(lambda f=file, w=content: f.write_bytes(w))
    assert not marker.exists()
    engine.load_universal_checkpoint(path, Mpu())


class Tuned(nn.Linear):
    """A model with extra state: a number that is neither parameter nor buffer."""

    tuning = 0

    def get_extra_state(self) -> int:
        return self.tuning

    def set_extra_state(self, state: int) -> None:
        self.tuning = state


@two_ranks
def test_extra_state_is_loaded_from_the_model_file_and_must_be_there(shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path)
    engine = build_engine(net=lambda: Tuned(3, 5))
    assert_refused(engine, path, r"it has no extra state \['_extra_state'\]")
    file = next(path.glob("*_model_states.pt"))
    model = torch.load(file)
    run_on_rank_0(lambda: torch.save(model | {"module": {"_extra_state": 7}}, file))
    engine.load_universal_checkpoint(path, Mpu())
    assert engine.module.tuning == 7
