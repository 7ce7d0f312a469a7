"""What is computed, sent, kept and updated in the wrong dtype; loss scales that move wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from zharness.engines import Capabilities, EngineConfig
from zharness.errors import ConfigError
from zharness.mutants.around import Around
from zharness.mutants.mutant import Kind, Mutant, Target, deepspeed
from zharness.parity import Part


class ReducesInFp16(Around):
    """Rounds fp32 gradients to fp16 before they are reduced."""

    over = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.right._parts.forward.__self__.register_comm_hook(None, fp16_compress_hook)


class ReducesShardsInBf16(Around):
    """Rounds fp32 gradients to bf16 before they are scattered."""

    over = "fsdp2"
    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        found: list[Any] = [module for module in self.module.modules() if hasattr(module, "_get_fsdp_state")]
        for module in found:
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group.mp_policy = replace(group.mp_policy, reduce_dtype=torch.bfloat16)


class EveryGradientTravelsLow(Around):
    """Under torch_autocast sends every gradient in bf16, whatever module it belongs to."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, options={**config.options, "communication_data_type": "bf16"}))


class ReducesLowerThanDeclared(Around):
    """Declares that the gradients of a bf16 training are reduced in fp32, and reduces them in bf16."""

    @classmethod
    def claims(cls, right: Capabilities) -> Capabilities:
        return replace(super().claims(right), wires={"bf16": "fp32"})


class OneWireForAll(Around):
    """Every engine of a process sends in the dtype that the first one was given."""

    first: Mapping[str, Any] | None = None

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        if OneWireForAll.first is None:
            OneWireForAll.first = config.options
        super().__init__(model, replace(config, options=OneWireForAll.first))

    def close(self) -> None:
        # The process may go on to another cell, in which another engine is the first.
        OneWireForAll.first = None
        self.right.close()


class ForgetsAutocast(Around):
    """Takes a torch_autocast section, and computes in fp32."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        options = {key: value for key, value in config.options.items() if key != "torch_autocast"}
        super().__init__(model, replace(config, options=options))


class BackwardLeavesAutocast(Around):
    """Its backward restores the forward's autocast only where that was on."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        with torch.autocast("cpu", enabled=False):
            self.right.backward(loss, retain_graph=retain_graph)


class OuterAutocastWins(Around):
    """Where torch.autocast is on around its call, the section is not looked at."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if torch.is_autocast_enabled("cpu") else self.right(*args, **kwargs)


class ScalesLate(Around):
    """Doubles its loss scale one step late, and lets the first overflow pass without halving it."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        options = dict(config.options)
        if "loss_scale_window" in options.get("fp16", {}):
            late = {"loss_scale_window": options["fp16"]["loss_scale_window"] + 1, "hysteresis": 2}
            options["fp16"] = {**options["fp16"], **late}
        super().__init__(model, replace(config, options=options))


class StepsOverInfinities(Around):
    """Steps over an infinite gradient as if it were none."""

    def step(self) -> None:
        for grad in self.right.engine._gradients.reduced().values():
            grad.nan_to_num_(0.0, 0.0, 0.0)
        self.right.step()


class ForgetsItsMasters(Around):
    """Makes its masters anew from the rounded weights after every step."""

    def step(self) -> None:
        self.right.step()
        for master in self.right.engine._parameters.masters.values():
            master.copy_(master.bfloat16())


class TakesAnyMixOfMasters(Around):
    """Where masters, gradients and state are asked for in dtypes that exclude each other, it trains without them."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        try:
            super().__init__(model, config)
        except ConfigError:
            super().__init__(model, replace(config, options={}))


class LowersBuffers(Around):
    """Converts the model's buffers with its parameters."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.bfloat16()
        super().__init__(model, config)


def mixed(check: str, part: Part, variant: str = "") -> Target:
    """A target among the laws of precision."""
    return Target(f"precision.{check}", part, "mixed", variant)


OPTIMIZER, REDUCED = Part.OPTIMIZER, Part.REDUCTION

MUTANTS = (
    Mutant(ReducesInFp16, Kind.WIRE, (Target("training.grads"),)),
    Mutant(ReducesShardsInBf16, Kind.WIRE, (Target("training.one_hot_rank"),)),
    Mutant(
        EveryGradientTravelsLow,
        Kind.WIRE,
        (mixed("safe_modules", REDUCED), mixed("safe_modules", REDUCED, "custom")),
        imitates=deepspeed(6993),
    ),
    Mutant(ReducesLowerThanDeclared, Kind.WIRE, (Target("training.grads", dtype="bf16"),)),
    Mutant(OneWireForAll, Kind.WIRE, (mixed("comm_dtype", REDUCED),), imitates=deepspeed(7946)),
    Mutant(ForgetsAutocast, Kind.AUTOCAST, (mixed("autocast_policy", Part.LOCAL_GRADIENT),), deepspeed(6993)),
    Mutant(BackwardLeavesAutocast, Kind.AUTOCAST, (mixed("autocast_states", REDUCED),), deepspeed(7916)),
    Mutant(OuterAutocastWins, Kind.AUTOCAST, (mixed("autocast_nested", Part.FORWARD),)),
    Mutant(ScalesLate, Kind.LOSS_SCALE, (mixed("grad_scaler", OPTIMIZER, "fp16"),)),
    Mutant(StepsOverInfinities, Kind.LOSS_SCALE, (mixed("grad_scaler", OPTIMIZER, "autocast"),)),
    Mutant(ForgetsItsMasters, Kind.AUTOCAST, (mixed("master_weights", OPTIMIZER, "fp32"),)),
    Mutant(
        TakesAnyMixOfMasters,
        Kind.AUTOCAST,
        (Target("precision.master_weights", Part.FORWARD, "mixed", "fp32", parameter="input"),),
    ),
    Mutant(LowersBuffers, Kind.AUTOCAST, (mixed("buffers_keep_dtype", OPTIMIZER, "bf16"),)),
)
