"""The end of a backward, and the fallbacks for APIs that torch may lack: each API is hidden in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from suites.reference.helpers import Breaking
from zharness import torch_private
from zharness.reference import initialize
from zharness.reference.torch_func import torch_fallback
from zharness.reference.torch_func.torch_fallback import EndOfBackward

Hide = Callable[[pytest.MonkeyPatch], None]


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


def setup_context(patch: pytest.MonkeyPatch) -> None:
    # torch itself reads the attribute, so it cannot be deleted; only the check for it is replaced.
    patch.setattr(torch_private, "has_setup_context", lambda: False)


def queue_callback(patch: pytest.MonkeyPatch) -> None:
    engine = torch.autograd.Variable._execution_engine

    class Older:
        run_backward = staticmethod(engine.run_backward)
        is_checkpoint_valid = staticmethod(engine.is_checkpoint_valid)

    patch.setattr(torch.autograd.Variable, "_execution_engine", Older())


def graph_task_id(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._C, "_current_graph_task_id")


hidden = pytest.mark.parametrize("hide", [nothing, queue_callback, graph_task_id], ids=lambda hide: hide.__name__)


class Watched:
    """Three layers that log each gradient when it is made, and the end of each backward."""

    def __init__(self) -> None:
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in "abc")
        self.log: list[str] = []
        names = {layer.weight: name for name, layer in zip("abc", (self.a, self.b, self.c), strict=True)}
        self.end = EndOfBackward(names, lambda: self.log.append("end"))
        for parameter, name in names.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.arrive(p, name))

    def arrive(self, parameter: nn.Parameter, name: str) -> None:
        self.log.append(name)
        self.end.on_grad_ready(parameter)

    def take_log(self) -> str:
        text, self.log = "".join(self.log), []
        return text


@hidden
def test_every_backward_ends_once_after_its_last_gradient(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    net, x = Watched(), torch.ones(1, 2)
    for _ in range(2):
        net.c(net.b(net.a(x))).sum().backward()
        assert net.take_log() == "cbaend"
    out = net.c(net.b(x))
    out.sum().backward(retain_graph=True)
    out.sum().backward(inputs=[net.b.weight])
    assert net.take_log() == "cbendbend"


@hidden
def test_a_reentrant_checkpoint_is_a_graph_task_of_its_own(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    net, x = Watched(), torch.ones(1, 2)
    net.c(checkpoint(net.b, net.a(x), use_reentrant=True)).sum().backward()
    played = net.take_log()
    assert [*filter("abc".__contains__, played.replace("end", ""))] == ["c", "b", "a"]
    assert played.endswith("aend"), "nothing is left over after the outermost backward"
    assert played.count("end") <= 2, "at most once for each of the two graph tasks"


@hidden
def test_a_backward_inside_a_forward_has_its_own_end(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = h.detach().requires_grad_()
                loss = net.c(leaf).sum()
                loss.backward()
            ctx.save_for_backward(leaf.grad)
            return loss.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * ctx.saved_tensors[0]

    hide(monkeypatch)
    net = Watched()
    loss = Tiled.apply(net.b(net.a(torch.ones(1, 2))))
    assert net.take_log() == "cend"
    loss.backward()
    assert net.take_log() == "baend"


@hidden
def test_a_backward_that_raised_does_not_affect_the_next(hide: Hide, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    net, x = Watched(), torch.ones(1, 2)
    with pytest.raises(ValueError, match="broken on purpose"):
        net.c(Breaking.apply(net.b(x))).sum().backward()
    assert net.take_log() == "c"
    net.end.reset()
    net.b(x).sum().backward()
    assert net.take_log() == "bend"


def test_the_fallback_examines_each_parameter_once_per_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    queue_callback(monkeypatch)
    looks, ends = [], []
    look = torch_private.will_get_gradient
    monkeypatch.setattr(torch_private, "will_get_gradient", lambda p: looks.append(p) or look(p))
    for count in (10, 100):
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(count)]
        end = EndOfBackward(parameters, lambda: ends.append(1))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(end.on_grad_ready)
        torch.cat(parameters).sum().backward()
        assert (len(looks), len(ends)) == (count, 1)
        looks.clear()
        ends.clear()


def train_without(hide: Hide) -> None:
    with pytest.MonkeyPatch.context() as patch:
        hide(patch)
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "gradient_allreduce_op": "sum",
        }
        for stage in (2, 3):
            twin = copy.deepcopy(plain)
            engine, *_ = initialize(model=twin, config={**config, "zero_optimization": {"stage": stage}})
            alone = copy.deepcopy(plain)
            x = torch.eye(3) * float(dist.get_rank() == 1)  # one rank's gradients plus zeros: exact in any order
            for net in (alone, engine):
                out = net(x).sum() * float(dist.get_rank() == 1)
                out.backward(retain_graph=True)
                out.backward()
            for name, grad in engine.full_grads().items():
                expected = alone.get_parameter(name).grad.clone()
                dist.broadcast(expected, 1)
                assert torch.equal(grad, expected), name
            engine.step()
            assert engine.gathered_bytes() == 0


@pytest.mark.parametrize("hide", [setup_context, queue_callback, graph_task_id], ids=lambda hide: hide.__name__)
@pytest.mark.world_size(2)
def test_training_works_without(hide: Hide) -> None:
    train_without(hide)


def test_the_legacy_form_of_a_function_computes_the_same() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x * factor

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * ctx.factor, None

    x = torch.ones(2, requires_grad=True)
    older = torch_fallback.make_legacy_function(Scale)
    assert older is torch_fallback.make_legacy_function(Scale), "made once"
    older.apply(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda v: older.apply(v, 3.0).sum())(torch.ones(2))
