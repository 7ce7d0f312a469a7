"""ZeRO-3's linear layer compared with torch's: shapes, autocast, transforms, legacy form, a sharded weight."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # imported once here: torch.optim imports it at the first step, a second in each rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vmap

from zharness import torch_private
from zharness.reference import initialize, linear

Linear = Callable[..., Tensor]
shapes = pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7)], ids=["1d", "2d", "batched"])
biased = pytest.mark.parametrize("biased", [True, False], ids=["bias", "no_bias"])


def train(function: Linear, shape: tuple[int, ...], biased: bool, forward: bool, backward: bool) -> list[Tensor]:
    """Return output and gradients, with torch.autocast on or off around forward and around backward."""
    torch.manual_seed(0)
    given = [torch.randn(shape), torch.randn(3, 7), *([torch.randn(3)] if biased else [])]
    given = [tensor.requires_grad_() for tensor in given]
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        output = function(*given)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        output.backward(torch.rand_like(output))
    return [output.detach(), *(tensor.grad for tensor in given)]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@shapes
@biased
@pytest.mark.parametrize("forward", [True, False], ids=["autocast", "plain"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_backward_restores_the_forwards_autocast(
    shape: tuple[int, ...], biased: bool, forward: bool, inside: bool
) -> None:
    # torch's own layer runs backward outside, since an outer autocast would change it.
    expected = train(F.linear, shape, biased, forward, False)
    assert_same(train(linear, shape, biased, forward, inside), expected)


@shapes
@biased
def test_the_legacy_form_computes_the_same(
    shape: tuple[int, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(F.linear, shape, biased, True, False)
    monkeypatch.setattr(torch_private, "has_setup_context", lambda: False)
    assert_same(train(linear, shape, biased, True, True), expected)
    with pytest.raises(RuntimeError, match="setup_context"):
        grad(lambda x: linear(x, torch.ones(3, 7)).sum())(torch.ones(shape))


TRANSFORMS: dict[str, Callable[[Linear, Tensor], Tensor]] = {
    "grad": lambda f, x: grad(lambda v: f(v).pow(2).sum())(x),
    "grad_and_value": lambda f, x: torch.stack([t.sum() for t in grad_and_value(lambda v: f(v).pow(2).sum())(x)]),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda f, x: hessian(lambda v: f(v).pow(2).sum())(x),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap_grad": lambda f, x: vmap(grad(lambda v: f(v).pow(2).sum()))(x),
}


@biased
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_work(name: str, biased: bool) -> None:
    torch.manual_seed(0)
    transform = TRANSFORMS[name]
    # Integers, so that every order of summation is exact.
    x, weight = torch.randint(-3, 4, (5, 7)).float(), torch.randint(-3, 4, (3, 7)).float()
    bias = (torch.arange(3.0),) if biased else ()
    of_input = [transform(lambda v, f=f: f(v, weight, *bias), x) for f in (linear, F.linear)]
    assert torch.equal(*of_input)
    if "vmap" not in name:
        of_weight = [transform(lambda w, f=f: f(x[0], w, *bias), weight) for f in (linear, F.linear)]
        assert torch.equal(*of_weight)


def test_first_and_second_derivatives_are_right() -> None:
    torch.manual_seed(0)
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), (3, 5), (3,))]
    assert torch.autograd.gradcheck(linear, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(linear, given)


class Net(nn.Module):
    def __init__(self, function: Linear) -> None:
        super().__init__()
        self.function = function
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.relu(self.body(x)), self.head.weight, self.head.bias)


@pytest.mark.world_size(1, 2)
def test_its_weight_may_be_sharded_and_is_resharded_before_backward() -> None:
    torch.manual_seed(0)
    plain = Net(F.linear)
    sharded = copy.deepcopy(plain)
    sharded.function = linear
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}, "optimizer": optimizer}
    engine, *_ = initialize(model=sharded, config=config)
    x = torch.randn(3, 4)
    plain(x).sum().backward()
    loss = engine(x).sum()
    assert engine.gathered_bytes() == 0, "what the function saved was replaced by hooks"
    loss.backward()
    for name, gradient in engine.full_grads().items():
        assert torch.equal(gradient, plain.get_parameter(name).grad), name
    penalty = [jacrev(net)(x[0]).pow(2).sum() for net in (engine, plain)]
    assert torch.equal(*penalty)
