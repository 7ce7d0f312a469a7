"""Mutants that reduce gradients in a wrong dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from zharness.engines import (
    Capabilities,
    EngineConfig,
    ddp,
)
from zharness.engines.torch_engine import TorchEngine
from zharness.mutants import seams_engines
from zharness.mutants.mutant import (
    FaultKind,
    Origin,
    Target,
    deepspeed,
    mutant,
    mutant_factory,
)
from zharness.mutants.wrapper import EngineWrapper


@mutant(FaultKind.REDUCE_DTYPE, Target("training.grads"), origin=Origin.PRECISION)
class ReducesInFp16(EngineWrapper):
    """Rounds fp32 gradients to fp16 before DDP reduces them."""

    wraps = "ddp"

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        seams_engines.ddp_wrapper(self.base).register_comm_hook(None, fp16_compress_hook)


@mutant(FaultKind.REDUCE_DTYPE, Target("training.one_hot_rank"), origin=Origin.PRECISION)
class ReducesShardsInBf16(EngineWrapper):
    """Rounds fp32 gradients to bf16 before FSDP2 reduce-scatters them."""

    wraps = "fsdp2"
    stages = (3,)

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, config)
        for group in seams_engines.fsdp2_param_groups(self.module):
            group.mp_policy = replace(group.mp_policy, reduce_dtype=torch.bfloat16)


@mutant(
    FaultKind.REDUCE_DTYPE,
    Target("precision.safe_modules", model="mixed"),
    Target("precision.safe_modules", model="mixed", variant="custom"),
    origin=Origin.PRECISION,
    imitates=deepspeed(6993),
)
class EveryGradientTravelsLow(EngineWrapper):
    """Reduces every gradient in bf16 under torch_autocast, even those outside lower_precision_safe_modules."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        super().__init__(model, replace(config, options={**config.options, "communication_data_type": "bf16"}))


@mutant(FaultKind.REDUCE_DTYPE, Target("training.grads", dtype="bf16"), origin=Origin.PRECISION)
class ReducesLowerThanDeclared(EngineWrapper):
    """Declares that gradients are reduced in fp32 under bf16 training, but reduces them in bf16."""

    @classmethod
    def claims(cls, base: Capabilities) -> Capabilities:
        return replace(super().claims(base), reduce_dtypes={"bf16": "fp32"})


@mutant(
    FaultKind.REDUCE_DTYPE,
    Target("precision.comm_dtype", model="mixed"),
    origin=Origin.PRECISION,
    imitates=deepspeed(7946),
)
class OneWireForAll(EngineWrapper):
    """Reduces gradients in the dtype that was configured for the first engine of the process."""

    first: Mapping[str, Any] | None = None

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        if OneWireForAll.first is None:
            OneWireForAll.first = config.options
        super().__init__(model, replace(config, options=OneWireForAll.first))

    def close(self) -> None:
        # The process may go on to another cell, in which another engine is the first.
        OneWireForAll.first = None
        self.base.close()


@mutant_factory(FaultKind.REDUCE_DTYPE, Target("training.grads"), wraps="ddp", stages=(0,), origin=Origin.BLIND_4)
def ddp_wire_in_bf16(model: nn.Module, config: EngineConfig) -> TorchEngine:
    """Enables DDP's bf16 compression of gradients although it is not configured.

    In fp32 training every reduced gradient is rounded to eight significant bits.
    """
    engine = ddp.factory(model, config)

    def compress(_state, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations that are strings
        buffer = bucket.buffer()
        low = buffer.to(torch.bfloat16).div_(dist.get_world_size())
        return dist.all_reduce(low, async_op=True).get_future().then(lambda done: buffer.copy_(done.value()[0]))

    seams_engines.ddp_wrapper(engine).register_comm_hook(None, compress)
    return engine
