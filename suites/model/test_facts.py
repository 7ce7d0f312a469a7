"""What is found out about a model before a law is held to it, and what ends a run before it begins."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zharness import engines
from zharness.cli import cli
from zharness.errors import ConfigError, UsageError
from zharness.laws.precision.autocast import list_autocast_states
from zharness.report.uncompared_gradients import explain_uncompared_gradients
from zharness.run import Record, Verdict
from zharness.run.configuration import load_configuration, parse_configuration
from zharness.run.model_check import ModelCheckRequest, plan_model_cells
from zharness.run.model_facts import explain_too_large, measure_model
from zharness.workload import model_spec
from zharness.workload.user_model import register_factory, user_model_spec


def facts_of(factory: Callable[[], Any]) -> Any:
    """The facts of what ``factory`` makes."""
    register_factory("handed.over:facts", factory)
    user_model_spec.cache_clear()
    return measure_model("handed.over:facts", "fp32", "")


def draw(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 3, generator=generator)


def score(output: Tensor, _batch: Any) -> Tensor:
    return output.square().mean()


def dropping() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)), draw, score


def test_dropout_is_seeded_and_told() -> None:
    found = facts_of(dropping)
    assert found.draws
    assert (found.parameters, found.trained, found.size) == (32, 32, 128)
    assert not facts_of(lambda: (nn.Linear(3, 8), draw, score)).draws


def test_dropout_on_an_engine_with_kernels_of_its_own_is_no_pass() -> None:
    right = engines.capabilities("reference", 3)
    assert right is not None
    claims = replace(right, own_kernels={3: "a linear of its own"})
    asked = ModelCheckRequest("suites.model.tiny:perceptron", stages=(3,))
    cells = plan_model_cells(asked.build_request(), asked, facts_of(dropping), lambda _engine, _stage: claims)
    why = {cell.cell.law: cell.unsupported_reason for cell in cells}
    assert "draw other numbers" in why["training.kernels"]
    records = [
        Record(
            cell.cell,
            0,
            Verdict.UNSUPPORTED if cell.unsupported_reason else Verdict.PASS,
            "1",
            "2",
            cause=cell.unsupported_reason,
        )
        for cell in cells
    ]
    assert any(record.verdict is Verdict.PASS for record in records)
    assert "no gradient was compared at stage 3 (dropout: " in explain_uncompared_gradients(records)
    compared = replace(records[0], case=replace(records[0].cell, check="training.kernels"), verdict=Verdict.PASS)
    assert not explain_uncompared_gradients([*records, compared])


class OwnDropout(nn.Linear):
    """Drops what Python's own generator says, which no seed of torch's sets."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()  # noqa: S311 - what a user may have written


def of_unseeded_weights() -> Any:
    model = nn.Linear(3, 8)
    nn.init.constant_(model.weight, random.random())  # noqa: S311 - as above
    return model, draw, score


