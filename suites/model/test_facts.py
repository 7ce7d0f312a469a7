"""What is measured of a user's model before any law runs, and the errors that end a run before it begins."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zharness import engines
from zharness.cli import cli
from zharness.errors import ConfigError, UsageError
from zharness.laws.precision.autocast import list_autocast_states
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.run import Record, Verdict
from zharness.run.configuration import load_configuration, parse_configuration
from zharness.run.model_check import ModelCheckRequest, plan_model_cells
from zharness.run.model_facts import measure_model
from zharness.run.model_memory import ModelSize
from zharness.run.uncompared_gradients import explain_uncompared_gradients
from zharness.workload import model_spec
from zharness.workload.user_model import register_factory, user_model_spec


def collect_facts(factory: Callable[[], Any], mesh: Mesh = DEFAULT_MESH) -> Any:
    """Measure the model that ``factory`` builds."""
    register_factory("handed.over:facts", factory)
    user_model_spec.cache_clear()
    return measure_model("handed.over:facts", "fp32", "", mesh=mesh)


def draw(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 3, generator=generator)


def score(output: Tensor, _batch: Any) -> Tensor:
    return output.square().mean()


def dropping() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)), draw, score


def test_dropout_is_seeded_and_detected() -> None:
    found = collect_facts(dropping)
    assert found.draws_random_numbers
    assert (found.size, found.trained_parameters) == (ModelSize(32, 128), 32)
    assert not collect_facts(lambda: (nn.Linear(3, 8), draw, score)).draws_random_numbers


def test_the_plan_for_tp_is_that_of_the_measured_model_which_is_built_no_more_often() -> None:
    builds = [0]

    def planned() -> Any:
        builds[0] += 1
        model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8))
        model.tp_plan = {"0": "colwise_gather_output", "1": "embedding_rowwise"}  # type: ignore[assignment]
        return model, draw, score

    assert collect_facts(planned).unsplit_parts == ""
    without_mesh, builds[0] = builds[0], 0
    assert collect_facts(planned, Mesh.parse("tp2")).unsplit_parts == "1 (embedding_rowwise)"
    assert builds[0] == without_mesh
    with pytest.raises(UsageError, match="ships no plan for the axis tp"):
        collect_facts(dropping, Mesh.parse("tp2"))


class SharedNoise(nn.Linear):
    """A layer that multiplies every sample by the same random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(8)


def sharing_noise() -> Any:
    return SharedNoise(3, 8), draw, score


def test_noise_that_samples_share_on_an_engine_with_its_own_kernels_does_not_pass() -> None:
    reference = engines.capabilities("reference", 3)
    assert reference is not None
    claims = replace(reference, own_kernels={3: "a linear of its own"})
    check_request = ModelCheckRequest("suites.model.tiny:perceptron", stages=(3,))
    cells = plan_model_cells(
        check_request.build_request(), check_request, collect_facts(sharing_noise), lambda _engine, _stage: claims
    )
    reasons = {cell.cell.law: cell.unsupported_reason for cell in cells}
    assert "a row for each sample is needed" in reasons["training.kernels"]
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
    assert "no gradient was compared at stage 3 (the engine has its own kernels" in explain_uncompared_gradients(
        records
    )
    compared = replace(records[0], cell=replace(records[0].cell, law="training.kernels"), verdict=Verdict.PASS)
    assert not explain_uncompared_gradients([*records, compared])


class OwnDropout(nn.Linear):
    """A layer that draws from Python's random, which no seed of torch sets."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()  # noqa: S311 - what a user may have written


def build_unseeded_weights() -> Any:
    model = nn.Linear(3, 8)
    nn.init.constant_(model.weight, random.random())  # noqa: S311 - as above
    return model, draw, score


class Loader:
    """A batch function that ignores its generator and counts up."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, _generator: torch.Generator) -> Tensor:
        self.number += 1
        return torch.full((4, 3), float(self.number))


UNSEEDED: dict[str, tuple[Callable[[], Any], str]] = {
    "forward": (lambda: (OwnDropout(3, 8), draw, score), "differ in the loss, .* likely causes: dropout"),
    "weights": (build_unseeded_weights, "two models that differ in 'weight'"),
    "order of data": (
        lambda: (nn.Linear(3, 8), Loader(), score),
        "two different micro-batches.* iterator over a data loader",
    ),
    "one batch": (lambda: (nn.Linear(3, 8), lambda _: torch.ones(4, 3), score), "the same .* never reduces .* passes"),
    "no number": (lambda: (nn.Linear(3, 8), draw, lambda out, _: out.mean() * torch.nan), "the loss .* is nan"),
}


