"""The first diverging module is named in each direction, and modules that only inherit an error are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zharness import engines
from zharness.engines import EngineConfig
from zharness.parity.module_divergence import find_divergences, record_trace
from zharness.workload import MODELS, model_spec

NAMES = ("mlp", "transformer", "conv", "exact")


def run_model(model: nn.Module, name: str):
    spec = model_spec(name)
    batch = spec.micro_batch(0, 0, 0)
    return lambda: spec.loss(model(batch.inputs), batch.target).backward()


def trace_model(name: str):
    model = model_spec(name).model(0)
    return record_trace(model, run_model(model, name))


def leaves(name: str) -> list[str]:
    model = MODELS[name].model(0)
    return [path for path, module in model.named_modules() if path and not list(module.children())]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_does_not_depart_from_itself(name: str) -> None:
    model = model_spec(name).model(0)
    found = find_divergences(model, trace_model(name), run_model(model, name))
    assert found.describe() == ""


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in NAMES for path in leaves(name)])
def test_a_wrong_forward_is_named_alone_and_in_no_other_module(name: str, path: str) -> None:
    model = model_spec(name).model(0)
    model.get_submodule(path).register_forward_hook(lambda module, args, output: output + 1)
    found = find_divergences(model, trace_model(name), run_model(model, name))
    assert found.forward is not None
    assert found.forward.location == f"{path}, call 0, output 0"
    assert found.backward is None, "the backward of a sum is right"


class Twice(torch.autograd.Function):
    """The identity with a gradient that is twice the right one."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_wrong_backward_is_named_in_backward_order_alone() -> None:
    model = model_spec("transformer").model(0)
    model.get_submodule("blocks.0.up").register_forward_hook(lambda module, args, output: Twice.apply(output))
    found = find_divergences(model, trace_model("transformer"), run_model(model, "transformer"))
    assert found.forward is None
    assert found.backward is not None
    assert found.backward.location == "blocks.0.up, call 0, input 0 gradient"
    assert "first in backward order: blocks.0.up" in found.describe()


def test_what_a_module_computes_between_its_children_shows_at_the_next_child(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, model = trace_model("mlp"), model_spec("mlp").model(0)
    right = nn.functional.gelu
    monkeypatch.setattr(nn.functional, "gelu", lambda x: right(x, approximate="tanh"))
    found = find_divergences(model, trace, run_model(model, "mlp"))
    assert found.forward is not None
    assert found.forward.location == "second, call 0, input 0"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_no_module_of_a_right_engine_departs_at_any_stage(rank: int, stage: int, name: str) -> None:
    trace, spec = trace_model(name), model_spec(name)
    engine = engines.get("reference")(spec.model(0), EngineConfig(stage=stage))
    batch = spec.micro_batch(0, 0, 0)
    found = find_divergences(
        engine.module, trace, lambda: engine.backward(spec.loss(engine(batch.inputs), batch.target))
    )
    assert found.describe() == ""
    engine.close()
