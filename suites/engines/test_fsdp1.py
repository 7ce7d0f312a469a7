"""FSDP1's adapter: original names, pieces of flat parameters, models on the meta device, and its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it at first use, a second that every rank would spend after its fork
import torch.distributed.fsdp
from torch import Tensor, nn

from zharness.engines import fsdp1
from zharness.engines.fsdp1_tensors import keep_original_names, original_name
from zharness.engines.protocol import EngineConfig, OptimizerSpec, Reduction
from zharness.errors import ConfigError
from zharness.world import GroupMode, run

SHARDED_STAGES = (2, 3)
ADAM = OptimizerSpec("adam", {"lr": 1.0, "betas": (0.5, 0.75)})


class TiedEmbeddingModel(nn.Module):
    """Two linear layers, tied to an embedding, and a buffer: ids (batch,) to (batch, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("offset", torch.ones(5))

    def reset_parameters(self) -> None:
        """Give the buffer its values, if it was created on the meta device."""
        torch.nn.init.ones_(self.offset)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(ids))) + self.offset  # type: ignore[no-any-return]


def on_ranks(function: Any, *args: Any, world_size: int = 2) -> list[Any]:
    return run(function, *args, world_size=world_size, timeout=60, group=GroupMode.DEFAULT)


def build(
    stage: int, options: dict[str, Any], device: str = "cpu", reduction: Reduction = Reduction.MEAN
) -> fsdp1.FSDP1Engine:
    torch.manual_seed(torch.distributed.get_rank())
    with torch.device(device):
        model = TiedEmbeddingModel()
    if device == "cpu":
        for param in model.parameters():
            nn.init.ones_(param)
    return fsdp1.factory(model, EngineConfig(stage=stage, optimizer=ADAM, options=options, reduction=reduction))


def train_one_step(stage: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    engine = build(stage, options)
    engine.backward(engine(torch.tensor([1 + torch.distributed.get_rank()])).sum())
    grads = engine.full_grads()
    engine.step()
    return grads, engine.full_optimizer_state()


def read_names(stage: int) -> dict[str, list[str]]:
    engine = build(stage, {})
    engine(torch.tensor([1])).sum().backward()
    return {
        "parameters": [name for name, _ in engine.module.named_parameters()],
        "buffers": [name for name, _ in engine.module.named_buffers()],
        "modules": list(dict(engine.module.named_modules())),
    }


@pytest.mark.parametrize("stage", SHARDED_STAGES)
def test_modules_parameters_and_buffers_keep_their_names(stage: int) -> None:
    plain = TiedEmbeddingModel()
    for names in on_ranks(read_names, stage):
        assert names["parameters"] == [name for name, _ in plain.named_parameters()]
        assert names["buffers"] == ["offset"]
        assert names["modules"] == [name for name, _ in plain.named_modules()]


def test_a_wrapper_disappears_from_names() -> None:
    assert original_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight") == "layers.0.weight"
    model = nn.Sequential(nn.Module())
    model[0]._fsdp_wrapped_module = nn.Linear(1, 1)
    keep_original_names(model)
    assert [name for name, _ in model.named_parameters(prefix="model")] == ["model.0.weight", "model.0.bias"]
    assert type(model).__name__ == "Sequential"


def read_layout(stage: int, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int], dict[str, int]]:
    engine = build(stage, options)
    held = {name: param.numel() for name, param in engine.module.named_parameters()}
    return dict(engine.layout()), held, {name: full.numel() for name, full in engine.full_params().items()}


@pytest.mark.parametrize("stage", SHARDED_STAGES)
def test_pieces_cover_each_parameter_once_and_are_what_a_rank_stores(stage: int) -> None:
    for rank, (layout, held, sizes) in enumerate(on_ranks(read_layout, stage, {}, world_size=3)):
        assert layout.keys() == sizes.keys()
        for name, pieces in layout.items():
            assert [index for piece in pieces for index in range(piece.start, piece.stop)] == [*range(sizes[name])]
            assert held[name] == sum(piece.stop - piece.start for piece in pieces if piece.rank == rank)


def test_no_shard_has_no_pieces() -> None:
    assert all(layout == {} for layout, _, _ in on_ranks(read_layout, 0, {}))


def train_layer_outside_forward(reduction: Reduction) -> dict[str, Tensor]:
    engine = build(0, {"grouping": "root"}, reduction=reduction)
    output = engine(torch.tensor([1 + torch.distributed.get_rank()]))
    engine.module.layers[0](torch.ones(1, 3)).sum().backward()
    engine.backward(output.sum())
    return engine.full_grads()


def test_a_layer_that_is_called_outside_the_forward_is_summed_too() -> None:
    (sums, _), (means, _) = (
        on_ranks(train_layer_outside_forward, reduction) for reduction in (Reduction.SUM, Reduction.MEAN)
    )
    assert all(torch.equal(sums[name], 2 * means[name]) for name in means)


@pytest.mark.parametrize(
    "options",
    [
        *({name: True} for name in ("forward_prefetch", "ignored_params", "cast_forward_inputs")),
        {"limit_all_gathers": False},
        {"backward_prefetch": "post"},
        {"backward_prefetch": "none"},
        {"cast_root_forward_inputs": False},
        {"grouping": "root"},
        {"replicas": 1},
    ],
    ids=str,
)
def test_an_option_changes_no_gradient(options: dict[str, Any]) -> None:
    for (grads, _), (expected, _) in zip(
        on_ranks(train_one_step, 3, options), on_ranks(train_one_step, 3, {}), strict=True
    ):
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grads[name], expected[name]) for name in grads)


def test_the_offloaded_optimizer_state_has_the_squares_twice() -> None:
    """Without a GPU ``offload_to_cpu`` copies nothing, so all states are views of the tensor that was gathered last."""
    for stage in SHARDED_STAGES:
        right, wrong = (
            on_ranks(train_one_step, stage, {"optimizer_state_offload": offload})[0][1]["layers.0.bias"]
            for offload in (False, True)
        )
        assert not torch.equal(right["exp_avg"], right["exp_avg_sq"])
        assert torch.equal(wrong["exp_avg"], right["exp_avg_sq"])


def build_deferred(stage: int) -> dict[str, Tensor]:
    return build(stage, {}, device="meta").full_params()


def test_a_model_on_the_meta_device_gets_the_weights_of_rank_0() -> None:
    torch.manual_seed(0)
    expected = dict(TiedEmbeddingModel().named_parameters())
    for params in on_ranks(build_deferred, 3):
        assert params.keys() == expected.keys()
        assert all(torch.equal(params[name], expected[name]) for name in params)


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (1, {}, "allowed: 0, 2, 3"),
        (3, {"reduce_dtype": "fp8"}, "allowed: bf16, fp16, fp32"),
        (3, {"backward_prefetch": "late"}, "allowed: none, post, pre"),
        (3, {"replicas": 2}, "does not divide the world size 1"),
        (0, {"replicas": 1}, "use stage 2 or 3"),
        (3, {"prefetch": 1}, "backward_prefetch"),
    ],
)
def test_a_wrong_option_is_refused(stage: int, options: dict[str, Any], message: str) -> None:
    for said in on_ranks(refusal, stage, options, world_size=1):
        assert message in said


def refusal(stage: int, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        build(stage, options)
    return str(refused.value)