@pytest.mark.parametrize("what", UNSEEDED)
def test_a_model_that_cannot_be_judged_is_refused(what: str) -> None:
    factory, message = UNSEEDED[what]
    with pytest.raises(UsageError, match=message):
        collect_facts(factory)


def test_a_factory_that_keeps_what_it_has_drawn_is_refused() -> None:
    build_layer = cache(lambda: nn.Linear(3, 8))
    for factory in (cache(dropping), lambda: (nn.Sequential(build_layer(), nn.Linear(8, 2)), draw, score)):
        with pytest.raises(UsageError, match=r"same tensor '0.weight' from two calls .* a new model in each call"):
            collect_facts(factory)


def test_a_factory_may_return_weights_again_that_it_does_not_draw() -> None:
    model, frozen = nn.Linear(3, 8), nn.Linear(8, 8)
    assert collect_facts(lambda: (model, draw, score)).trained_parameters == 32
    assert collect_facts(lambda: (nn.Sequential(nn.Linear(3, 8), frozen), draw, score)).trained_parameters == 104


def test_a_larger_model_and_fewer_lanes_take_longer() -> None:
    small = collect_facts(dropping)
    large = replace(small, size=ModelSize(2**28, 2**30))
    assert large.estimate_time(15, 0, 2, 1, 2) > small.estimate_time(15, 0, 2, 1, 2)
    one_lane, two_lanes = large.estimate_time(15, 0, 2, 1, 2), large.estimate_time(15, 0, 2, 2, 2)
    assert one_lane > two_lanes, "the judge of one cell leaves a core idle"
    assert two_lanes == large.estimate_time(15, 0, 2, 4, 2), "two lanes keep two cores busy"
    slow = replace(large, machine_speed=replace(large.machine_speed, autocast_slowdown=30.0))
    assert slow.estimate_time(15, 2, 2, 1, 2) > one_lane, "products in bf16 may be slow"
    assert slow.estimate_time(15, 0, 2, 1, 2) == one_lane


def test_autocast_laws_do_not_repeat_the_plain_pass_of_a_user_s_model() -> None:
    spec = model_spec("mlp")
    assert list_autocast_states(spec) == [(True, True), (True, False), (False, True), (False, False)]
    assert list_autocast_states(replace(spec, name="my_model:factory")) == [(True, True), (True, False), (False, True)]


def test_a_configuration_is_parsed() -> None:
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
    assert found.options == {"zero_optimization": {"overlap_comm": True}}, "keys that the laws set are removed"


def test_a_configuration_lists_the_loss_scale_keys_that_are_ignored() -> None:
    found = parse_configuration("ds.json", {"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}})
    assert found.ignored_keys == ("fp16.loss_scale", "fp16.hysteresis")


def test_a_configuration_that_was_edited_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for stage in (1, 2):
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert load_configuration(str(path)).stage == stage


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Lamb"}}, "unknown optimizer.type 'Lamb'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "speed": 1}}}, "torch.optim.SGD does not accept .*speed"),
        ({"zero_optimization": {"sub_group_size": "auto"}}, "sub_group_size is 'auto', which the Trainer"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "unknown torch_autocast.dtype 'int8'"),
        ({"torch_autocast": True}, "torch_autocast is true; expected a JSON object"),
        ({"bf16": True}, "bf16 is true; expected a JSON object"),
        ({"optimizer": "AdamW"}, 'optimizer is "AdamW"; expected a JSON object'),
        ({"zero_optimization": None}, "zero_optimization is null; expected a JSON object"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "are both true; enable one"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction is false, which"),
    ],
)
def test_a_configuration_that_no_law_can_use_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_configuration("ds.json", config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2"], "expected package.module:factory"),
        (["no_such_module:factory"], "cannot import 'no_such_module'"),
        (["suites.model.tiny:perceptron", "--config", "ds.yaml"], "whose name ends in .json"),
        (["suites.model.tiny:perceptron", "--config", "no.json"], "as a JSON file"),
    ],
)
def test_the_command_reports_wrong_input_before_it_starts_anything(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cli.main(["model", *arguments], standalone_mode=False)
