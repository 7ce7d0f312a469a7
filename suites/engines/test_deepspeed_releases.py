"""A release of DeepSpeed claims what it has; what a later release added is refused, and is not called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zharness import engines
from zharness.cell import Cell
from zharness.engines import Capabilities, EngineOption, Feature, Reduction
from zharness.engines.deepspeed_capabilities import STAND_INS_ON_CP, capabilities_at, capabilities_of_release
from zharness.engines.deepspeed_releases import ADDITIONS, restrict_to_release
from zharness.law_kit.scenarios import choose_exact_reduction
from zharness.run import PlannedCell, Record, Request, Verdict, plan
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.verdicts import apply_lacking_remedy, verdict_of_exception
from zharness.workload import MODELS

COALESCE = {"coalesce_grad_reduction": True}


def claims(engine: str, stage: int) -> Capabilities:
    found = engines.capabilities(engine, stage)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("feature", "stage", "last_without", "first_with"),
    [
        (Feature.AUTOCAST, 2, "0.17.1", "0.17.2"),
        (Feature.AUTOCAST_SCALER, 1, "0.16.4", "0.17.2"),
        (Feature.AUTOCAST_SCALER, 0, "0.17.6", "0.18.0"),
        (Feature.TENSOR_BACKWARD, 3, "0.18.2", "0.18.3"),
        (Feature.MASTERS, 2, "0.18.2", "0.18.3"),
        (Feature.SCALE_BACKWARD, 1, "0.18.2", "0.18.3"),
        (Feature.SUM, 0, "0.19.5", "0.19.6"),
    ],
)
def test_a_feature_is_refused_before_the_release_that_added_it(
    feature: Feature, stage: int, last_without: str, first_with: str
) -> None:
    refusal = claims(f"deepspeed=={last_without}", stage).refusal(feature)
    assert refusal is not None
    assert f"DeepSpeed {last_without} has no " in refusal
    assert f"{first_with} added it" in refusal
    assert claims(f"deepspeed=={first_with}", stage).refusal(feature) is None


def test_a_release_claims_the_axes_and_the_words_of_a_plan_that_it_has() -> None:
    axes = {release: set(claims(f"deepspeed=={release}", 1).mesh_axes) for release in ("0.16.9", "0.18.5", "0.18.6")}
    assert axes == {"0.16.9": {"ep"}, "0.18.5": {"ep", "cp"}, "0.18.6": {"ep", "cp", "tp"}}
    gathers = [
        "colwise_gather_output" in claims(f"deepspeed=={release}", 1).plan_words for release in ("0.19.3", "0.19.4")
    ]
    assert gathers == [False, True]


def test_the_newest_release_lacks_nothing_that_is_listed() -> None:
    newest = max(ADDITIONS, key=lambda addition: tuple(map(int, addition.first_release.split("."))))
    for stage in range(4):
        restricted = capabilities_of_release(stage, newest.first_release)
        assert restricted.refuses == capabilities_at(stage).refuses
        assert not restricted.unknown_options


def test_what_every_release_refuses_keeps_its_own_reason() -> None:
    assert "stage 3" in str(claims("deepspeed==0.16.4", 3).refusal(Feature.SUM))
    assert "stage 0" in str(claims("deepspeed==0.16.4", 0).refusal(Feature.TENSOR_BACKWARD))


@pytest.mark.parametrize("version", ["(no release)", "", "0.19.6.dev1+gabc", "0.19.6rc1"])
def test_a_build_of_the_next_release_or_of_none_has_everything(version: str) -> None:
    assert capabilities_of_release(1, version).refusal(Feature.SUM) is None


def test_exact_scenarios_use_the_mean_where_a_release_ignores_the_sum() -> None:
    reductions = [
        choose_exact_reduction(Reduction.SUM, 2, claims(f"deepspeed=={release}", 1)) for release in ("0.19.5", "0.19.6")
    ]
    assert reductions == [Reduction.MEAN, Reduction.SUM]


def test_an_option_with_a_key_that_a_release_does_not_know_is_absent_there() -> None:
    named = {
        "summed": EngineOption({"gradient_allreduce_op": "sum"}),
        "cast": EngineOption({"torch_autocast": {"enabled": True}}),
        "aligned": EngineOption({"zero_optimization": {"parameter_alignment": True}}),
        "plain": EngineOption({"zero_optimization": {"overlap_comm": True}}),
    }
    options = restrict_to_release(replace(capabilities_at(1), variants=named), "0.19.5", 1).engine_options
    assert {name: bool(option.absent) for name, option in options.items()} == {
        "summed": True,
        "cast": False,
        "aligned": True,
        "plain": False,
    }
    assert "0.19.6 added it" in options["summed"].absent


def test_a_configuration_file_with_such_a_key_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"torch_autocast": {"enabled": True, "dtype": "bf16"}}))
    request = Request(("training.grads",), ("deepspeed==0.16.4",), (1,), models=("mlp",), engine_variant=str(path))
    (old,) = plan(request, claims)
    assert "DeepSpeed 0.16.4 has no section torch_autocast; 0.17.2 added it" in old.unsupported_reason
    (new,) = plan(replace(request, engines=("deepspeed==0.19.8",)), claims)
    assert new == PlannedCell(new.cell)


def test_an_assertion_of_initialize_is_the_engine_s_crash() -> None:
    ours = str(Path(engines.__file__).parent / "deepspeed.py")
    assert verdict_of_exception("zharness.errors.EngineRefusal", ours) is Verdict.CRASH
    assert verdict_of_exception("zharness.errors.ConfigError", ours) is Verdict.ERROR


def test_a_remedy_that_a_release_lacks_is_said_to_be_lacking() -> None:
    entry = ExpectedFailure("deepspeed", "training", "documented", "because", "fail", ("alone",), remedy=COALESCE)
    cell = Cell("training.grads", "deepspeed==0.18.8", 1, 2, "fp32", "mlp")
    failed = Record(
        cell, 0, Verdict.FAIL, "0.18.8", "2.13.0", cause="micro-batch 2 alone", expected_failure="documented"
    )
    lacking = claims("deepspeed==0.18.8", 1).unknown_option(COALESCE)
    noted = apply_lacking_remedy(failed, entry, lacking)
    assert (noted.verdict, noted.expected_failure, noted.is_expected) == (Verdict.FAIL, "documented", True)
    assert "micro-batch 2 alone; the remedy" in noted.cause
    assert "DeepSpeed 0.18.8 has no coalesce_grad_reduction(); 0.19.1 added it" in noted.cause
    assert not claims("deepspeed==0.19.1", 1).unknown_option(COALESCE)


def test_stage_3_refuses_every_stand_in_of_cp_but_similar() -> None:
    names = (name for name, spec in MODELS.items() if name == f"{spec.stands_in_for}_context")
    assert {*STAND_INS_ON_CP} == {*names} - {"similar_context"}
