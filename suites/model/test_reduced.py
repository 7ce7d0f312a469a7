"""Reduce a user's model by the settings behind its factory's path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from suites.model.tiny import draw, score
from zharness.cell import Cell
from zharness.export.model_candidates import count_parameter_owners, models_without_modules, smaller_models
from zharness.workload import model_spec
from zharness.workload.shrink_model import shrink_candidates
from zharness.workload.user_model import register_factory, user_model_spec

REAL = "suites.model.tiny_real"


def test_a_smaller_model_has_a_cell_id() -> None:
    text = f"training.grads[deepspeed-zero2-w2-fp32-{REAL}:gpt2(hidden_size=8,num_hidden_layers=1)-caller]"
    cell = Cell.parse(text)
    assert (cell.model, cell.variant) == (f"{REAL}:gpt2(hidden_size=8,num_hidden_layers=1)", "caller")
    assert cell.id == text


@pytest.mark.parametrize("factory", ["gpt2", "llama", "t5", "mixtral", "vit"])
def test_an_architecture_gets_smaller_by_its_configuration_and_trains(factory: str) -> None:
    pytest.importorskip("transformers")
    whole = model_spec(f"{REAL}:{factory}")
    step = next(shrink_candidates(whole.model(0)))
    name = f"{REAL}:{factory}({','.join(f'{key}={value}' for key, value in step.items())})"
    spec = model_spec(name)
    model, batch = spec.model(0), spec.micro_batch(0, 0, 0)
    assert type(model) is type(whole.model(0))
    assert elements(model) * 4 < elements(whole.model(0))
    assert torch.isfinite(spec.loss(batch.feed(model), batch.target))


def test_lora_adapters_and_recomputation_are_kept_in_the_smaller_model() -> None:
    pytest.importorskip("peft")
    model = model_spec(f"{REAL}:lora(num_hidden_layers=1,hidden_size=8)").model(0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def chain() -> Any:
    layers = [nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 5), nn.Linear(5, 3)]
    return nn.Sequential(*layers, nn.LayerNorm(3), nn.Linear(3, 3)), draw, score


def test_a_sequence_loses_modules_and_the_others_keep_their_names() -> None:
    register_factory("handed.over:chain", chain)
    user_model_spec.cache_clear()
    smaller_names = smaller_models("handed.over:chain")
    assert count_parameter_owners("handed.over:chain") == 5
    assert count_parameter_owners(smaller_names[0]) == 1
    smaller = "handed.over:chain(2=out,4=out)"
    assert [name for name, _ in model_spec(smaller).model(0).named_parameters() if "weight" in name] == [
        "0.weight", "3.weight", "5.weight",
    ]  # fmt: skip
    assert "handed.over:chain(2=out,4=out,1=out)" in smaller_models(smaller)


def test_a_lora_model_of_one_block_is_reduced_to_the_embedding_and_the_adapted_layer() -> None:
    pytest.importorskip("peft")
    sizes = "num_hidden_layers=1,num_attention_heads=1,hidden_size=8,vocab_size=16,max_position_embeddings=8"
    smallest = f"{REAL}:lora({sizes})"
    assert count_parameter_owners(smallest) == 9
    first, *rest = models_without_modules(smallest)
    assert count_parameter_owners(first) == 2
    trained = [name for name, parameter in model_spec(first).model(0).named_parameters() if parameter.requires_grad]
    assert all("c_attn.lora" in name for name in trained)
    assert all(2 < count_parameter_owners(each) < 9 for each in rest)
