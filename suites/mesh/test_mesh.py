"""Axes of a mesh are parsed and printed, ranks know their coordinates, and a bad mesh is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.engines.protocol import Piece
from zharness.engines.registry import capabilities
from zharness.errors import UsageError
from zharness.law_kit.judge_context import JudgeContext
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.parity import Part, compare_bitwise
from zharness.parity.baseline import Baseline
from zharness.parity.snapshot import RankEvidence
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.observe_and_judge import add_coordinates
from zharness.run.plan import Request, plan
from zharness.run.rank_pool import rank_pool
from zharness.run.record import Record, Verdict
from zharness.run.unmatched_failures import iter_covered_cells
from zharness.run.verdicts import make_failure_record
from zharness.workload import model_spec
from zharness.world import GroupOutcome, RankEnd, RankOutcome


def claims(engine: str, stage: int) -> Capabilities:
    """Return the claims of a built-in engine."""
    found = capabilities(engine, stage)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "label"), [("", ""), ("tp2", "tp2"), ("tp2,rep3", "rep3.tp2"), ("dp_replicate2.pp2", "pp2.rep2")]
)
def test_a_mesh_is_read_back_from_its_label(text: str, label: str) -> None:
    mesh = Mesh.parse(text)
    assert mesh.label == label
    assert Mesh.parse(label) == mesh


def test_ranks_of_a_tp_group_are_neighbours_and_share_a_micro_batch() -> None:
    mesh = Mesh.parse("tp2")
    assert [mesh.data_coordinate(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert mesh.describe_rank(2, 4) == "dp_shard 1, tp 0"
    assert mesh.world_size(mesh.data_size(4)) == 4


def test_replicas_of_the_data_get_micro_batches_of_their_own() -> None:
    mesh = Mesh.parse("rep2,tp2")
    assert [mesh.data_coordinate(rank, 8) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.coordinates(6, 8) == {"pp": 0, "dp_replicate": 1, "dp_shard": 1, "cp": 0, "tp": 0}


def test_a_cell_of_one_axis_keeps_its_id_and_seed() -> None:
    cell = Cell("training.grads", "fsdp2", 3, 2, "fp32", "exact")
    assert cell.id == "training.grads[fsdp2-zero3-w2-fp32-exact]"
    assert Cell.parse(cell.id) == cell
    assert cell.seed() == 1086039428


def test_a_cell_of_a_mesh_is_read_back_and_trains_the_numbers_of_its_data_size() -> None:
    cell = Cell("training.grads", "fsdp2", 3, 4, "fp32", "exact", "", "one_group", Mesh.parse("tp2"))
    assert cell.id == "training.grads[fsdp2{one_group}-zero3-w4.tp2-fp32-exact]"
    assert Cell.parse(cell.id) == cell
    assert cell.seed() == Cell("training.grads", "fsdp2", 3, 2, "fp32", "exact").seed()
    assert rank_pool(cell) != rank_pool(Cell("training.grads", "fsdp2", 3, 4, "fp32", "exact"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp", "expected an axis and its size"),
        ("tp0", "a size of 1 or more"),
        ("tp2,tp2", "each axis once"),
        ("width2", "unknown axis"),
        ("shard2", "leave it out"),
    ],
)
def test_a_bad_mesh_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Mesh.parse(text)


@pytest.mark.parametrize(
    ("engine", "mesh", "size", "model", "words"),
    [
        ("fsdp2", "tp2", 3, "exact", "which the world size 3 is not"),
        ("fsdp2", "tp4", 4, "mixing", "the 6 mixed samples of the model mixing cannot be split over tp4"),
        ("fsdp2", "tp3", 3, "heads", "heads of the model heads cannot be split over tp3"),
        ("torch_pp", "pp8", 8, "chain", "the model chain has no plan of 8 modules or more that pp can split"),
        ("deepspeed", "ep3", 3, "routed", "the 4 experts of the model routed cannot be split over ep3"),
        ("deepspeed", "ep2", 3, "routed", "the axis ep of the mesh ep2 has to divide the 3 ranks of dp_shard"),
        ("deepspeed", "ep2", 2, "exact", "the model exact has no layer of experts that ep splits"),
        ("fsdp2", "ep2", 2, "routed", "fsdp2 does not claim the axis ep"),
        ("deepspeed", "cp3", 3, "context", "the 4 tokens of a sequence of the model context cannot be split over cp3"),
        ("deepspeed", "cp4", 4, "context", "the 2 heads of the model context cannot be split over cp4"),
        ("deepspeed", "cp2", 2, "exact", "the model exact has no attention whose sequence cp splits"),
        ("fsdp2", "cp2", 2, "context", "fsdp2 does not claim the axis cp"),
        ("reference", "rep3", 4, "exact", "which the world size 4 is not"),
        ("trainer_ddp", "tp2", 2, "mlp", "trainer_ddp does not claim the axis tp"),
        ("fsdp2", "pp2", 4, "chain", "fsdp2 does not claim the axis pp"),
        ("ddp", "tp2", 4, "exact", "axes that it claims: none"),
        ("fsdp2", "tp2", 4, "conv", "the model conv has no plan"),
        ("torch_tp", "tp2", 4, "exact", "such as --mesh tp2 --world-size 2"),
        ("torch_tp", "", 2, "exact", "got torch_tp with no mesh on 2 ranks; expected a mesh that takes all ranks"),
        ("torch_pp", "", 2, "chain", "got torch_pp with no mesh; expected one such as --mesh pp2"),
        ("deepspeed_pp", "", 2, "chain", "which every law needs that calls train_batch"),
    ],
)
def test_a_mesh_that_cannot_run_is_refused_before_ranks_start(
    engine: str, mesh: str, size: int, model: str, words: str
) -> None:
    request = Request(("training.grads",), (engine,), (), (size,), models=(model,), mesh=Mesh.parse(mesh))
    with pytest.raises(UsageError, match=words):
        plan(request, claims)


@pytest.mark.parametrize(
    ("mesh", "size", "can_run"), [("", 2, True), ("rep2", 2, False), ("tp2", 2, False), ("rep2", 4, True)]
)
def test_an_option_that_divides_the_shards_needs_enough_of_them(mesh: str, size: int, can_run: bool) -> None:
    option = "resharded_to_two"
    patterns, axes = (("mesh.training",) if mesh else ("training.grads",)), ((3,), (size,), ("fp32",), ("exact",))
    (*cells,) = plan(Request(patterns, ("fsdp2",), *axes, option, mesh=Mesh.parse(mesh)), claims)
    refusal = f"this cell cannot set the option {option}: it needs a number of shards that 2 divides"
    assert {planned.unsupported_reason for planned in cells} == {"" if can_run else refusal}


def test_an_expected_failure_with_and_without_a_mesh_covers_the_world_sizes_that_fit() -> None:
    entry = ExpectedFailure(
        "fsdp2",
        "training.grads",
        "https://example.org",
        "reason",
        "fail",
        ("signature",),
        stages=(3,),
        world_sizes=(2, 3),
        meshes=("", "tp2"),
        dtypes=("fp32",),
        models=("exact",),
    )
    covered = {
        (cell.cell.world_size, cell.cell.mesh.label) for cell in iter_covered_cells(entry, "fsdp2", "2.13.0", claims)
    }
    assert covered == {(2, ""), (3, ""), (2, "tp2")}


def test_an_expected_failure_without_a_mesh_covers_no_cell_of_an_engine_that_needs_one() -> None:
    entry = ExpectedFailure("torch_pp", "pipeline.*", "https://example.org", "reason", "fail", ("signature",))
    assert not list(iter_covered_cells(entry, "torch_pp", "2.13.0", claims))


def test_an_expected_failure_covers_cells_of_a_mesh_only_if_it_names_the_mesh() -> None:
    entry = ExpectedFailure("fsdp2", "training.*", "https://example.org", "reason", "fail", ("signature",))
    named = ExpectedFailure(
        "fsdp2", "training.*", "https://example.org", "reason", "fail", ("signature",), meshes=("tp2",)
    )
    plain = Cell("training.grads", "fsdp2", 3, 2, "fp32", "exact", mesh=DEFAULT_MESH)
    split = Cell("training.grads", "fsdp2", 3, 2, "fp32", "exact", mesh=Mesh.parse("tp2"))
    assert [entry.covers_cell(cell, "2.13.0") for cell in (plain, split)] == [True, False]
    assert [named.covers_cell(cell, "2.13.0") for cell in (plain, split)] == [False, True]


@pytest.mark.parametrize(
    ("data_coordinates", "covered"),
    [
        ("", {"w2.pp2", "w4.pp2", "w4.pp4", "w4.pp2.tp2", "w8.pp4.tp2", "w8.pp2.tp2"}),
        ("one", {"w2.pp2", "w4.pp4", "w4.pp2.tp2", "w8.pp4.tp2"}),
        ("several", {"w4.pp2", "w8.pp2.tp2"}),
    ],
)
def test_an_expected_failure_covers_any_size_of_an_axis_without_one(data_coordinates: str, covered: set[str]) -> None:
    entry = ExpectedFailure(
        "torch_pp",
        "pipeline.*",
        "https://example.org",
        "reason",
        "fail",
        ("signature",),
        meshes=("pp", "pp.tp"),
        data_coordinates=data_coordinates,
    )
    labels = {"w2.pp2", "w4.pp2", "w4.pp4", "w4.pp2.tp2", "w8.pp4.tp2", "w8.pp2.tp2", "w4.rep2.pp2", "w2.tp2", "w2"}
    cells = {label: Cell.parse(f"pipeline.training[torch_pp-zero0-{label}-fp32-chain-gpipe]") for label in labels}
    assert {label for label, cell in cells.items() if entry.covers_cell(cell, "2.13.0")} == covered


@pytest.mark.parametrize(("data_coordinates", "size"), [("one", 2), ("several", 4)])
def test_an_expected_failure_of_any_size_counts_as_one_of_the_smallest(data_coordinates: str, size: int) -> None:
    entry = ExpectedFailure(
        "torch_pp",
        "pipeline.training",
        "https://example.org",
        "reason",
        "fail",
        ("signature",),
        meshes=("pp",),
        data_coordinates=data_coordinates,
    )
    worlds = {cell.cell.world_label for cell in iter_covered_cells(entry, "torch_pp", "2.13.0", claims)}
    assert worlds == {f"w{size}.pp2"}


@pytest.mark.parametrize("end", [RankEnd.HUNG, RankEnd.RAISED])
def test_a_failure_of_a_rank_ends_with_the_rank_s_coordinates(end: RankEnd) -> None:
    failed = GroupOutcome((RankOutcome(2, end, 0, cause="it failed"),), 0.0)
    for label, words in (("w4.tp2", "; rank 2 is dp_shard 1, tp 0"), ("w4", "it failed")):
        blank = Record(Cell.parse(f"training.grads[fsdp2-zero3-{label}-fp32-exact]"), 0, Verdict.ERROR, "", "")
        assert make_failure_record(failed, blank).cause.endswith(words)


@pytest.mark.parametrize(
    ("request_", "dtypes"),
    [
        (Request((), ("fsdp2",), mesh=Mesh.parse("rep2"), array_dtypes=("fp32", "bf16", "fp16")), {"fp32", "bf16"}),
        (Request((), ("fsdp2",), mesh=Mesh.parse("rep2"), array_dtypes=("fp32",)), {"fp32"}),
        (Request(("training",), ("fsdp2",), mesh=Mesh.parse("rep2"), array_dtypes=("fp32", "bf16")), {"fp32"}),
        (Request((), ("fsdp2",), array_dtypes=("fp32", "bf16", "fp16")), {"fp32"}),
    ],
    ids=["every law on a mesh", "a dtype is given", "a group of laws", "no mesh"],
)
def test_a_check_of_every_law_on_a_mesh_has_four_laws_in_low_precision(request_: Request, dtypes: set[str]) -> None:
    cells = [planned.cell for planned in plan(request_, claims)]
    assert {cell.dtype for cell in cells} == dtypes
    in_low_precision = {cell.law for cell in cells if cell.dtype != "fp32"}
    expected = {"training.trajectory", "training.sgd_step", "training.any_order", "state.resume"}
    assert in_low_precision == (expected if len(dtypes) > 1 else set())


@pytest.mark.parametrize(
    ("name", "expected", "owner", "words"),
    [
        ("first.weight", torch.zeros(4, 2), 3, "rank 3 is dp_shard 1, tp 1; rank 0 is dp_shard 0, tp 0"),
        ("first.weight/exp_avg", torch.zeros(4, 2), 3, "rank 3 is dp_shard 1, tp 1; rank 0 is dp_shard 0, tp 0"),
        ("first.weight/step", torch.zeros(()), None, "rank 0 is dp_shard 0, tp 0"),
        ("first.bias/exp_avg", torch.zeros(4), None, "rank 0 is dp_shard 0, tp 0"),
    ],
)
def test_a_mismatch_names_where_the_owner_of_the_wrong_element_is(
    name: str, expected: Tensor, owner: int | None, words: str
) -> None:
    layout = {"first.weight": (Piece(1, 0, 5), Piece(3, 5, 8))}
    mesh = Mesh.parse("tp2")
    ctx = JudgeContext(Baseline(model_spec("exact"), 0, 2), (RankEvidence((), layout),) * 4, torch.float32, mesh=mesh)
    actual = expected.clone()
    actual.view(-1)[-1] = 1.0
    found = compare_bitwise(ctx.location(name, Part.OPTIMIZER), expected, actual).mismatch
    assert found is not None
    assert found.owner == owner
    assert add_coordinates(found, ctx).hint == words
