"""Cell ids, plans, expected failures and records: each is parsed from what was written; wrong input is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zharness import engines
from zharness.cell import Cell
from zharness.engines import Capabilities, Feature, Reduction
from zharness.errors import UsageError
from zharness.law_kit.scenarios import choose_exact_reduction
from zharness.laws import LAWS
from zharness.parity import Mismatch, Part, Tier
from zharness.plugin import pytest_collection_modifyitems
from zharness.report.failures import render_failures, render_summary
from zharness.report.matrix import render_matrix
from zharness.report.sensitivity import render_sensitivity
from zharness.run import PlannedCell, Record, Request, Verdict, plan
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.mesh_claims import needs_mesh
from zharness.run.observe_and_judge import Judgement
from zharness.run.outcomes import records_exit_code
from zharness.run.plan import shuffle_cells
from zharness.run.record import open_record_file, parse_record
from zharness.run.record_reader import load_records
from zharness.run.verdicts import apply_expected_failure, apply_remedy, conclude_judgement, verdict_of_exception

CELL = Cell("training.trajectory", "reference", 3, 2, "fp32", "mlp", "adamw")


def claims(engine: str, stage: int) -> Capabilities:
    found = engines.capabilities(engine, stage)
    assert found is not None
    return found


def record(verdict: Verdict = Verdict.PASS, **fields: object) -> Record:
    return replace(Record(CELL, 0, verdict, "1.0", "2.13.0"), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        CELL,
        Cell("training.grads", "my_package.my_module:factory", 0, 16, "bf16", "exact"),
        Cell("torch_func.vmap_grad", "deepspeed==0.19.8", 3, 2, "fp32", "conv"),
        Cell("training.trajectory", "deepspeed==1.0+cpu", 3, 2, "fp32", "conv", "sgd", "tiny_buckets"),
    ],
)
def test_a_cell_is_parsed_from_its_id(case: Cell) -> None:
    assert Cell.parse(case.id) == case


@pytest.mark.parametrize("text", ["", "training.grads", "training.grads[reference-w2-fp32-mlp]", "a[b]"])
def test_an_invalid_cell_id_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a cell id.*for example"):
        Cell.parse(text)


def test_the_seed_follows_from_the_cell_and_is_shared_by_engines_and_stages() -> None:
    assert CELL.seed() == Cell.parse(CELL.id).seed()
    assert replace(CELL, engine="ddp", stage=0).seed() == CELL.seed()
    assert len({CELL.seed(), CELL.seed(1), replace(CELL, model="conv").seed(), replace(CELL, world_size=4).seed()}) == 4


def test_the_default_plan_has_every_law_at_every_stage_and_each_cell_once() -> None:
    cells = plan(Request(), claims)
    # Laws without models apply only to users' models, and laws of a mesh need --mesh.
    workload_laws = [name for name, law in LAWS.items() if law.models and not needs_mesh(law)]
    assert {(cell.cell.law, cell.cell.stage) for cell in cells} == {
        (name, s) for name in workload_laws for s in range(4)
    }
    assert len({cell.cell.id for cell in cells}) == len(cells)
    unclaimed = {feature.value for stage in range(4) for feature in claims("reference", stage).refuses}
    claimed = [cell for cell in cells if not any(feature in cell.unsupported_reason for feature in unclaimed)]
    form = claims("reference", 0).form
    laws = {name: law for name, law in LAWS.items() if law.form is form}
    stated = [cell for cell in claimed if cell.cell.law in laws and cell.cell.dtype in laws[cell.cell.law].dtypes]
    assert not [cell for cell in stated if cell.unsupported_reason], "the reference engine claims the rest"


def test_a_refused_feature_becomes_a_reason_before_anything_runs() -> None:
    cells = plan(Request(patterns=("state.universal",), engines=("ddp",)), claims)
    reason = claims("ddp", 0).refusal(Feature.UNIVERSAL_CHECKPOINT)
    assert reason
    assert all(reason in cell.unsupported_reason for cell in cells)


def test_an_engine_with_its_own_kernels_is_judged_on_exact_models_and_by_laws_that_tolerate_them() -> None:
    def claimed(cell: PlannedCell) -> bool:
        return "does not claim" not in cell.unsupported_reason

    cells = plan(Request(patterns=("training",), engines=("deepspeed",), stages=(3,)), claims)
    runs = {(cell.cell.law, cell.cell.model) for cell in cells if not cell.unsupported_reason}
    exact = {(f"training.{name}", "exact") for name in ("grads", "one_hot_rank", "accumulation", "config_invariance")}
    calibrated = {("training.kernels", "mlp"), ("training.kernels", "transformer")}
    own_numbers = (
        "optimizers",
        "optimizer_options",
        "caller_modes",
        "calls_under_modes",
        "sgd_step",
        "ranks_agree",
        "clip_and_norm",
        "clip_wide",
        "looked_at",
    )
    own = {*((f"training.{name}", "mlp") for name in own_numbers), ("training.buffers", "stateful")}
    exact |= {("training.muon", "matrices"), ("training.muon", "dense_matrices")}
    of_both = {(f"training.{name}", "transformer") for name in ("sgd_step", "clip_and_norm")}
    assert runs == exact | calibrated | own | of_both
    of_dtype = [cell for cell in cells if "applies only to the dtypes" not in cell.unsupported_reason]
    left_out = [cell for cell in of_dtype if cell.unsupported_reason and claimed(cell)]
    assert all("can judge kernels other than torch's" in cell.unsupported_reason for cell in left_out)


@pytest.mark.parametrize(("world_size", "runs"), [(2, True), (3, False), (4, True)])
def test_a_law_that_needs_an_exact_sum_is_not_judged_by_the_mean_over_three_ranks(world_size: int, runs: bool) -> None:
    def mean_alone(engine: str, stage: int) -> Capabilities:
        claimed = claims(engine, stage)
        return replace(claimed, refuses={**claimed.refuses, Feature.SUM: "it averages"})

    request = Request(patterns=("double_backward.weight_penalty",), stages=(3,), world_sizes=(world_size,))
    cells = plan(request, mean_alone)
    (reduced,) = (cell for cell in cells if cell.cell.variant == "reduced")
    assert (not reduced.unsupported_reason) is runs
    assert runs or "has no exact sum: it averages" in reduced.unsupported_reason
    assert not any(cell.unsupported_reason for cell in plan(request, claims) if cell.cell.variant == "reduced")


def test_a_shuffled_plan_has_the_same_cells_and_follows_from_its_seed() -> None:
    cells = plan(Request(patterns=("training",)), claims)
    assert shuffle_cells(cells, 1) == shuffle_cells(cells, 1)
    assert shuffle_cells(cells, 1) != shuffle_cells(cells, 2)
    assert set(shuffle_cells(cells, 1)) == set(cells)


def test_the_option_shuffle_runs_tests_in_another_order() -> None:
    def order(seed: int | None) -> list[Any]:
        items: list[Any] = list(range(20))
        pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: seed), items)  # type: ignore[arg-type]
        return items

    assert order(None) == list(range(20))
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(20))


def test_a_cell_id_plans_one_cell_which_has_to_exist() -> None:
    (cell,) = plan(Request(patterns=(CELL.id,)), claims)
    assert cell.cell == CELL
    with pytest.raises(UsageError, match="unknown variant"):
        plan(Request(patterns=(replace(CELL, variant="lion").id,)), claims)
    with pytest.raises(UsageError, match="unknown model for"):
        plan(Request(patterns=(Cell("torch_func.grad", "reference", 0, 2, "fp32", "transformer").id,)), claims)
    with pytest.raises(UsageError, match="stage of engine 'ddp'"):
        plan(Request(patterns=(replace(CELL, engine="ddp").id,)), claims)


def test_a_dtype_that_is_not_claimed_is_unsupported() -> None:
    cells = plan(Request(patterns=("training.grads",), engines=("ddp",), dtypes=("bf16",)), claims)
    assert all("supports only the dtypes fp32" in cell.unsupported_reason for cell in cells)

    def generous(engine: str, stage: int) -> Capabilities:
        return Capabilities(stages=frozenset(range(4)), dtypes=frozenset({"fp32", "bf16"}))

    assert not any(
        cell.unsupported_reason for cell in plan(Request(patterns=("training.grads",), dtypes=("bf16",)), generous)
    )


def test_no_cell_of_an_engine_runs_if_this_torch_cannot_build_it() -> None:
    def absent(engine: str, stage: int) -> Capabilities:
        return replace(claims(engine, stage), absent="torch 2.4.1 has no public fully_shard; take torch 2.6 or newer")

    cells = plan(Request(patterns=("training", "state")), absent)
    assert {cell.unsupported_reason for cell in cells} == {
        "reference cannot be built: torch 2.4.1 has no public fully_shard; take torch 2.6 or newer"
    }


def test_a_law_that_chooses_its_dtypes_itself_has_no_cells_in_another() -> None:
    cells = plan(Request(patterns=("precision",), dtypes=("fp32", "bf16")), claims)
    low = ("precision.output_containers", "precision.frozen_masters")  # these run in the dtype of the cell
    own = [cell for cell in cells if cell.cell.law not in low]
    assert {cell.cell.dtype for cell in own if not cell.unsupported_reason} == {"fp32"}
    assert any("applies only to the dtypes fp32" in cell.unsupported_reason for cell in cells)


def test_a_plain_backward_is_unsupported_for_a_dtype_that_needs_a_loss_scale() -> None:
    law = "double_backward.retained_then_zero_grad"
    cells = plan(Request(patterns=(law,), dtypes=("bf16", "fp16"), models=("mlp",)), claims)
    refused = {(cell.cell.dtype, cell.cell.variant) for cell in cells if cell.unsupported_reason}
    assert refused == {("fp16", "tensor")}


def test_an_engine_variant_is_planned_at_the_stages_that_have_it() -> None:
    def named(engine: str, stage: int) -> Capabilities:
        return replace(claims(engine, 3), variants={"prefetch": {"depth": 2}} if stage == 3 else {})

    cells = plan(Request(("training.grads",), models=("mlp",), engine_variant="prefetch"), named)
    assert [cell.cell.id for cell in cells if not cell.unsupported_reason] == [
        "training.grads[reference{prefetch}-zero3-w2-fp32-mlp]"
    ]
    assert "reference has no variant prefetch at stage 0" in cells[0].unsupported_reason
    with pytest.raises(UsageError, match=r"unknown variant of engine 'reference': 'nothing'; allowed: prefetch"):
        plan(Request(engine_variant="nothing"), named)


def test_a_request_without_any_cell_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to run"):
        plan(Request(patterns=("torch_func",), models=("transformer",)), claims)


MISMATCH = Mismatch(1, Part.OPTIMIZER, "a.b", (0, 1), 1, 2, 0, 1.0, math.nan, 0.0, -1, 3, 4, "a hint")


def test_a_record_is_parsed_from_its_json_line(tmp_path: Path) -> None:
    written = record(
        Verdict.FAIL,
        tier="S",
        ratio=math.inf,
        smallest_scale_error=1e-7,
        wrong_elements=3,
        elements=40,
        undetermined=2,
        notes=("why",),
        divergence=MISMATCH,
        module_departures="first in forward order: first",
        cause=MISMATCH.describe(),
        seconds=1.5,
    )
    with open_record_file(tmp_path / "r.jsonl") as file:
        file.add(written)
        assert not (tmp_path / "r.jsonl").exists(), "it gets its name when it is complete"
    (found,) = load_records([tmp_path / "r.jsonl"]).records
    assert found.as_json() == written.as_json()
    assert found.divergence is not None
    assert math.isnan(found.divergence.actual)
    line = json.loads((tmp_path / "r.jsonl").read_text())
    wanted = (
        "case check model variant engine engine_version torch_version stage world_size dtype seed verdict excuse tier"
    )
    sensitivity = "ratio smallest wrong_elements elements undetermined notes"
    assert set(f"{wanted} {sensitivity} divergence cause seconds command schema".split()) <= set(line)


def test_an_interrupted_run_keeps_its_finished_records_under_the_final_name(tmp_path: Path) -> None:
    def interrupted() -> None:
        with open_record_file(tmp_path / "r.jsonl") as file:
            file.add(record())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(load_records([tmp_path / "r.jsonl"]).records) == 1


@pytest.mark.parametrize("line", ["", "{}", "not json", '{"schema": 99}', '{"schema": 1, "case": "nonsense"}'])
def test_a_line_that_is_not_a_record_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        parse_record(line)


EXCUSE = ExpectedFailure(
    "reference", "training", "upstream#1", "because", "fail", ("step 1, optimizer",), "<2", location="reference.toml:7"
)


def test_an_expected_failure_covers_the_cells_that_it_names_if_they_fail_as_expected() -> None:
    assert EXCUSE.covers_cell(CELL, "1.0")
    assert not EXCUSE.covers_cell(CELL, "2.0")
    assert not EXCUSE.covers_cell(replace(CELL, engine="ddp"), "1.0")
    assert not replace(EXCUSE, stages=(1,)).covers_cell(CELL, "1.0")
    assert not replace(EXCUSE, variants=("sgd",)).covers_cell(CELL, "1.0")
    as_expected = apply_expected_failure(record(Verdict.FAIL, cause=MISMATCH.describe()), EXCUSE)
    assert (as_expected.expected_failure, as_expected.is_expected) == ("upstream#1", True)
    elsewhere = apply_expected_failure(record(Verdict.CRASH, cause="SIGSEGV", details=MISMATCH.describe()), EXCUSE)
    assert not elsewhere.expected_failure, "details do not count without the signature in the cause"
    hung = apply_expected_failure(record(Verdict.HANG, cause=MISMATCH.describe()), EXCUSE)
    assert not hung.expected_failure, "another verdict is another failure"
    otherwise = apply_expected_failure(record(Verdict.CRASH, cause="rank 0 raised: something else"), EXCUSE)
    assert (otherwise.expected_failure, otherwise.is_expected) == ("", False)


def test_an_expected_failure_that_passes_is_stale_and_fails_the_run() -> None:
    stale = apply_expected_failure(record(), EXCUSE)
    assert "the law holds, but was expected to fail" in stale.stale_reason
    assert not stale.is_expected
    assert records_exit_code([stale]) == 1
    assert "narrow or delete the entry reference.toml:7" in render_failures([stale])


def test_a_failure_of_the_harness_is_never_expected_and_never_stale() -> None:
    failed = apply_expected_failure(record(Verdict.ERROR, cause=MISMATCH.describe()), EXCUSE)
    assert (failed.expected_failure, failed.stale_reason, records_exit_code([failed])) == ("", "", 3)


def test_a_documented_difference_is_a_contract_only_when_its_remedy_passes() -> None:
    documented = replace(EXCUSE, documented="https://example.org/doc", remedy={"grouping": "root"})
    failed = apply_expected_failure(record(Verdict.FAIL, cause=MISMATCH.describe()), documented)
    contract = apply_remedy(failed, documented, record(Verdict.PASS))
    assert (contract.verdict, contract.documentation_url, contract.is_expected) == (
        Verdict.CONTRACT,
        "https://example.org/doc",
        True,
    )
    without_effect = apply_remedy(failed, documented, record(Verdict.FAIL, cause="still wrong"))
    assert (without_effect.verdict, without_effect.is_expected) == (Verdict.FAIL, False)
    assert "the documented remedy" in without_effect.cause
    assert without_effect.notes[-1].startswith("without the remedy: fail: ")
    crashed = apply_remedy(
        failed, documented, record(Verdict.CRASH, cause="another bug"), replace(documented, upstream="x")
    )
    assert (crashed.verdict, crashed.is_expected, crashed.expected_failure) == (Verdict.CRASH, True, "x")


def test_a_cell_with_most_elements_undetermined_does_not_pass() -> None:
    found = Judgement(3, Tier.STAGED, 0.1, 1e-2, None, elements=10, undetermined=5, wrong_elements=4)
    assert conclude_judgement(found) == (Verdict.PASS, "")
    verdict, cause = conclude_judgement(replace(found, undetermined=6))
    assert verdict is Verdict.UNDETERMINED
    assert "6 of 10 elements are smaller than the bound" in cause
    assert conclude_judgement(replace(found, undetermined=6, mismatch=MISMATCH))[0] is Verdict.FAIL
    undetermined = record(verdict, cause=cause)
    assert records_exit_code([undetermined]) == 1
    assert "UNDETERMINED" in render_failures([undetermined])


def test_the_least_sensitive_cell_decides_which_errors_all_cells_would_find() -> None:
    sharp = record(tier="X", ratio=0.0, smallest_scale_error=1e-7, wrong_elements=1, elements=10, undetermined=0)
    blunt = record(
        tier="S",
        ratio=0.4,
        smallest_scale_error=1e-3,
        wrong_elements=6,
        elements=90,
        undetermined=5,
        notes=("why",),
    )
    message = render_sensitivity([sharp, blunt, record(Verdict.UNSUPPORTED)])
    assert "1 cell by tier X, 1 cell by tier S; the largest error is 0.4 of its bound" in message
    assert "a scale error of 1.0e-03" in message
    assert "6 lost elements" in message
    assert "5 of 100 elements are undetermined, that is smaller than their bound\n" in message
    assert "NOTE 1 cell: why" in message
    assert "tier C" not in message
    for words in ("tier X: all sums are exact", "tier S: each part", "a scale error is"):
        assert words in message


def test_an_exception_is_the_engine_s_or_the_harness_s_by_the_file_that_raised_it() -> None:
    package = Path(engines.__file__).parents[1]
    assert verdict_of_exception("builtins.IndexError", "/site-packages/deepspeed/engine.py") is Verdict.CRASH
    assert verdict_of_exception("builtins.IndexError", str(package / "reference" / "engine.py")) is Verdict.CRASH
    assert verdict_of_exception("builtins.RuntimeError", str(package / "workload" / "nets.py")) is Verdict.CRASH
    assert (
        verdict_of_exception("builtins.AttributeError", str(package / "law_kit" / "rank_context.py")) is Verdict.ERROR
    )
    assert (
        verdict_of_exception("zharness.errors.EngineContractError", str(package / "law_kit" / "rank_context.py"))
        is Verdict.FAIL
    )


def test_the_exit_code_of_several_records() -> None:
    assert records_exit_code([record()]) == 0
    assert records_exit_code([record(Verdict.UNSUPPORTED), record(Verdict.CONTRACT)]) == 0
    assert records_exit_code([record(Verdict.CRASH, expected_failure="upstream#1")]) == 0
    assert records_exit_code([record(), record(Verdict.HANG)]) == 1
    assert records_exit_code([record(Verdict.FAIL), record(Verdict.ERROR)]) == 3


def test_the_report_shows_the_matrix_the_failure_and_the_command() -> None:
    failed = record(Verdict.FAIL, cause=MISMATCH.describe(), divergence=MISMATCH)
    assert "fail 1, pass 1" in render_matrix([record(), failed])
    message = render_failures([record(), failed])
    assert MISMATCH.describe() in message
    assert f"again: zharness check '{CELL.id}'" in message
    assert render_summary([record(), failed], 2.0) == "2 cells in 2.0 s: 1 fail, 1 pass"


@pytest.mark.parametrize(
    ("engine", "world_size", "reduction"),
    [("ddp", 2, Reduction.SUM), ("ddp", 3, Reduction.MEAN), ("reference", 3, Reduction.SUM)],
)
def test_what_an_engine_sums_by_averages_is_held_to_the_exact_sum_of_a_power_of_two_of_ranks_alone(
    engine: str, world_size: int, reduction: Reduction
) -> None:
    assert choose_exact_reduction(Reduction.SUM, world_size, claims(engine, 0)) is reduction
