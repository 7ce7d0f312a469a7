"""The proof of stage 3's mechanism: everything that plain PyTorch does with a model, done with a sharded one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # torch.optim imports it at the first step: here once, else a second in every rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from zharness.reference import Engine, initialize
from zharness.world import run

WIDTH, BATCH = 4, 3


class Fused(torch.autograd.Function):
    """A fused linear loss: torch.func inside a forward, its gradients kept for backward."""

    @staticmethod
    def forward(ctx, h, weight):
        (ctx.h, ctx.weight), value = grad_and_value(lambda a, w: (a @ w.t()).pow(2).sum(), argnums=(0, 1))(h, weight)
        return value

    @staticmethod
    def backward(ctx, g):
        return g * ctx.h, g * ctx.weight


class Net(nn.Module):
    """Weights of -1, 0 and 1 with ReLU, so that every sum is exact and any order of summation gives the same bits."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH + 1)
        self.b = nn.Linear(WIDTH + 1, WIDTH + 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(WIDTH + 1, WIDTH + 1).requires_grad_(False)
        self.c = nn.Linear(WIDTH + 1, 2)
        self.aux: Tensor | None = None
        self.through: Callable[..., Tensor] = lambda block, h: block(h)
        for p in self.parameters():
            torch.randint(-1, 2, p.shape, out=p.data)

    def block(self, h):
        return torch.relu(self.b(torch.relu(self.b(h)))) * self.scale

    def hidden(self, x):
        return self.frozen(self.through(self.block, self.a(x)))

    def forward(self, x):
        return self.c(self.hidden(x))


class FusedNet(Net):
    def forward(self, x):
        return Fused.apply(self.hidden(x), self.c.weight)


class TiedNet(Net):
    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_(True)
        self.frozen.weight = self.b.weight


class AuxiliaryNet(Net):
    """Keeps a second loss on the module itself, where no output leads to it."""

    def forward(self, x):
        self.aux = self.c.weight.pow(2).sum() + self.a(x).sum()
        return super().forward(x)


@dataclass(frozen=True)
class Side:
    """The engine or the plain model, so that one scenario drives either."""

    call: Callable[..., Tensor]
    net: nn.Module
    zero_grad: Callable[[], None]

    @staticmethod
    def plain(net: nn.Module) -> Side:
        return Side(net, net, net.zero_grad)

    @staticmethod
    def sharded(engine: Engine) -> Side:
        return Side(engine, engine.module, engine.zero_grad)


def sq(out: Tensor) -> Tensor:
    return out.pow(2).sum()


Scenario = Callable[[Side, Tensor], Tensor | None]
SCENARIOS: dict[str, tuple[type[Net], Scenario]] = {}


def scenario(net: type[Net] = Net) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (net, function)
        return function

    return register


@scenario()
def ordinary_training(m, x):
    sq(m.call(x)).backward()


@scenario()
def input_that_requires_grad(m, x):
    x = x.clone().requires_grad_()
    sq(m.call(x)).backward()
    return x.grad


@scenario()
def two_forwards_and_one_backward(m, x):
    (sq(m.call(x)) + m.call(2 * x).sum()).backward()


@scenario()
def engine_of_engine(m, x):
    first = m.call(x)
    sq(m.call(torch.cat([first, first], 1))).backward()


@scenario()
def two_backwards_on_a_retained_graph(m, x):
    out = m.call(x)
    out.sum().backward(retain_graph=True)
    sq(out).backward()


@scenario()
def retained_then_zero_grad(m, x):
    out = m.call(x)
    out.sum().backward(retain_graph=True)
    m.zero_grad()
    sq(out).backward(retain_graph=True)


@scenario()
def gradient_penalty(m, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(m.call(x).sum(), x, create_graph=True)
    (g2,) = torch.autograd.grad(sq(m.call(x)), x, create_graph=True)
    (sq(g) + g2.sum()).backward()
    return g2.detach()


@scenario()
def autograd_grad_of_the_input(m, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(sq(m.call(x)), x)[0]


@scenario()
def batched_autograd_grad(m, x):
    x = x.clone().requires_grad_()
    out = m.call(x)
    return torch.autograd.grad(out, x, torch.eye(out.numel()).view(-1, *out.shape), is_grads_batched=True)[0]


@scenario()
def backward_of_some_inputs_on_a_retained_graph(m, x):
    x = x.clone().requires_grad_()
    loss = sq(m.call(x))
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward(inputs=[x])
    return x.grad


def checkpointed(reentrant: bool) -> Scenario:
    def through(m, x):
        m.net.through = lambda block, h: checkpoint(block, h, use_reentrant=reentrant)
        sq(m.call(x.clone().requires_grad_())).backward()

    return through


def nested_checkpoint(reentrant: bool) -> Scenario:
    def through(m, x):
        def inner(block):
            return lambda h: checkpoint(block, h, use_reentrant=reentrant)

        m.net.through = lambda block, h: checkpoint(inner(block), h, use_reentrant=reentrant)
        sq(m.call(x.clone().requires_grad_())).backward()

    return through


def whole_model_checkpoint(reentrant: bool) -> Scenario:
    def through(m, x):
        sq(checkpoint(m.call, x.clone().requires_grad_(), use_reentrant=reentrant)).backward()

    return through


for reentrant in (True, False):
    kind = "reentrant" if reentrant else "non_reentrant"
    SCENARIOS[f"{kind}_checkpoint_of_a_module_used_twice"] = (Net, checkpointed(reentrant))
    SCENARIOS[f"{kind}_nested_checkpoint"] = (Net, nested_checkpoint(reentrant))
    SCENARIOS[f"{kind}_checkpoint_of_the_whole_model"] = (Net, whole_model_checkpoint(reentrant))


@scenario(FusedNet)
def torch_func_inside_the_loss(m, x):
    m.call(x).backward()


@scenario()
def weight_read_outside_any_forward(m, x):
    loss = sq(F.linear(m.call(x).repeat(1, 2), m.net.a.weight)) + m.net.b.weight.pow(2).sum()
    loss.backward()


@scenario(TiedNet)
def tied_weights(m, x):
    sq(m.call(x)).backward()


@scenario(AuxiliaryNet)
def loss_on_a_branch_that_no_output_leads_to(m, x):
    out = m.call(x)
    m.net.aux.backward(retain_graph=True)
    (sq(out) + m.net.aux).backward()
    m.net.aux = None


@scenario()
def vmap_training(m, x):
    sq(vmap(m.call)(x)).backward()


@scenario()
def vmap_of_grad_training(m, x):
    vmap(grad(lambda v: sq(m.call(v))))(x).pow(2).sum().backward()


def value(transform: Callable[[Callable[..., Tensor], Tensor], Tensor]) -> Scenario:
    return lambda m, x: transform(m.call, x).detach()


SCENARIOS |= {
    name: (Net, value(transform))
    for name, transform in {
        "func_grad": lambda f, x: grad(lambda v: sq(f(v)))(x),
        "func_grad_and_value": lambda f, x: sum(grad_and_value(lambda v: sq(f(v)))(x)),
        "func_grad_has_aux": lambda f, x: sum(t.sum() for t in grad(lambda v: (sq(f(v)), f(v)), has_aux=True)(x)),
        "func_jacrev": lambda f, x: jacrev(f)(x[0]),
        "func_jacrev_of_a_batch": lambda f, x: jacrev(f)(x),
        "func_vmap": lambda f, x: vmap(f)(x),
        "func_vmap_of_grad": lambda f, x: vmap(grad(lambda v: sq(f(v))))(x),
        "func_jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
        "func_jacfwd": lambda f, x: jacfwd(f)(x[0]),
        "func_hessian": lambda f, x: hessian(lambda v: sq(f(v)))(x[0]),
        "func_jacrev_of_jacrev": lambda f, x: jacrev(jacrev(lambda v: sq(f(v))))(x[0]),
        "no_grad": lambda f, x: torch.no_grad()(f)(x),
        "inference_mode": lambda f, x: torch.inference_mode()(f)(x).clone(),
    }.items()
}


@scenario()
def functional_call_with_full_parameters(m, x):
    weights = {name: p.detach().clone() for name, p in full(m).items()}
    grads = grad(lambda w: sq(functional_call(m.net, w, (x,))))(weights)
    return torch.cat([g.flatten() for g in grads.values()])


def full(m: Side) -> dict[str, Tensor]:
    whole = m.call.full_params() if isinstance(m.call, Engine) else dict(m.net.named_parameters())
    return {name: p.detach() for name, p in whole.items()}


def pair(net: type[Net], lr: float = 1.0) -> tuple[Engine, nn.Module, Tensor]:
    """A sharded model, its plain twin, and this rank's own batch; gradients are summed over ranks, which is exact."""
    torch.manual_seed(0)
    plain = net()
    engine, *_ = initialize(
        model=copy.deepcopy(plain),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "SGD", "params": {"lr": lr}},
            "gradient_allreduce_op": "sum",
        },
    )
    torch.manual_seed(1 + dist.get_rank())
    return engine, plain, torch.randint(-1, 2, (BATCH, WIDTH)).float()


def summed(net: nn.Module) -> dict[str, Tensor]:
    """The plain model's gradients, summed over ranks."""
    grads = {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}
    for grad_of_one in grads.values():
        dist.all_reduce(grad_of_one)
    return grads


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        assert torch.equal(got[name], wanted), f"{name}: got {got[name]}, expected {wanted}"


def assert_exact(net: nn.Module, play: Scenario, x: Tensor) -> None:
    """Every sum is exact, or float64 would differ: only then may any order of summation be asked for the same bits."""
    double = copy.deepcopy(net).double()
    result = play(Side.plain(double), x.double())
    single = play(Side.plain(net), x)
    assert result is None or torch.equal(result, single.double())
    for p, q in zip(net.parameters(), double.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad.double(), q.grad)


def compare(net: type[Net], play: Scenario) -> None:
    engine, plain, x = pair(net)
    assert_exact(copy.deepcopy(plain), play, x)
    wanted = play(Side.plain(plain), x)
    got = play(Side.sharded(engine), x)
    assert (got is None) == (wanted is None)
    assert got is None or torch.equal(got, wanted)
    del got
    assert engine.gathered_bytes() == 0
    assert_same(engine.full_grads(), summed(plain))
    take_an_ordinary_step(engine, plain, x)


def take_an_ordinary_step(engine: Engine, plain: nn.Module, x: Tensor) -> None:
    plain.zero_grad()
    engine.zero_grad()
    for m in (Side.plain(plain), Side.sharded(engine)):
        sq(m.call(x)).backward()
        m.net.aux = None
    grads = summed(plain)
    assert_same(engine.full_grads(), grads)
    engine.step()
    assert_same(engine.full_params(), {n: p.detach() - grads.get(n, 0) for n, p in plain.named_parameters()})
    assert engine.gathered_bytes() == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_stage_3_equals_the_plain_model_bit_for_bit(name: str, world_size: int) -> None:
    run(compare, *SCENARIOS[name], world_size=world_size)
