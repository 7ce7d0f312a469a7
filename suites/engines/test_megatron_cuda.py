"""The stand-ins for ``torch.cuda``: what each does on a CPU, and that torch has none of them, open engine or not."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zharness.engines import info, megatron_cuda
from zharness.engines.megatron_cuda import CpuCuda, CpuEvent, CpuStream, StandIns, TorchOnCpu
from zharness.engines.protocol import EngineConfig
from zharness.errors import EngineContractError

needs_package = pytest.mark.skipif(
    info("megatron_fsdp").version() is None, reason='megatron-fsdp is not installed (the extra "megatron")'
)
# Of paths that the adapter does not take: buffers that NCCL registers, and a report of a GPU's memory.
NOT_ON_A_CPU = {"MemPool", "memory_allocated", "memory_reserved", "get_device_properties"}


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module that knows torch, in place of Megatron-FSDP's."""
    module = ModuleType("user_of_cuda")
    vars(module)["torch"] = torch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(megatron_cuda, "MODULES", (module.__name__,))
    return module


def test_the_last_engine_to_close_gives_a_module_torch_back(user: Any) -> None:
    stand_ins = StandIns()
    first, second = stand_ins.install(), stand_ins.install()
    assert isinstance(user.torch, TorchOnCpu)
    first()
    first()  # a second close of one engine is none of another's
    assert isinstance(user.torch, TorchOnCpu)
    second()
    assert user.torch is torch
    stand_ins.install()
    assert isinstance(user.torch, TorchOnCpu)


def test_torch_itself_has_no_stand_in(user: Any) -> None:
    before = {name: vars(module).copy() for name, module in (("torch", torch), ("torch.cuda", torch.cuda))}
    StandIns().install()
    assert vars(torch) == before["torch"]
    assert vars(torch.cuda) == before["torch.cuda"]


def test_all_but_cuda_is_torch() -> None:
    stand_in: Any = TorchOnCpu()
    for name in ("Tensor", "distributed", "zeros", "no_grad", "float32", "nn", "device"):
        assert getattr(stand_in, name) is getattr(torch, name)
    assert stand_in.cuda.is_available() is False
    with pytest.raises(AttributeError, match="no_such_name"):
        stand_in.no_such_name  # noqa: B018


def test_work_on_a_stream_has_ended_when_the_next_call_begins() -> None:
    cuda, target = CpuCuda("torch.cuda"), torch.zeros(3)
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        target.add_(1)
        event = side.record_event()
    event.wait()
    cuda.synchronize()
    cuda.empty_cache()
    assert target.tolist() == [1, 1, 1]
    assert torch.device("cpu", cuda.current_device()) == torch.device("cpu:0")
    assert (side, event) == (CpuStream(), CpuEvent())


def test_an_error_on_a_stream_is_the_callers() -> None:
    cuda = CpuCuda("torch.cuda")
    with pytest.raises(ValueError, match="in the block"), cuda.stream(cuda.current_stream()):
        raise ValueError("in the block")


def test_a_tensor_that_is_sent_to_the_gpu_is_the_same_on_the_cpu() -> None:
    made = TorchOnCpu().tensor([[0, 1]], dtype=torch.int)
    sent = made.cuda()
    assert type(sent) is Tensor
    assert torch.equal(sent, torch.tensor([[0, 1]], dtype=torch.int))
    sent[0, 0] = 5
    assert made[0, 0] == 5, "no copy, as of a tensor that is on the device already"


def test_a_name_without_a_stand_in_is_an_error_with_its_name() -> None:
    with pytest.raises(EngineContractError, match=r"torch\.cuda\.MemPool, for which .* has no stand-in"):
        CpuCuda("torch.cuda").MemPool  # noqa: B018


def names_of_cuda(path: Path) -> set[str]:
    """Return each ``x`` of ``torch.cuda.x`` in the functions of a source file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    attributes = (node for node in nodes if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if ast.unparse(node.value) == "torch.cuda"}


@needs_package
def test_each_name_that_the_package_takes_has_a_stand_in() -> None:
    taken: set[str] = set()
    for module in megatron_cuda.MODULES:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        taken |= names_of_cuda(Path(spec.origin))
    assert taken - NOT_ON_A_CPU <= set(dir(CpuCuda))
    assert {"Stream", "current_stream", "stream", "current_device"} <= taken, "the list is not empty by mistake"


@needs_package
@pytest.mark.world_size(2)
def test_an_engine_has_them_from_its_first_call_to_close() -> None:
    from megatron_fsdp import param_and_grad_buffer

    from zharness.engines import megatron_fsdp

    before = vars(torch.cuda).copy()
    engine = megatron_fsdp.factory(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), EngineConfig(stage=3))
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert isinstance(param_and_grad_buffer.torch, TorchOnCpu)
    assert vars(torch.cuda) == before
    engine.close()
    assert param_and_grad_buffer.torch is torch


@needs_package
@pytest.mark.world_size(2)
def test_an_engine_that_cannot_be_built_gives_torch_back() -> None:
    from megatron_fsdp import param_and_grad_buffer

    from zharness.engines import megatron_fsdp

    with pytest.raises(KeyError, match=r"torch\.float64"):
        megatron_fsdp.factory(nn.Sequential(nn.Linear(2, 2)).double(), EngineConfig(stage=3))
    assert param_and_grad_buffer.torch is torch
