"""The bounds hold for every order of summation and every replayed step, and are tight enough to catch faults."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zharness.engines import optimizers as built
from zharness.errors import UsageError
from zharness.parity.bounds import BoundedTensor, gamma, mean_and_bound, unit_roundoff
from zharness.parity.formulas import FORMULAS
from zharness.parity.replay import propagate_step, replay_step
from zharness.reference.deepspeed_json import settings as deepspeed_settings

FLOAT = torch.float32
SEEDS = st.integers(0, 2**31 - 1)
# No database and no deadline: the same examples everywhere, however slow the machine.
REPEATABLE = settings(database=None, deadline=None, derandomize=True, max_examples=60)


@REPEATABLE
@given(SEEDS, st.integers(1, 12))
def test_a_mean_in_any_order_stays_within_its_bound(seed: int, terms: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(50, generator=generator) * 10 ** float(torch.randn((), generator=generator)) for _ in range(terms)
    ]
    mean, bound = mean_and_bound(parts, FLOAT)
    for _ in range(3):
        order = torch.randperm(terms, generator=generator).tolist()
        total = parts[order[0]].clone()
        for index in order[1:]:
            total = total + parts[index]
        assert bool(((total / terms).double() - mean).abs().le(bound).all())


def test_the_bound_of_a_bf16_sum_is_left_by_far_under_a_declared_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1000, generator=generator) for _ in range(4)]
    mean, bound = mean_and_bound(parts, FLOAT)
    low = sum(part.bfloat16() for part in parts).float() / 4  # type: ignore[union-attr]
    ratio = ((low.double() - mean).abs() / bound).max()
    assert float(ratio) > unit_roundoff(torch.bfloat16) / unit_roundoff(FLOAT) / 100


def test_gamma_is_refused_where_it_would_mean_nothing() -> None:
    with pytest.raises(ValueError, match="is not below 1"):
        gamma(1000, torch.bfloat16)


@REPEATABLE
@given(SEEDS)
def test_running_error_analysis_covers_float32_arithmetic(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(200, generator=generator).abs() + 0.1 for _ in range(3))
    computed = ((a * b + c).sqrt() - a / b) * c
    x, y, z = (BoundedTensor.exact(tensor) for tensor in (a, b, c))
    analysed = ((x * y + z).sqrt() - x / y) * z
    assert bool((computed.double() - analysed.value).abs().le(analysed.error).all())


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.97), "eps": 1e-8, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    "plain": (torch.optim.SGD, {"lr": 1.0}),
    "decayed nesterov": (
        torch.optim.SGD,
        {"lr": 1e-1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True},
    ),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "betas": (0.8, 0.97), "weight_decay": 0.1, "momentum_decay": 1e-2}),
    "decoupled nadam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2, "betas": (0.9, 0.6), "weight_decay": 0.1}),
    "rectified radam": (torch.optim.RAdam, {"lr": 1e-2, "betas": (0.9, 0.8), "decoupled_weight_decay": True}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
    "adadelta": (torch.optim.Adadelta, {"lr": 1e-1, "rho": 0.8, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "alpha": 0.9, "weight_decay": 0.1, "momentum": 0.8}),
    "centered rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "alpha": 0.9, "eps": 1e-3, "centered": True}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2, "lambd": 1e-1, "t0": 1.0, "weight_decay": 0.1}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2, "etas": (0.4, 1.3), "step_sizes": (5e-3, 1.5e-2)}),
}
NAMES = {kind: kind.__name__.lower() for kind, _ in OPTIMIZERS.values()}


def one_step(name: str, seed: int, steps: int, foreach: bool):
    """Run ``steps`` steps and return the last one's weight, gradient and state, before and after."""
    build, arguments = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(100, generator=generator))
    optimizer = build([weight], foreach=foreach, **arguments)
    for _ in range(steps):
        scale = 10 ** (6 * float(torch.rand((), generator=generator)) - 5)
        grad = torch.randn(100, generator=generator) * scale
        weight.grad = grad.clone()  # torch's foreach Nesterov edits the gradient in place
        before = weight.detach().clone()
        state = {key: value.clone() for key, value in optimizer.state.get(weight, {}).items() if torch.is_tensor(value)}
        optimizer.step()
    return arguments, before, grad, state, weight.detach(), optimizer.state[weight]


@REPEATABLE
@given(st.sampled_from(sorted(OPTIMIZERS)), SEEDS, st.integers(1, 4), st.booleans())
def test_a_step_of_torch_optim_stays_within_its_replay(name: str, seed: int, steps: int, foreach: bool) -> None:
    arguments, before, grad, state, after, later = one_step(name, seed, steps, foreach)
    count = {"step": torch.tensor(float(steps - 1))}
    expected, moments = replay_step(NAMES[OPTIMIZERS[name][0]], before, grad, count | state, arguments)
    assert bool((after.double() - expected.value).abs().le(expected.error).all())
    for key, moment in moments.items():
        assert bool((later[key].double() - moment.value).abs().le(moment.error).all()), key


def test_every_optimizer_that_an_engine_can_be_configured_with_has_a_replay() -> None:
    assert set(NAMES.values()) == set(FORMULAS) == set(built.ELEMENTWISE) == set(deepspeed_settings.OPTIMIZERS)


@REPEATABLE
@given(SEEDS, st.integers(1, 4), st.sampled_from(["lr", "eps", "weight_decay", "betas"]))
def test_a_wrong_constant_leaves_the_replay_of_adamw(seed: int, steps: int, wrong: str) -> None:
    arguments, before, grad, state, after, _ = one_step("adamw", seed, steps, foreach=False)
    changed = {"lr": 1.01e-2, "eps": 1e-1, "weight_decay": 0.2, "betas": (0.81, 0.97)}
    count = {"step": torch.tensor(float(steps - 1))}
    expected, moments = replay_step("adamw", before, grad, count | state, {**arguments, wrong: changed[wrong]})
    seen = (after.double() - expected.value).abs().gt(expected.error).any()
    if wrong == "betas":
        seen = seen | bool(moments)
    assert bool(seen)


def test_a_factor_that_is_rounded_more_often_has_a_larger_bound() -> None:
    one = BoundedTensor.exact(torch.ones(()))
    once, thrice = (float(one.scalar(0.3, roundings).error) for roundings in (1, 3))
    assert 0.3 * unit_roundoff(FLOAT) <= once < thrice <= 4 * once


def test_an_optimizer_or_an_argument_without_a_replay_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(UsageError, match="optimizer to replay"):
        replay_step("lion", one, one, {}, {})
    with pytest.raises(UsageError, match="argument of the optimizer sgd"):
        replay_step("sgd", one, one, {}, {"momentun": 0.9})


@REPEATABLE
@given(st.sampled_from(sorted(OPTIMIZERS)), SEEDS, st.sampled_from([1e-7, 1e-4]))
def test_two_free_runs_stay_within_the_propagated_bound_of_their_gradients_differences(
    name: str, seed: int, apart: float
) -> None:
    build, arguments = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(100, generator=generator))
    optimizer = build([weight], foreach=False, **arguments)
    free, state = BoundedTensor.exact(weight.detach()), {}
    for step in range(5):
        grad = torch.randn(100, generator=generator)
        weight.grad = grad * (1 + apart * torch.randn(100, generator=generator))
        given_as = BoundedTensor(grad.double(), (weight.grad.double() - grad.double()).abs(), FLOAT)
        free, state = propagate_step(NAMES[build], free, given_as, state, step, arguments)
        optimizer.step()
        assert bool((weight.detach().double() - free.value).abs().le(free.error).all()), step
    assert bool(free.error.median() < 1), "the bound says something"