class Loader:
    """Batches in the order of an iterator, whatever generator is given."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, _generator: torch.Generator) -> Tensor:
        self.number += 1
        return torch.full((4, 3), float(self.number))


UNSEEDED: dict[str, tuple[Callable[[], Any], str]] = {
    "forward": (lambda: (OwnDropout(3, 8), draw, score), "differ in the loss, .* first suspects are dropout"),
    "weights": (of_unseeded_weights, "two models that differ in 'weight'"),
    "order of data": (lambda: (nn.Linear(3, 8), Loader(), score), "two micro-batches that differ.* order of data"),
    "one batch": (lambda: (nn.Linear(3, 8), lambda _: torch.ones(4, 3), score), "the same .* never reduces .* passes"),
    "no number": (lambda: (nn.Linear(3, 8), draw, lambda out, _: out.mean() * torch.nan), "the loss .* is nan"),
}


@pytest.mark.parametrize("what", UNSEEDED)
def test_a_model_that_cannot_be_judged_is_one_clear_error(what: str) -> None:
    factory, words = UNSEEDED[what]
    with pytest.raises(UsageError, match=words):
        facts_of(factory)


def test_a_model_that_does_not_fit_is_refused_with_what_it_takes() -> None:
    found = facts_of(dropping)
    assert not explain_too_large(found, 2, 1e12)
    assert "take fewer ranks, fewer layers of it" in explain_too_large(found, 2, 1e6)


def test_a_larger_model_and_fewer_lanes_take_longer() -> None:
    small = facts_of(dropping)
    large = replace(small, size=2**30)
    assert large.time(15, 0, 2, 1, 2) > small.time(15, 0, 2, 1, 2)
    assert large.time(15, 0, 2, 1, 2) > large.time(15, 0, 2, 2, 2), "the judge of one cell leaves a core idle"
    assert large.time(15, 0, 2, 2, 2) == large.time(15, 0, 2, 4, 2), "two lanes keep two cores busy"
    slow = replace(large, pace=replace(large.pace, under_autocast=30.0))
    assert slow.time(15, 2, 2, 1, 2) > large.time(15, 0, 2, 1, 2), "products in bf16 may be slow"
    assert slow.time(15, 0, 2, 1, 2) == large.time(15, 0, 2, 1, 2)


def test_a_pass_of_a_user_s_model_that_another_law_has_is_not_run_again_for_autocast() -> None:
    own = model_spec("mlp")
    assert list_autocast_states(own) == [(True, True), (True, False), (False, True), (False, False)]
    assert list_autocast_states(replace(own, name="my_model:factory")) == [(True, True), (True, False), (False, True)]


def test_a_configuration_is_taken_apart() -> None:
    found = parse_configuration(
        "ds.json",
        {
            "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "torch_adam": True}},
            "gradient_clipping": 0.5,
            "gradient_accumulation_steps": 4,
            "train_batch_size": 64,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "overlap_comm": True},
        },
    )
    assert (found.training.optimizer.name, found.training.clip, found.training.accumulation) == ("adamw", 0.5, 4)
    assert found.training.optimizer.args == {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.0}
    assert (found.stage, found.dtype) == (2, "bf16")
    assert found.ignored_keys == ("train_batch_size", "optimizer.params.torch_adam")
    assert found.options == {"zero_optimization": {"overlap_comm": True}}, "what the laws set themselves is not in it"


def test_a_configuration_says_what_of_loss_scaling_it_leaves_out() -> None:
    found = parse_configuration("ds.json", {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}})
    assert found.ignored_keys == ("fp16.loss_scale", "fp16.hysteresis")


def test_a_configuration_that_was_edited_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for stage in (1, 2):
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert load_configuration(str(path)).stage == stage


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"optimizer": {"type": "Lamb"}}, "unknown optimizer.type 'Lamb'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "speed": 1}}}, "torch's SGD refuses .*speed"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "reduce_bucket_size is 'auto'"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "unknown torch_autocast.dtype 'int8'"),
        ({"torch_autocast": True}, "torch_autocast is true; expected a JSON object"),
        ({"bf16": True}, "bf16 is true; expected a JSON object"),
        ({"optimizer": "AdamW"}, 'optimizer is "AdamW"; expected a JSON object'),
        ({"zero_optimization": None}, "zero_optimization is null; expected a JSON object"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "are both true; enable one"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction is false, which"),
    ],
)
def test_a_configuration_that_no_law_can_follow_is_refused_by_its_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_configuration("ds.json", config)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt2"], "expected package.module:factory"),
        (["no_such_module:factory"], "cannot import 'no_such_module'"),
        (["suites.model.tiny:perceptron", "--config", "ds.yaml"], "whose name ends in .json"),
        (["suites.model.tiny:perceptron", "--config", "no.json"], "is no readable JSON file"),
    ],
)
def test_the_command_says_what_is_wrong_before_it_starts_anything(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cli.main(["model", *arguments], standalone_mode=False)
