"""What the adapters of torch's own engines promise: names, shapes, copies, layout, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it at first use, a second that every rank would spend after its fork
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zharness.engines import ddp, fsdp2, plain, zero1
from zharness.engines.protocol import AccumulationOwner, Engine, EngineConfig, Feature, OptimizerSpec, Piece, Reduction
from zharness.errors import ConfigError, UsageError
from zharness.world import Group, run

WORLD_SIZE = 2
ADAPTERS = {"plain": plain, "ddp": ddp, "zero1": zero1, "fsdp2": fsdp2}
SHARED = [("ddp", 0), ("zero1", 1), ("fsdp2", 2), ("fsdp2", 3)]
EVERY = [("plain", 0), *SHARED]
SHAPES = {"tokens.weight": (5, 4), "body.weight": (4, 4), "body.bias": (4,), "row.weight": (1, 4), "row.bias": (1,)}
TRAINED = {key: shape for key, shape in SHAPES.items() if key != "body.bias"}
OPTIONS = [
    ("ddp", 0, {"bucket_cap_mb": 1}),
    ("ddp", 0, {"broadcast_buffers": False}),
    ("ddp", 0, {"find_unused_parameters": True}),
    ("ddp", 0, {"gradient_as_bucket_view": True}),
    ("ddp", 0, {"static_graph": True}),
    ("fsdp2", 3, {"grouping": "root"}),
    ("fsdp2", 3, {"force_sum_reduction_for_comms": True}),
    ("fsdp2", 3, {"reduce_scatter_unused_params": True}),
    ("fsdp2", 3, {"reduce_dtype": "fp32"}),
    ("fsdp2", 3, {"reshard_after_backward": False}),
]

STEPS: dict[tuple[str, int], list[dict[str, Any]]] = {}

engines = pytest.mark.parametrize(("name", "stage"), EVERY)
shared_engines = pytest.mark.parametrize(("name", "stage"), SHARED)


class Integers(nn.Module):
    """Token ids (batch,) to (batch, 5) through a tied embedding: integer weights, a frozen bias, a one-row layer.

    Five rows do not divide by two ranks, and of one row a rank owns nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.row = nn.Linear(4, 1)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight
        self.body.bias.requires_grad_(False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.arange(param.numel()).view(param.shape) % 3 - 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.relu(self.body(self.tokens(ids)))
        return self.head(hidden) + self.row(hidden)  # type: ignore[no-any-return]


def build(name: str, stage: int, **config: Any) -> Engine:
    torch.set_num_threads(1)
    engine: Engine = ADAPTERS[name].factory(Integers(), EngineConfig(stage=stage, **config))
    return engine


def loss(engine: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    """Integers only; different on every rank."""
    return (rank + 1) * (engine(torch.tensor([rank, 2, 4 - rank])) * torch.tensor([1.0, -1.0, 2.0, 0.0, 1.0])).sum()


def my_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(value, expected[key]) for key, value in got.items())


def one_steps(name: str, stage: int) -> list[dict[str, Any]]:
    """``one_step`` on each rank; run once for all tests that look at it, and changed by none."""
    if (name, stage) not in STEPS:
        STEPS[name, stage] = on_ranks(one_step, name, stage)
    return STEPS[name, stage]


def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    alone = args[0] == "plain"
    group = Group.NONE if alone else Group.DEFAULT
    return run(function, *args, world_size=1 if alone else WORLD_SIZE, timeout=60, group=group)


def one_step(name: str, stage: int) -> dict[str, Any]:
    engine = build(name, stage)
    before, idle = engine.full_params(), engine.full_grads()
    engine.backward(loss(engine, my_rank()))
    grads = engine.full_grads()
    engine.step()
    return {"before": before, "idle": idle, "grads": grads, "after": engine.full_params(), "norm": engine.grad_norm()}


@engines
def test_names_and_shapes_are_the_originals_and_a_tied_parameter_appears_once(name: str, stage: int) -> None:
    for seen in one_steps(name, stage):
        assert {key: tuple(value.shape) for key, value in seen["after"].items()} == SHAPES
        assert {key: tuple(value.shape) for key, value in seen["grads"].items()} == TRAINED


@engines
def test_an_sgd_step_moves_parameters_by_exactly_the_reported_gradient(name: str, stage: int) -> None:
    for seen in one_steps(name, stage):
        assert (seen["idle"], seen["norm"]) == ({}, None)
        assert any(grad.any() for grad in seen["grads"].values())
        for key, before in seen["before"].items():
            assert torch.equal(seen["after"][key], before - seen["grads"].get(key, 0))


@shared_engines
def test_every_rank_reports_the_same_tensors(name: str, stage: int) -> None:
    first, second = one_steps(name, stage)
    for kind in ("before", "grads", "after"):
        assert same(first[kind], second[kind])


def copies(name: str, stage: int) -> list[bool]:
    engine = build(name, stage)
    engine.backward(loss(engine, my_rank()))
    unchanged = []
    for read in (engine.full_params, engine.full_grads):
        kept = {key: value.clone() for key, value in read().items()}
        for value in read().values():
            value.fill_(77)
        unchanged.append(same(read(), kept))
    return unchanged


@engines
def test_what_is_reported_is_a_copy(name: str, stage: int) -> None:
    assert on_ranks(copies, name, stage) == [[True, True]] * (1 if name == "plain" else WORLD_SIZE)


def owned(name: str, stage: int) -> tuple[dict[str, tuple[Piece, ...]], dict[str, int]]:
    engine = build(name, stage)
    held = {
        key: (param.to_local() if isinstance(param, DTensor) else param).numel()
        for key, param in engine.module.named_parameters()
    }
    return dict(engine.layout()), held


@pytest.mark.parametrize("stage", [2, 3])
def test_the_layout_covers_every_element_once_and_says_what_a_rank_holds(stage: int) -> None:
    for rank, (layout, held) in enumerate(on_ranks(owned, "fsdp2", stage)):
        assert layout.keys() == SHAPES.keys()
        for key, shape in SHAPES.items():
            covered = [index for piece in layout[key] for index in range(piece.start, piece.stop)]
            assert covered == list(range(torch.Size(shape).numel()))
            assert held[key] == sum(piece.stop - piece.start for piece in layout[key] if piece.rank == rank)


@pytest.mark.parametrize(("name", "stage"), [("plain", 0), ("ddp", 0), ("zero1", 1)])
def test_an_engine_that_shards_nothing_has_an_empty_layout(name: str, stage: int) -> None:
    assert all(layout == {} for layout, _ in on_ranks(owned, name, stage))


def states(name: str, stage: int) -> tuple[dict[str, Any], dict[str, dict[str, tuple[int, ...]]], bool]:
    engine = build(name, stage, optimizer=OptimizerSpec("adamw", {"lr": 0.5}, schedule=(1.0, 0.25)))
    before = engine.full_optimizer_state()
    engine.backward(loss(engine, my_rank()))
    engine.step()
    shapes = {
        key: {part: tuple(value.shape) for part, value in state.items()}
        for key, state in engine.full_optimizer_state().items()
    }
    return before, shapes, engine.observe().learning_rates == (0.125,)


@engines
def test_optimizer_state_has_torchs_names_and_the_original_shapes(name: str, stage: int) -> None:
    expected = {key: {"step": (), "exp_avg": shape, "exp_avg_sq": shape} for key, shape in TRAINED.items()}
    for before, after, scheduled in on_ranks(states, name, stage):
        assert before == {}
        assert after == expected
        assert scheduled


def grads_with(name: str, stage: int, reduction: Reduction, options: dict[str, Any]) -> dict[str, Tensor]:
    engine = build(name, stage, reduction=reduction, options=options)
    engine.backward(loss(engine, my_rank()))
    return engine.full_grads()


@shared_engines
def test_a_sum_is_the_mean_times_the_world_size(name: str, stage: int) -> None:
    mean, total = (on_ranks(grads_with, name, stage, kind, {})[0] for kind in (Reduction.MEAN, Reduction.SUM))
    assert same(total, {key: value * WORLD_SIZE for key, value in mean.items()})


@pytest.mark.parametrize(("name", "stage", "options"), OPTIONS)
def test_a_listed_option_is_taken(name: str, stage: int, options: dict[str, Any]) -> None:
    with_it, without = (on_ranks(grads_with, name, stage, Reduction.MEAN, chosen)[0] for chosen in (options, {}))
    assert same(with_it, without)


def large_grads(options: dict[str, Any]) -> dict[str, Tensor]:
    engine = build("fsdp2", 3, options=options)
    engine.backward(257 * loss(engine, my_rank()))
    return engine.full_grads()


def test_fsdp2_reduces_in_the_dtype_that_is_asked_for() -> None:
    narrow, wide = (on_ranks(large_grads, options)[0] for options in ({"reduce_dtype": "bf16"}, {}))
    assert same(narrow, {key: value.bfloat16().float() for key, value in narrow.items()})
    assert not same(wide, {key: value.bfloat16().float() for key, value in wide.items()})


def after_forgetting(name: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = build(name, stage)
    with engine.no_sync():
        engine.backward(100 * loss(engine, my_rank()))
    engine.zero_grad()
    engine.backward(loss(engine, my_rank()))
    return engine.full_grads(), grads_with(name, stage, Reduction.MEAN, {})


@engines
def test_zero_grad_forgets_gradients_that_were_never_reduced(name: str, stage: int) -> None:
    for got, expected in on_ranks(after_forgetting, name, stage):
        assert same(got, expected)


def window(name: str, owner: AccumulationOwner) -> list[dict[str, Tensor]]:
    engine = build(name, 0, accumulation_steps=2, accumulation_owner=owner)
    reports = []
    for rank in (0, 1):
        share = loss(engine, rank) if owner is AccumulationOwner.ENGINE else loss(engine, rank) / 2
        engine.backward(share)
        if owner is AccumulationOwner.ENGINE or rank == 1:
            engine.step()
        reports.append(engine.full_params())
    return reports


def test_the_baseline_steps_at_the_boundary_whoever_owns_it() -> None:
    ((first, last),) = on_ranks(window, "plain", AccumulationOwner.ENGINE)
    ((untouched, expected),) = on_ranks(window, "plain", AccumulationOwner.CALLER)
    assert same(first, untouched)
    assert same(last, expected)
    assert not torch.equal(first["body.weight"], last["body.weight"])


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: param.grad for key, param in module.named_parameters() if type(param.grad) is Tensor}


def closed(name: str, stage: int) -> dict[str, Tensor]:
    engine = build(name, stage)
    assert isinstance(engine, Engine)
    module = engine.module
    engine.backward(loss(engine, my_rank()))
    engine.close()
    engine.close()
    with pytest.raises(AttributeError, match="attribute"):
        engine.step()
    loss(module, my_rank()).backward()  # type: ignore[no-untyped-call]
    return grads_of(module)


@engines
def test_a_closed_engine_is_unusable_and_its_module_still_runs(name: str, stage: int) -> None:
    first, *others = on_ranks(closed, name, stage)
    # FSDP2 cannot be undone: the gradients of its module stay shards. DDP's module reduces no more.
    assert (name == "fsdp2") == (first == {})
    assert name not in ("ddp", "zero1") or not same(first, others[0])


def after_a_closed_sum(name: str, stage: int) -> tuple[dict[str, Tensor], ...]:
    engine = build(name, stage, reduction=Reduction.SUM)
    module = engine.module
    engine.close()
    plain = copy.deepcopy(module)
    for side in (module, plain):
        loss(side, my_rank()).backward()  # type: ignore[no-untyped-call]
    return tuple(grads_of(side) for side in (module, plain))


@pytest.mark.parametrize(("name", "stage"), [("ddp", 0), ("zero1", 1)])
def test_a_closed_engine_of_a_sum_leaves_gradients_alone(name: str, stage: int) -> None:
    for after, expected in on_ranks(after_a_closed_sum, name, stage):
        assert same(after, expected)


def checkpoint_errors(name: str, stage: int) -> list[str]:
    engine = build(name, stage)
    errors = []
    for verb in (engine.save, engine.load):
        with pytest.raises(UsageError) as caught:
            verb(Path("nowhere"))
        errors.append(str(caught.value))
    return errors


def test_the_baseline_refuses_to_save_and_to_load_with_the_reason() -> None:
    name, stage = "plain", 0
    reason = ADAPTERS[name].CAPABILITIES.refuses[Feature.CHECKPOINT]
    for errors in on_ranks(checkpoint_errors, name, stage):
        assert all(reason in error and "nowhere" in error for error in errors)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_refusal_carries_a_reason(name: str) -> None:
    assert all(len(reason.split()) > 5 for reason in ADAPTERS[name].CAPABILITIES.refuses.values())


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("plain", EngineConfig(dtype="bf16"), "fp32"),
        ("ddp", EngineConfig(dtype="bf16"), "fp32"),
        ("fsdp2", EngineConfig(stage=3, dtype="fp16"), "fp32"),
        ("ddp", EngineConfig(stage=1), "allowed: 0"),
        ("fsdp2", EngineConfig(stage=3, options={"reduce_dtype": "fp8"}), "allowed: bf16, fp32"),
        ("fsdp2", EngineConfig(stage=1), "allowed: 2, 3"),
        ("ddp", EngineConfig(accumulation_owner=AccumulationOwner.ENGINE), "leaves it to the caller"),
        ("fsdp2", EngineConfig(stage=3, accumulation_owner=AccumulationOwner.ENGINE), "leaves it to the caller"),
        ("ddp", EngineConfig(options={"prefetch": 1}), "find_unused_parameters"),
        ("fsdp2", EngineConfig(stage=3, options={"prefetch": 1}), "grouping"),
    ],
)
def test_a_configuration_that_is_not_honoured_is_refused_before_anything_is_built(
    name: str, config: EngineConfig, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ADAPTERS[name].factory(nn.Identity(), config)
