"""The adapters of torch's own engines: names, shapes, copies, layout, refusals."""

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

from zharness.engines import ddp, fsdp1, fsdp2, plain, zero1
from zharness.engines.protocol import AccumulationOwner, Engine, EngineConfig, Feature, OptimizerSpec, Piece, Reduction
from zharness.engines.torch_engine import register_all_reduce_hooks
from zharness.errors import ConfigError, UsageError
from zharness.world import GroupMode, run

WORLD_SIZE = 2
ADAPTERS = {"plain": plain, "ddp": ddp, "zero1": zero1, "fsdp1": fsdp1, "fsdp2": fsdp2}
SHARED = [("ddp", 0), ("zero1", 1), ("fsdp2", 2), ("fsdp2", 3)]
ALL_STAGES = [("plain", 0), *SHARED]
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

engines = pytest.mark.parametrize(("name", "stage"), ALL_STAGES)
shared_engines = pytest.mark.parametrize(("name", "stage"), SHARED)


class Integers(nn.Module):
    """A model with integer weights, a tied embedding, a frozen bias and a one-row layer: ids (batch,) to (batch, 5).

    Two ranks do not divide five rows, and one rank owns nothing of the one-row layer.
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
    """Return an integer loss that differs between ranks."""
    return (rank + 1) * (engine(torch.tensor([rank, 2, 4 - rank])) * torch.tensor([1.0, -1.0, 2.0, 0.0, 1.0])).sum()


def current_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def equal_tensors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(value, expected[key]) for key, value in got.items())


def cached_steps(name: str, stage: int) -> list[dict[str, Any]]:
    """Return ``train_one_step`` of each rank, cached for all tests; tests must not change it."""
    if (name, stage) not in STEPS:
        STEPS[name, stage] = run_on_ranks(train_one_step, name, stage)
    return STEPS[name, stage]


def run_on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    alone = args[0] == "plain"
    group = GroupMode.NONE if alone else GroupMode.DEFAULT
    return run(function, *args, world_size=1 if alone else WORLD_SIZE, timeout=60, group=group)


def train_one_step(name: str, stage: int) -> dict[str, Any]:
    engine = build(name, stage)
    before, idle = engine.full_params(), engine.full_grads()
    engine.backward(loss(engine, current_rank()))
    grads = engine.full_grads()
    engine.step()
    return {"before": before, "idle": idle, "grads": grads, "after": engine.full_params(), "norm": engine.grad_norm()}


@engines
def test_names_and_shapes_are_the_originals_and_a_tied_parameter_appears_once(name: str, stage: int) -> None:
    for seen in cached_steps(name, stage):
        assert {key: tuple(value.shape) for key, value in seen["after"].items()} == SHAPES
        assert {key: tuple(value.shape) for key, value in seen["grads"].items()} == TRAINED


@engines
def test_an_sgd_step_moves_parameters_by_exactly_the_reported_gradient(name: str, stage: int) -> None:
    for seen in cached_steps(name, stage):
        assert (seen["idle"], seen["norm"]) == ({}, None)
        assert any(grad.any() for grad in seen["grads"].values())
        for key, before in seen["before"].items():
            assert torch.equal(seen["after"][key], before - seen["grads"].get(key, 0))


@shared_engines
def test_every_rank_reports_the_same_tensors(name: str, stage: int) -> None:
    first, second = cached_steps(name, stage)
    for kind in ("before", "grads", "after"):
        assert equal_tensors(first[kind], second[kind])


def check_copies(name: str, stage: int) -> list[bool]:
    engine = build(name, stage)
    engine.backward(loss(engine, current_rank()))
    unchanged = []
    for read in (engine.full_params, engine.full_grads):
        kept = {key: value.clone() for key, value in read().items()}
        for value in read().values():
            value.fill_(77)
        unchanged.append(equal_tensors(read(), kept))
    return unchanged


@engines
def test_reported_tensors_are_copies(name: str, stage: int) -> None:
    assert run_on_ranks(check_copies, name, stage) == [[True, True]] * (1 if name == "plain" else WORLD_SIZE)


def layout_and_local_sizes(name: str, stage: int) -> tuple[dict[str, tuple[Piece, ...]], dict[str, int]]:
    engine = build(name, stage)
    held = {
        key: (param.to_local() if isinstance(param, DTensor) else param).numel()
        for key, param in engine.module.named_parameters()
    }
    return dict(engine.layout()), held


@pytest.mark.parametrize("stage", [2, 3])
def test_the_layout_covers_every_element_once_and_matches_the_local_shards(stage: int) -> None:
    for rank, (layout, held) in enumerate(run_on_ranks(layout_and_local_sizes, "fsdp2", stage)):
        assert layout.keys() == SHAPES.keys()
        for key, shape in SHAPES.items():
            covered = [index for piece in layout[key] for index in range(piece.start, piece.stop)]
            assert covered == list(range(torch.Size(shape).numel()))
            assert held[key] == sum(piece.stop - piece.start for piece in layout[key] if piece.rank == rank)


@pytest.mark.parametrize(("name", "stage"), [("plain", 0), ("ddp", 0), ("zero1", 1)])
def test_an_engine_that_shards_nothing_has_an_empty_layout(name: str, stage: int) -> None:
    assert all(layout == {} for layout, _ in run_on_ranks(layout_and_local_sizes, name, stage))


def optimizer_states(name: str, stage: int) -> tuple[dict[str, Any], dict[str, dict[str, tuple[int, ...]]], bool]:
    engine = build(name, stage, optimizer=OptimizerSpec("adamw", {"lr": 0.5}, schedule=(1.0, 0.25)))
    before = engine.full_optimizer_state()
    engine.backward(loss(engine, current_rank()))
    engine.step()
    shapes = {
        key: {part: tuple(value.shape) for part, value in state.items()}
        for key, state in engine.full_optimizer_state().items()
    }
    return before, shapes, engine.observe().learning_rates == (0.125,)


@engines
def test_optimizer_state_has_torchs_names_and_the_original_shapes(name: str, stage: int) -> None:
    expected = {key: {"step": (), "exp_avg": shape, "exp_avg_sq": shape} for key, shape in TRAINED.items()}
    for before, after, scheduled in run_on_ranks(optimizer_states, name, stage):
        assert before == {}
        assert after == expected
        assert scheduled


def build_and_read_grads(name: str, stage: int, reduction: Reduction, options: dict[str, Any]) -> dict[str, Tensor]:
    engine = build(name, stage, reduction=reduction, options=options)
    engine.backward(loss(engine, current_rank()))
    return engine.full_grads()


@shared_engines
def test_a_sum_is_the_mean_times_the_world_size(name: str, stage: int) -> None:
    mean, total = (
        run_on_ranks(build_and_read_grads, name, stage, kind, {})[0] for kind in (Reduction.MEAN, Reduction.SUM)
    )
    assert equal_tensors(total, {key: value * WORLD_SIZE for key, value in mean.items()})


@pytest.mark.parametrize(("name", "stage", "options"), OPTIONS)
def test_every_listed_option_is_accepted(name: str, stage: int, options: dict[str, Any]) -> None:
    with_it, without = (
        run_on_ranks(build_and_read_grads, name, stage, Reduction.MEAN, chosen)[0] for chosen in (options, {})
    )
    assert equal_tensors(with_it, without)


def read_large_grads(options: dict[str, Any]) -> dict[str, Tensor]:
    engine = build("fsdp2", 3, options=options)
    engine.backward(257 * loss(engine, current_rank()))
    return engine.full_grads()


def test_fsdp2_reduces_in_the_configured_dtype() -> None:
    narrow, wide = (run_on_ranks(read_large_grads, options)[0] for options in ({"reduce_dtype": "bf16"}, {}))
    assert equal_tensors(narrow, {key: value.bfloat16().float() for key, value in narrow.items()})
    assert not equal_tensors(wide, {key: value.bfloat16().float() for key, value in wide.items()})


def read_grads_after_zero_grad(name: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = build(name, stage)
    with engine.no_sync():
        engine.backward(100 * loss(engine, current_rank()))
    engine.zero_grad()
    engine.backward(loss(engine, current_rank()))
    return engine.full_grads(), build_and_read_grads(name, stage, Reduction.MEAN, {})


@engines
def test_zero_grad_drops_unreduced_gradients(name: str, stage: int) -> None:
    for got, expected in run_on_ranks(read_grads_after_zero_grad, name, stage):
        assert equal_tensors(got, expected)


def params_after_each_micro_batch(name: str, owner: AccumulationOwner) -> list[dict[str, Tensor]]:
    engine = build(name, 0, accumulation_steps=2, accumulation_owner=owner)
    reports = []
    for rank in (0, 1):
        share = loss(engine, rank) if owner is AccumulationOwner.ENGINE else loss(engine, rank) / 2
        engine.backward(share)
        if owner is AccumulationOwner.ENGINE or rank == 1:
            engine.step()
        reports.append(engine.full_params())
    return reports


def test_the_baseline_steps_at_the_boundary_for_both_accumulation_owners() -> None:
    ((first, last),) = run_on_ranks(params_after_each_micro_batch, "plain", AccumulationOwner.ENGINE)
    ((untouched, expected),) = run_on_ranks(params_after_each_micro_batch, "plain", AccumulationOwner.CALLER)
    assert equal_tensors(first, untouched)
    assert equal_tensors(last, expected)
    assert not torch.equal(first["body.weight"], last["body.weight"])


def plain_grads(module: nn.Module) -> dict[str, Tensor]:
    return {key: param.grad for key, param in module.named_parameters() if type(param.grad) is Tensor}


def train_closed_module(name: str, stage: int) -> dict[str, Tensor]:
    engine = build(name, stage)
    assert isinstance(engine, Engine)
    module = engine.module
    engine.backward(loss(engine, current_rank()))
    engine.close()
    engine.close()
    with pytest.raises(AttributeError, match="attribute"):
        engine.step()
    loss(module, current_rank()).backward()  # type: ignore[no-untyped-call]
    return plain_grads(module)


@engines
def test_a_closed_engine_is_unusable_and_its_module_still_trains(name: str, stage: int) -> None:
    first, *others = run_on_ranks(train_closed_module, name, stage)
    # FSDP2 cannot be undone, so its module's gradients stay DTensors. DDP's module no longer reduces.
    assert (name == "fsdp2") == (first == {})
    assert name not in ("ddp", "zero1") or not equal_tensors(first, others[0])


def train_after_closed_sum(name: str, stage: int) -> tuple[dict[str, Tensor], ...]:
    engine = build(name, stage, reduction=Reduction.SUM)
    module = engine.module
    engine.close()
    plain = copy.deepcopy(module)
    for side in (module, plain):
        loss(side, current_rank()).backward()  # type: ignore[no-untyped-call]
    return tuple(plain_grads(side) for side in (module, plain))


@pytest.mark.parametrize(("name", "stage"), [("ddp", 0), ("zero1", 1)])
def test_a_closed_engine_with_sum_reduction_no_longer_scales_gradients(name: str, stage: int) -> None:
    for after, expected in run_on_ranks(train_after_closed_sum, name, stage):
        assert equal_tensors(after, expected)


def collect_checkpoint_errors(name: str, stage: int) -> list[str]:
    engine = build(name, stage)
    errors = []
    for verb in (engine.save, engine.load):
        with pytest.raises(UsageError) as caught:
            verb(Path("nowhere"))
        errors.append(str(caught.value))
    return errors


def test_the_baseline_refuses_to_save_and_load_with_the_reason() -> None:
    name, stage = "plain", 0
    reason = ADAPTERS[name].CAPABILITIES.refuses[Feature.CHECKPOINT]
    for errors in run_on_ranks(collect_checkpoint_errors, name, stage):
        assert all(reason in error and "nowhere" in error for error in errors)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_refusal_carries_a_reason(name: str) -> None:
    assert all(len(reason.split()) > 5 for reason in ADAPTERS[name].CAPABILITIES.refuses.values())


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("plain", EngineConfig(dtype="bf16"), "fp32"),
        ("ddp", EngineConfig(dtype="bf16"), "fp32"),
        ("fsdp2", EngineConfig(stage=3, dtype="fp8"), "allowed: bf16, fp16, fp32"),
        ("ddp", EngineConfig(stage=1), "allowed: 0"),
        ("fsdp2", EngineConfig(stage=3, options={"reduce_dtype": "fp8"}), "allowed: bf16, fp16, fp32"),
        ("fsdp2", EngineConfig(stage=1), "allowed: 2, 3"),
        ("ddp", EngineConfig(accumulation_owner=AccumulationOwner.ENGINE), "leaves it to the caller"),
        ("fsdp2", EngineConfig(stage=3, accumulation_owner=AccumulationOwner.ENGINE), "leaves it to the caller"),
        ("ddp", EngineConfig(options={"prefetch": 1}), "find_unused_parameters"),
        ("fsdp2", EngineConfig(stage=3, options={"prefetch": 1}), "grouping"),
    ],
)
def test_an_unsupported_configuration_is_refused_before_anything_is_built(
    name: str, config: EngineConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ADAPTERS[name].factory(nn.Identity(), config)


def test_frozen_parameters_of_integers_get_no_gradient_hook() -> None:
    quantised = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    register_all_reduce_hooks([quantised, frozen], Reduction.MEAN)
    assert not quantised.requires_grad
    assert not frozen.requires_grad
    assert frozen._backward_hooks, "it may be unfrozen later"


def read_deferred_grads(device: str) -> dict[str, Tensor]:
    """Return the gradients of a layer that was built on ``device``, and whose bias ``fully_shard`` ignores."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Linear(3, 2)
    engine = fsdp2.factory(model, EngineConfig(stage=3, options={"ignored_params": "vectors"}))
    engine.backward((current_rank() + 1) * engine(torch.ones(1, 3)).sum())
    return engine.full_grads()


