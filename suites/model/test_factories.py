"""What a factory of a model may return, and the error for anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zharness.cell import Cell
from zharness.errors import UsageError
from zharness.workload import model_spec
from zharness.workload.user_model import register_factory, user_model_spec

TINY = "suites.model.tiny"
REAL = "suites.model.tiny_real"


def handed(factory: Callable[[], Any], request: pytest.FixtureRequest) -> str:
    """Register ``factory`` and return its name."""
    name = f"handed.over:{request.node.name.partition('[')[0]}"
    register_factory(name, factory)
    user_model_spec.cache_clear()
    return name


def test_the_path_of_a_factory_is_a_model_in_a_cell_id() -> None:
    text = f"training.grads[deepspeed{{configs/ds-1.json}}-zero3-w2-fp32-{TINY}:gpt2-caller]"
    cell = Cell.parse(text)
    assert (cell.engine_variant, cell.model, cell.variant) == ("configs/ds-1.json", f"{TINY}:gpt2", "caller")
    assert cell.id == text


@pytest.mark.parametrize("name", [f"{TINY}:perceptron", f"{REAL}:gpt2"])
def test_a_factory_s_model_and_batches_follow_from_the_seed(name: str) -> None:
    pytest.importorskip("transformers")
    spec = model_spec(name)
    first, second, other = spec.model(1), spec.model(1), spec.model(2)
    same = [torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not all(torch.equal(one, two) for one, two in zip(first.parameters(), other.parameters(), strict=True))
    batch = spec.micro_batch(1, 0, 0)
    losses = [spec.loss(batch.feed(model), batch.target).item() for model in (first, second)]
    assert losses[0] == losses[1], "the micro-batch seeds dropout"
    assert batch.seed != spec.micro_batch(1, 1, 0).seed


def fails() -> Any:
    raise KeyError("weights")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (fails, "raised KeyError: 'weights'"),
    "returns something else": (lambda: {"model": 1}, "returned a dict of model: an int; expected a model"),
    "no batch": (lambda: nn.Linear(2, 2), "without a batch function"),
    "batch is no function": (lambda: (nn.Linear(2, 2), torch.ones(2)), "expected a model"),
    "nothing trains": (lambda: (nn.Identity(), len), "no parameter that requires a gradient"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_factory_that_returns_no_model_is_refused(what: str, request: pytest.FixtureRequest) -> None:
    factory, message = WRONG[what]
    with pytest.raises(UsageError, match=message):
        model_spec(handed(factory, request)).model(0)


def test_a_factory_that_cannot_be_imported_is_named_with_its_path() -> None:
    with pytest.raises(UsageError, match=r"cannot import 'no_such_module' .* importable from the current directory"):
        model_spec("no_such_module:factory")
    with pytest.raises(UsageError, match="has no callable 'nothing'"):
        model_spec(f"{TINY}:nothing")


def test_a_batch_needs_one_row_for_each_sample(request: pytest.FixtureRequest) -> None:
    name = handed(lambda: (nn.Linear(2, 2), lambda generator: (torch.ones(4, 2), torch.ones(3))), request)
    with pytest.raises(UsageError, match="one row for each sample"):
        model_spec(name).micro_batch(0, 0, 0)


def test_a_loss_is_a_scalar_with_a_graph(request: pytest.FixtureRequest) -> None:
    name = handed(lambda: (nn.Linear(2, 2), lambda generator: torch.ones(4, 2), lambda out, batch: out), request)
    spec = model_spec(name)
    batch = spec.micro_batch(0, 0, 0)
    with pytest.raises(UsageError, match=r"the loss is a tensor of shape \(4, 2\)"):
        spec.loss(batch.feed(spec.model(0)), batch.target)
