"""DeepSpeed's options: each builds an engine whose step is plain PyTorch's, or says in one sentence why it cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zharness.engines import deepspeed, deepspeed_machine
from zharness.engines.deepspeed_build import json_optimizer, require_buildable
from zharness.engines.deepspeed_options import DEEPSPEED_OPTIONS, options_at
from zharness.engines.deepspeed_schedulers import json_scheduler
from zharness.engines.gpu_options import NO_GPU
from zharness.engines.options import find_exclusion, merge_options
from zharness.engines.protocol import EngineConfig, OptimizerSpec
from zharness.errors import ConfigError
from zharness.laws.training.optimizer_options import SCHEDULES
from zharness.world import run

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
WORLD_SIZE = 2
# Options under which DeepSpeed 0.19.8 computes something else, or raises (zharness/expected_failures).
WRONG = {
    ("predivide_by_2", 3): "with a factor equal to the world size, gradients stay divided by it",
    ("round_robin_gradients", 1): "gradients and weights are returned under another parameter's name",
    ("round_robin_gradients", 2): "gradients and weights are returned under another parameter's name",
}

REDUCES_IN_STEP = "step_is_boundary"  # gradients are read before the step
RANGE_TEST = OptimizerSpec(schedule=(1.0, 1.5, 2.0, 2.5))  # one that DeepSpeed's schedulers have


class Net(nn.Module):
    """Linear layers of integer weights, two of them in a block: inputs (batch, 4) to (batch, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.block = Block()
        self.last = nn.Linear(5, 2, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.arange(param.numel()).view(param.shape) % 3 - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two linear layers and a ReLU, which an option makes a leaf module: (batch, 3) to (batch, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def batch(rank: int) -> Tensor:
    """Return integers that differ between ranks, and need gradients as the inputs of a later layer do."""
    values = torch.arange(8.0).view(2, 4) % (rank + 3) - 1
    return values.requires_grad_()


def train_one_step(stage: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Train one step under each option, and return the gradients and weights by option."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in names:
        optimizer = RANGE_TEST if name.startswith("json_scheduler") else OptimizerSpec()
        config = EngineConfig(stage=stage, options=options_at(stage)[name].options, optimizer=optimizer)
        engine = deepspeed.factory(Net(), config)
        engine.backward(engine(batch(torch.distributed.get_rank())).sum())
        grads = engine.full_grads()
        engine.step()
        results[name] = (grads, engine.full_params())
        engine.close()
    return results


def plain_step() -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return gradients and weights of plain PyTorch's step on the mean of the ranks' losses."""
    model = Net()
    for rank in range(WORLD_SIZE):
        (model(batch(rank)).sum() / WORLD_SIZE).backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return grads, {name: param.detach() - grads[name] for name, param in model.named_parameters()}


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_option_trains_a_step_equal_to_plain_pytorch(stage: int) -> None:
    names = tuple(
        name
        for name, option in options_at(stage).items()
        if not option.absent and (name, stage) not in WRONG and name != REDUCES_IN_STEP
    )
    grads, weights = plain_step()
    for result in run(train_one_step, stage, names, world_size=WORLD_SIZE, timeout=300):
        for name in names:
            for expected, got in zip((grads, weights), result[name], strict=True):
                for key, value in expected.items():
                    assert torch.equal(got[key], value), f"{name} at stage {stage}: {key}"


def read_frozen_state() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state in bf16 at stage 0 of a weight that is frozen after a step, before and after it is frozen.

    Another weight was frozen when the engine was built, and has none.
    """
    torch.set_num_threads(1)
    model = Net()
    model.first.weight.requires_grad_(False)
    engine = deepspeed.factory(
        model, EngineConfig(stage=0, dtype="bf16", optimizer=OptimizerSpec("adamw", {"lr": 0.5}))
    )
    engine.backward(engine(batch(torch.distributed.get_rank()).detach().bfloat16()).sum())
    engine.step()
    before = engine.full_optimizer_state()["last.weight"]
    engine.module.get_parameter("last.weight").requires_grad_(False)
    states = engine.full_optimizer_state()
    assert "first.weight" not in states
    engine.close()
    return before, states["last.weight"]


@needs_deepspeed
def test_the_state_of_a_weight_of_bf16_that_is_frozen_later_is_that_of_its_master() -> None:
    for before, after in run(read_frozen_state, world_size=WORLD_SIZE, timeout=120):
        assert {"exp_avg", "exp_avg_sq"} <= before.keys() == after.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items())


def test_an_option_is_named_only_at_stages_where_it_has_an_effect() -> None:
    assert "offload_param" not in options_at(2)
    assert "round_robin_gradients" not in options_at(3)
    assert set(options_at(0)) == {
        "predivide_by_2",
        "predivide_by_4",
        "prescale_gradients",
        *("reduce_bf16", "reduce_fp32"),
    } | {"json_optimizer", "json_scheduler", "json_scheduler_tensor_rates", "step_is_boundary", "unscaled_backward"} | {
        *("comms_logger", "flops_profiler", "fused_adam", "timers"),
    }


def test_an_option_that_this_machine_cannot_build_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {name: entry for name, entry in DEEPSPEED_OPTIONS.items() if entry.option.absent not in ("", NO_GPU)}
    for name, entry in absent.items():
        with pytest.raises(ConfigError, match=f"^got {name}, which cannot be built: .*[^.]$"):
            require_buildable(3, merge_options({"zero_optimization": {"stage": 3}}, entry.option.options))
    monkeypatch.setattr(deepspeed_machine.shutil, "which", lambda _name: None)
    deepspeed_machine.missing_for_nvme.cache_clear()
    assert deepspeed_machine.missing_for_nvme() == (
        "offloading to NVMe compiles an operation, and this machine has no C++ compiler"
    )
    deepspeed_machine.missing_for_nvme.cache_clear()


def test_a_json_whose_option_changes_nothing_on_a_cpu_is_built_there() -> None:
    entry = DEEPSPEED_OPTIONS["offload_param_unpinned"]
    assert entry.option.absent == NO_GPU
    require_buildable(3, merge_options({"zero_optimization": {"stage": 3}}, entry.option.options))


def test_options_that_exclude_each_other_are_refused_in_one_sentence() -> None:
    known = options_at(3)
    stated = find_exclusion({name: known[name] for name in ("cpu_adam", "json_optimizer")})
    assert stated == "cpu_adam excludes json_optimizer: DeepSpeed takes an optimizer from its JSON or from the caller"
    assert find_exclusion({name: known[name] for name in ("predivide_by_2", "reduce_scatter")})
    assert not find_exclusion({name: known[name] for name in ("offload_param", "offload_optimizer")})


def test_a_schedule_that_deepspeeds_schedulers_lack_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^got json_scheduler with the schedule \(1.0,\), which none of .*[^.]$"):
        json_scheduler(OptimizerSpec(), [{}])


def test_every_schedule_of_the_law_has_a_scheduler_of_deepspeed() -> None:
    for schedule in SCHEDULES.values():
        assert json_scheduler(OptimizerSpec(schedule=schedule), [{}])


@pytest.mark.parametrize(("name", "kind"), [("adam", "Adam"), ("adamw", "AdamW")])
def test_the_json_asks_for_torchs_adam(name: str, kind: str) -> None:
    section = json_optimizer(OptimizerSpec(name, {"lr": 0.5, "betas": (0.5, 0.75)}))
    assert section == {
        "type": kind,
        "params": {"lr": 0.5, "betas": (0.5, 0.75), "torch_adam": True, "adam_w_mode": name == "adamw"},
    }