def test_fsdp2_reduces_gradients_of_ignored_parameters_of_a_deferred_model() -> None:
    expected = {"weight": torch.full((2, 3), 1.5), "bias": torch.full((2,), 1.5)}
    for device in ("cpu", "meta"):
        assert all(equal_tensors(grads, expected) for grads in run_on_ranks(read_deferred_grads, device)), device


def read_rounded_params(name: str, stage: int) -> dict[str, Tensor]:
    """Return what an engine in bf16 reports of a frozen and a trained layer, none of whose weights bf16 has."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for param in model.parameters():
        nn.init.constant_(param, 1 + 2**-10)
    model[0].requires_grad_(False)
    weights: dict[str, Tensor] = ADAPTERS[name].factory(model, EngineConfig(stage=stage, dtype="bf16")).full_params()
    return weights


@pytest.mark.parametrize(("name", "stage"), [("fsdp1", 0), ("fsdp1", 2), ("fsdp1", 3), ("fsdp2", 2), ("fsdp2", 3)])
def test_low_precision_rounds_trained_weights_and_no_frozen_ones(name: str, stage: int) -> None:
    for params in run_on_ranks(read_rounded_params, name, stage):
        for key, weight in params.items():
            is_trained = key.startswith("1.")
            assert weight.dtype is (torch.bfloat16 if is_trained else torch.float32), key
            assert torch.equal(weight.float(), torch.full(weight.shape, 1.0 if is_trained else 1 + 2**-10)), key
