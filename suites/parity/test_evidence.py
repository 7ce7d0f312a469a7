"""The report of a failing cell: error over the tensor and its shards, distances from float64, layers and curves."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zharness.engines import Piece
from zharness.errors import EngineContractError, HarnessFault, UsageError
from zharness.kill_matrix import MutantRunner, make_target_cell
from zharness.law_kit.default_training import DEFAULT_TRAINING
from zharness.laws import LAWS
from zharness.mutants import MUTANTS
from zharness.parity import Comparison, Part, compare_bitwise, compare_within_bound, snapshot
from zharness.parity.compare import attach_plain_values
from zharness.parity.comparison import TensorLocation
from zharness.parity.contamination import read_process_conditions
from zharness.parity.mismatch_report import (
    HEAT_MAP_COLUMNS,
    HEAT_MAP_ROWS,
    MAX_LAYERS,
    MismatchReport,
    build_heat_map,
    build_mismatch_report,
    round_for_json,
    round_ratio,
)
from zharness.parity.ulps import CLASS_LABELS, count_ulp_classes, ulp_distances
from zharness.run import PlannedCell, Record, observe_and_judge
from zharness.run.record import parse_record
from zharness.workload import model_spec

LARGEST = 12 << 10  # characters of one cell's evidence
PIECES = (Piece(0, 0, 4), Piece(1, 4, 6))
PLACE = TensorLocation("b", Part.REDUCTION, step=2, pieces=PIECES)


def comparison(name: str, wrong: float = 0.0, part: Part = Part.REDUCTION, step: int = 2) -> Comparison:
    """Compare six ones with six ones of which the last is off by ``wrong`` bounds."""
    expected, bound = torch.ones(6, dtype=torch.float64), torch.full((6,), 2.0**-10, dtype=torch.float64)
    actual = torch.ones(6)
    actual[5] += wrong * 2.0**-10
    return compare_within_bound(replace(PLACE, name=name, part=part, step=step), expected, actual, bound)


def shown(
    seen: list[Comparison], coming: list[Comparison] | Iterator[Comparison] = (), names: str = "abcd"
) -> MismatchReport:
    found = build_mismatch_report(seen, iter(coming), list(names), {})
    assert found is not None
    return found


def test_what_passes_keeps_no_numbers() -> None:
    passed = attach_plain_values(comparison("a"), lambda: pytest.fail("nobody asks what plain torch gives"))
    assert passed.mismatch_tensors is None
    assert passed.location is not None
    assert compare_bitwise(PLACE, torch.ones(2), torch.ones(2)).location is PLACE


def test_the_first_mismatch_is_shown_in_the_shards_of_its_owners() -> None:
    found = shown([comparison("a"), comparison("b", wrong=8.0)])
    assert (found["parameter"], found["part"], found["step"], found["shape"]) == ("b", "reduction", 2, [6])
    assert found["heat"] == {"rows": 1, "columns": 6, "block": [1, 1], "values": [[0, 0, 0, 0, 0, 8]]}
    assert found["shards"] == [{"rank": 0, "start": 0, "stop": 4}, {"rank": 1, "start": 4, "stop": 6}]
    assert found["curves"] == {}


def test_layers_are_those_of_the_same_step_and_part_in_order_of_depth() -> None:
    earlier = [comparison("d", step=1, wrong=0.5), comparison("a", part=Part.FORWARD)]
    later = [comparison("c/exp_avg", wrong=4.0), comparison("c", wrong=0.25), comparison("d", part=Part.GATHER)]
    found = shown([*earlier, comparison("b", wrong=0.5), comparison("b", wrong=8.0)], [*later, comparison("a")])
    assert found["layers"] == [{"name": "b", "ratio": 8}, {"name": "c", "ratio": 4}]


def test_what_the_judge_raises_after_a_mismatch_is_no_news() -> None:
    def coming() -> Iterator[Comparison]:
        yield comparison("c", wrong=2.0)
        raise ZeroDivisionError

    assert shown([comparison("b", wrong=8.0)], coming())["layers"] == [
        {"name": "b", "ratio": 8},
        {"name": "c", "ratio": 2},
    ]


def test_a_loss_has_no_layers_and_nothing_has_no_baseline_that_the_judge_cannot_tell() -> None:
    found = shown([compare_bitwise(TensorLocation("loss", Part.FORWARD), torch.tensor(1.0), torch.tensor(2.0))])
    assert found["layers"] is None
    assert found["shards"] is None
    assert found["heat"] == {"rows": 1, "columns": 1, "block": [1, 1], "values": [["inf"]]}
    assert found["ulps"] == {"edges": CLASS_LABELS, "engine": [0] * 22 + [1], "baseline": []}


def test_plain_torch_that_cannot_step_from_a_wrong_state_leaves_the_rest_to_be_seen() -> None:
    def plain() -> torch.Tensor:
        raise KeyError("exp_avg_sq")

    found = shown([attach_plain_values(comparison("b", wrong=8.0), plain)])
    assert found["heat"]
    assert found["ulps"]
    assert found["ulps"]["baseline"] == []


def test_curves_that_cannot_be_told_leave_the_rest_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unrecorded(ctx: object, run: object) -> None:
        raise EngineContractError("nothing was recorded under 'loss' at step 0")

    monkeypatch.setattr(observe_and_judge, "build_curves", unrecorded)
    law = next(law for law in LAWS.values() if all(variant.training_run for variant in law.variants))
    for variant in law.variants:
        ctx = SimpleNamespace(variant=variant.name, training=DEFAULT_TRAINING)
        assert observe_and_judge.training_curves(ctx, law) == {}


def test_a_record_on_a_full_disk_raises_and_does_not_end_the_process() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        snapshot.EvidenceWriter(Full()).write_snapshot("params", 0, {"weight": torch.ones(3)})


def test_a_rank_that_ends_half_way_leaves_no_records_of_the_cell_before(tmp_path: Path) -> None:
    before = snapshot.open_evidence_writer(tmp_path, 0)
    before.write_snapshot("old", 0, {"weight": torch.ones(3)})
    before.finish({}, read_process_conditions())
    assert [each.label for each in snapshot.read_evidence(tmp_path, 0).snapshots] == ["old"]
    snapshot.open_evidence_writer(tmp_path, 0).write_snapshot("new", 0, {"weight": torch.ones(3)})
    with pytest.raises(HarnessFault, match="rank 0 ended before it finished its evidence file"):
        snapshot.read_evidence(tmp_path, 0)


def test_of_many_layers_the_worst_of_neighbours_stands_for_them() -> None:
    names = [f"layers.{index}" for index in range(2 * MAX_LAYERS)]
    found = build_mismatch_report(
        [comparison(name, wrong=2.0 * (name == names[-2])) for name in names[:-1]], iter(()), names, {}
    )
    assert found is not None
    assert found["layers"] is not None
    assert len(found["layers"]) == MAX_LAYERS
    assert found["layers"][-1] == {"name": names[-2], "ratio": 2}


@pytest.mark.parametrize("shape", [(), (1,), (5,), (100_003,), (3, 1000), (999, 7), (64, 3, 5, 5)])
def test_no_error_is_lost_in_a_heat_map_and_none_is_added(shape: tuple[int, ...]) -> None:
    ratio = torch.zeros(shape, dtype=torch.float64)
    ratio.view(-1)[-1] = 5.0
    found = build_heat_map(ratio)
    values = found["values"]
    assert (len(values), {len(row) for row in values}) == (found["rows"], {found["columns"]})
    assert found["rows"] <= HEAT_MAP_ROWS
    assert found["columns"] <= HEAT_MAP_COLUMNS
    assert values[-1][-1] == 5
    assert sum(value == 0 for row in values for value in row) == found["rows"] * found["columns"] - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_distances_are_counted_in_the_last_place_of_the_engine_s_dtype(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    held = torch.tensor([1, 1 + eps, 1 + 4 * eps, math.nan, math.inf, -1e3], dtype=dtype)
    counts = dict(zip(CLASS_LABELS, count_ulp_classes(torch.ones(6, dtype=torch.float64), held), strict=True))
    assert (counts["0"], counts["1"], counts["3-4"], sum(counts.values())) == (1, 1, 1, 6)
    assert counts[">2^20"] >= 2


def test_numbers_of_unlike_sign_are_as_far_apart_as_both_from_zero() -> None:
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert float(ulp_distances(largest, -largest)) == 2 * float(ulp_distances(largest, torch.zeros_like(largest)))
    assert float(ulp_distances(torch.tensor([7]), torch.tensor([-2]))) == 9


@pytest.mark.parametrize(
    ("value", "written"), [(0.0, "0"), (1234.5, "1230"), (0.012345, "0.0123"), (1e300, "1e+300"), (math.inf, '"inf"')]
)
def test_a_number_takes_few_characters(value: float, written: str) -> None:
    assert json.dumps(round_for_json(value, 3)) == written


def test_what_is_just_beyond_the_bound_is_not_rounded_to_it() -> None:
    assert [round_ratio(ratio, 3) for ratio in (0.9999, 1.0, 1.0 + 1e-9, math.inf)] == [1, 1, 1.01, "inf"]


@pytest.fixture(scope="module")
def runner() -> Iterator[MutantRunner]:
    with MutantRunner(timeout=60.0) as started:
        yield started


def collect_evidence(runner: MutantRunner, mutant: str, check: str) -> tuple[Record, MismatchReport]:
    """Return the record of the mutant in its first target of ``check``, and its evidence."""
    target = next(target for target in MUTANTS[mutant].targets if target.law == check)
    record = runner.run(PlannedCell(make_target_cell(MUTANTS[mutant], target)))
    assert record.evidence is not None, record
    assert len(json.dumps(record.evidence)) <= LARGEST
    return record, record.evidence


def distances(counts: list[int]) -> int:
    """Return the last class that has an element."""
    return max(index for index, count in enumerate(counts) if count)


def test_a_shard_that_was_not_updated_shows_as_that_shard_alone(runner: MutantRunner) -> None:
    _, found = collect_evidence(runner, "drops_the_short_shard", "training.sgd_step")
    assert found["parameter"] == "first.bias"
    assert found["heat"]
    assert found["shards"]
    (row,) = found["heat"]["values"]
    wrong = {index for index, value in enumerate(row) if float(value) > 1}
    (short,) = (shard for shard in found["shards"] if shard["rank"] == 1)
    assert wrong
    assert wrong <= set(range(short["start"], short["stop"]))


def test_a_wrong_factor_shows_in_every_element_and_every_layer(runner: MutantRunner) -> None:
    record, found = collect_evidence(runner, "a_ten_thousandth_too_much", "training.grads")
    assert found["heat"]
    assert found["layers"]
    assert found["ulps"]
    assert all(float(value) > 1 for row in found["heat"]["values"] for value in row)
    assert [layer["name"] for layer in found["layers"]] == [n for n, _ in model_spec("mlp").model(0).named_parameters()]
    assert all(float(layer["ratio"]) > 1 for layer in found["layers"])
    assert distances(found["ulps"]["baseline"]) < distances(found["ulps"]["engine"])
    assert sum(found["ulps"]["baseline"]) == sum(found["ulps"]["engine"]) == math.prod(found["shape"])
    line = json.dumps(record.as_json(), allow_nan=False)
    assert parse_record(line).evidence == found


def test_gradients_that_are_judged_all_at_once_show_every_layer_beside_what_torch_s_kernels_give(
    runner: MutantRunner,
) -> None:
    record, found = collect_evidence(runner, "a_ten_thousandth_too_much", "training.kernels")
    assert record.tier == "C"
    assert found["layers"]
    assert found["ulps"]
    assert [layer["name"] for layer in found["layers"]] == [n for n, _ in model_spec("mlp").model(0).named_parameters()]
    assert sum(found["ulps"]["baseline"]) == sum(found["ulps"]["engine"])
    assert distances(found["ulps"]["baseline"]) <= distances(found["ulps"]["engine"])


def test_a_training_shows_how_it_went_beside_plain_torch(runner: MutantRunner) -> None:
    _, found = collect_evidence(runner, "forgets_weight_decay", "training.trajectory")
    assert found["parameter"].endswith("/momentum_buffer")
    assert found["shards"], "FSDP2 shards the state of a weight as the weight"
    assert {shard["rank"] for shard in found["shards"]} == {0, 1}
    assert found["ulps"]
    assert distances(found["ulps"]["baseline"]) < distances(found["ulps"]["engine"])
    assert found["curves"].keys() == {"loss", "norm"}
    for curve in found["curves"].values():
        assert len(curve["engine"]) == len(curve["baseline"]) == 3
        assert curve["engine"][-1] != curve["baseline"][-1]


def test_a_record_of_before_there_was_evidence_is_read_and_another_form_is_refused(runner: MutantRunner) -> None:
    record, _ = collect_evidence(runner, "drops_the_short_shard", "training.sgd_step")
    plain = record.as_json()
    del plain["evidence"]
    assert parse_record(json.dumps(plain)).evidence is None
    with pytest.raises(UsageError, match=r"evidence is .*'heat.*; expected MismatchReport"):
        parse_record(json.dumps({**plain, "evidence": {"heat": 1}}))
