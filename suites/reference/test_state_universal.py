"""The reference engine loads universal checkpoints that DeepSpeed wrote, and continues training from them."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn

from suites.reference.helpers import assert_same
from zharness.engines import deepspeed, optimizers
from zharness.engines.protocol import EngineConfig, GroupSpec, OptimizerSpec
from zharness.errors import CheckpointError
from zharness.laws.state.universal import write_universal_checkpoint
from zharness.reference import Engine, initialize
from zharness.reference.checkpoints import unpickling

# These tests check results in hundreds of collectives; comparing the calls of each would double their time.
pytestmark = pytest.mark.collectives("trusted")

GROUPS = (GroupSpec("*bias", {"lr": 0.05, "weight_decay": 0.0}),)


class Net(nn.Module):
    """Buffers, a tied weight and a frozen parameter; 2 divides the size of no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.frozen(torch.tanh(self.norm(self.first(x)))))


def spec(groups: tuple[GroupSpec, ...]) -> OptimizerSpec:
    return OptimizerSpec("adamw", {"lr": 1e-2, "weight_decay": 0.1}, groups, schedule=(1.0, 0.5, 0.25, 0.125))


def compute_loss(call: Any, step: int) -> Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return call(torch.randn(3, 5)).pow(2).mean()


def train_with_deepspeed(stage: int, groups: tuple[GroupSpec, ...], folder: Path) -> dict[str, Any]:
    """Train three steps with DeepSpeed, save and convert. Returns the state that DeepSpeed reports."""
    torch.manual_seed(0)
    engine = deepspeed.factory(Net(), EngineConfig(stage, optimizer=spec(groups), micro_batch_size=3))
    for step in range(3):
        engine.backward(compute_loss(engine, step))
        engine.step()
        engine.zero_grad()
    engine._engine.save_checkpoint(str(folder), tag="t", client_state={"epoch": 3})
    params, state, rates = engine.full_params(), engine.full_optimizer_state(), engine.observe().learning_rates
    buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
    engine.close()
    if dist.get_rank() == 0:
        convert(folder / "t", folder / "u")
    rank_0_buffers = [buffers]
    dist.broadcast_object_list(rank_0_buffers)  # this is a barrier too
    return {"params": params, "state": state, "rates": rates, "buffers": rank_0_buffers[0]}


def convert(source: Path, target: Path) -> None:
    """Run DeepSpeed's own conversion in this process."""
    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(argparse.Namespace(input_folder=str(source), output_folder=str(target), **workers, **flags))


def reading_engine(stage: int, groups: tuple[GroupSpec, ...]) -> Engine:
    torch.manual_seed(9)
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}}
    wanted = {name for name, p in Net().named_parameters() if p.requires_grad}

    def build(leaves: dict[str, Tensor]) -> torch.optim.Optimizer:
        return optimizers.build({name: leaf for name, leaf in leaves.items() if name in wanted}, spec(groups))

    return initialize(
        model=Net(), config=config, optimizer=build, lr_scheduler=lambda made: optimizers.schedule(made, spec(groups))
    )[0]


def plain_from(saved: dict[str, Any], groups: tuple[GroupSpec, ...]) -> tuple[dict[str, Tensor], Any]:
    """Make a plain model and a torch.optim optimizer with the state that DeepSpeed reported."""
    params = {name: value.clone() for name, value in saved["params"].items()}
    optimizer = optimizers.build({name: params[name] for name in saved["state"]}, spec(groups))
    for name, state in saved["state"].items():
        optimizer.state[params[name]] = {key: value.clone() for key, value in state.items()}
    for group, rate in zip(optimizer.param_groups, saved["rates"], strict=True):
        group["lr"] = rate
    return params, optimizer


@pytest.mark.warm("deepspeed")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_deepspeed_checkpoint_loads_at_every_stage_and_trains_on_like_plain_pytorch(
    written: int, groups: tuple[GroupSpec, ...], shared_tmp_path: Path
) -> None:
    saved = train_with_deepspeed(written, groups, shared_tmp_path)
    for stage in range(4):
        engine = reading_engine(stage, groups)
        with pytest.warns(UserWarning, match="no mpu is given: assuming tensor-parallel size 1"):
            _, client_state = engine.load_universal_checkpoint(shared_tmp_path)
        assert client_state == {"epoch": 3}
        assert engine.steps == 3
        assert tuple(group["lr"] for group in engine.optimizer.param_groups) == saved["rates"]
        assert engine.schedule.last_epoch == 3
        assert_same(engine.full_params(), saved["params"])
        for name, state in engine.full_optimizer_state().items():
            assert_same(state, saved["state"][name])
        assert engine.full_optimizer_state().keys() == saved["state"].keys()
        assert_same(dict(engine.module.named_buffers()), saved["buffers"])
        params, plain = plain_from(saved, groups)
        engine.backward(compute_loss(engine, 3))
        for name, grad in engine.full_grads().items():
            params[name].grad = grad
        engine.step()
        plain.step()
        assert_same(engine.full_params(), params)
        engine.close()


@pytest.mark.warm("deepspeed")
@pytest.mark.world_size(1)
def test_the_loss_scale_is_loaded_and_missing_model_files_are_refused(shared_tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    model = nn.Linear(3, 2)
    keys = ("fp32", "exp_avg", "exp_avg_sq")
    values = {name: dict.fromkeys(keys, p.detach().clone()) for name, p in model.named_parameters()}
    write_universal_checkpoint(shared_tmp_path, values, [{"lr": 0.5}], 3, flat=True)
    file = shared_tmp_path / "zero" / "optimizer_state.pt"
    torch.save({**unpickling.load_deepspeed_file(file), "loss_scaler": LossScaler(scale=8.0)}, file)
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    engine, *_ = initialize(
        model=model,
        config={"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "optimizer": optimizer},
    )
    with pytest.warns(UserWarning, match="no mpu"):
        engine.load_universal_checkpoint(shared_tmp_path)
    assert (engine.loss_scale, engine.steps, engine.optimizer.param_groups[0]["lr"]) == (8.0, 3, 0.5)
    assert_same(engine.full_masters(), {name: entry["fp32"] for name, entry in values.items()})
    file = shared_tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({**unpickling.load_deepspeed_file(file), "dp_world_size": 2}, file)
    with pytest.raises(CheckpointError, match="are not complete"), pytest.warns(UserWarning, match="no mpu"):
        engine.load_universal_checkpoint(shared_tmp_path)


@pytest.mark.warm("deepspeed")
@pytest.mark.world_size(1)
def test_two_of_deepspeeds_classes_are_replaced_and_all_others_refused(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"scaler": LossScaler(scale=8.0), "stage": ZeroStageEnum.gradients}, tmp_path / "known.pt")
    known = unpickling.load_deepspeed_file(tmp_path / "known.pt")
    assert (type(known["scaler"]), known["scaler"].cur_scale) == (unpickling.LossScaler, 8.0)
    assert known["stage"] is unpickling.ZeroStageEnum.gradients
    torch.save({"scaler": DynamicLossScaler(8.0, 2.0, 2, 1.0, 1, False)}, tmp_path / "unknown.pt")
    with pytest.raises(CheckpointError, match=r"contains deepspeed\..*DynamicLossScaler"):
        unpickling.load_deepspeed_file(tmp_path / "unknown.pt")
    with pytest.raises(CheckpointError, match=r"contains deepspeed\..*LossScaler"):
        unpickling.load_safely(tmp_path / "known.pt", "known.pt")
