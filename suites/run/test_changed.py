"""`zharness check --changed`: the functions that a change touches, and the cells that reach them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from suites.run.test_changed_functions import commit_all
from suites.run.test_covering import claims_of_registry
from suites.warm import programs
from zharness.cell import Cell
from zharness.cli.cell_options import CellOptions
from zharness.engines import EngineOption
from zharness.errors import UsageError
from zharness.mesh import DEFAULT_MESH
from zharness.run import changed_cells
from zharness.run.candidate_cells import (
    ACCUMULATION,
    add_further_cells,
    count_mentions,
    estimate_reach,
    find_mentions,
    find_named_laws,
    plan_further_cells,
)
from zharness.run.cell_planner import PlannedCell
from zharness.run.changed_cells import (
    ChangeSelection,
    describe_selection,
    find_reaching_cells,
    order_cells,
    select_changed_cells,
)
from zharness.run.engine_sources import MODULE_LEVEL
from zharness.run.reach import REACH_VERSION, CellReach, read_reach
from zharness.run.record import Verdict

ENGINE = """\
from zharness.engines import get


class Engine:
    def __init__(self, model, config):
        self.inner = get("ddp")(model, config)
        self.capabilities = self.inner.capabilities

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def full_grads(self):
        return correct(self.inner.full_grads())


def correct(grads):
    return grads
"""
LAWS = ("training.grads", "training.sgd_step")


def make_cell(law: str, stage: int = 0, variant: str = "") -> PlannedCell:
    return PlannedCell(Cell(law, "reference", stage, 2, "fp32", "mlp", variant))


def test_cells_that_set_an_option_of_a_changed_condition_come_first() -> None:
    cells = [make_cell("training.grads"), make_cell("training.grads", 1), make_cell("training.grads", 2)]
    cells[2] = replace(cells[2], cell=replace(cells[2].cell, engine_variant="offload_optimizer"))
    reach = {cell.cell.id: CellReach(frozenset({"f:a"}), 1.0) for cell in cells}
    changed = {"f:a", "f:a > if self.offload_optimizer"}
    options = {
        "offload_optimizer": EngineOption({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        "overlap": EngineOption({"zero_optimization": {"overlap_comm": True}}),
    }
    assert find_mentions(options, "\n".join(changed)) == {"offload_optimizer"}
    ordered = list(order_cells(find_reaching_cells(cells, reach, changed), reach, {"offload_optimizer"}))
    assert ordered == [cells[2], cells[0], cells[1]]


def test_all_cells_get_an_option_before_the_next_option_and_mentioned_ones_come_first() -> None:
    cells = [PlannedCell(Cell("training.grads", "fsdp2", 3, 2, "fp32", model)) for model in ("mlp", "blocks")]
    options = list(claims_of_registry("fsdp2", 3).engine_options)
    planned = [cell.cell for _, cell in plan_further_cells(cells, claims_of_registry, {options[-1]})]
    assert [(cell.model, cell.engine_variant) for cell in planned[:2]] == [
        ("mlp", options[-1]),
        ("blocks", options[-1]),
    ]
    models = [cell.model for cell in planned if cell.engine_variant == planned[2].engine_variant]
    assert [cell.model for cell in planned[2 : 2 + len(models)]] == models
    assert len({(cell.model, cell.engine_variant) for cell in planned}) == len(planned) > len(options)


def test_cells_get_the_windows_that_they_do_not_have() -> None:
    cell = Cell("training.grads", "reference", 2, 2, "fp32", "mlp", engine_variant="tiny_buckets")
    bases = [PlannedCell(each) for each in (cell, replace(cell, engine_variant="2_by_caller"))]
    planned = [planned.cell.engine_variant for _, planned in plan_further_cells(bases, claims_of_registry)]
    assert planned == ["tiny_buckets+2_by_caller", "tiny_buckets+2_by_engine", "2_by_engine"]


def test_cells_without_options_get_a_dtype_that_a_change_names() -> None:
    cells = [make_cell("training.grads", 2), make_cell("training.grads", 2)]
    cells[1] = PlannedCell(replace(cells[1].cell, engine_variant="tiny_buckets"))
    planned = [cell.cell for _, cell in plan_further_cells(cells, claims_of_registry, {"bf16"})]
    assert planned[0] == replace(cells[0].cell, dtype="bf16")
    assert [cell.dtype for cell in planned[1:]] == ["fp32"] * (len(planned) - 1)
    assert {cell.cell.dtype for _, cell in plan_further_cells(cells, claims_of_registry)} == {"fp32"}


def test_cells_that_reach_rare_functions_come_first() -> None:
    cells = [make_cell("training.grads", stage) for stage in range(3)] + [make_cell("state.resume", 0, "sgd")]
    functions = [{"f:a"}, {"f:a", "f:rare"}, {"f:other"}, {"f:a"}]
    reach = {cell.cell.id: CellReach(frozenset(names), 1.0) for cell, names in zip(cells, functions, strict=True)}
    reaching = find_reaching_cells(cells, reach, {"f:a", "f:rare"})
    assert list(order_cells(reaching, reach)) == [cells[1], cells[3], cells[0]]
    assert set(find_reaching_cells(cells, reach, {f"f:{MODULE_LEVEL}"})) == set(cells)
    assert set(find_reaching_cells(cells[:2], reach, {f"f:{MODULE_LEVEL}"})) == set(cells[:2])
    assert not find_reaching_cells(cells, reach, {"g:unreached"})


def test_cells_with_pairs_of_values_that_no_earlier_cell_has_come_before_others() -> None:
    settings = ["", "tiny_buckets", "tiny_buckets+2_by_caller", "overlap_comm"]
    cells = [
        *(PlannedCell(replace(make_cell("training.grads").cell, engine_variant=setting)) for setting in settings),
        make_cell("state.resume", 2, "sgd"),
    ]
    reach = {cell.cell.id: CellReach(frozenset({"f:a"}), 1.0) for cell in cells}
    ordered = list(order_cells(find_reaching_cells(cells, reach, {"f:a"}), reach))
    assert [cells.index(cell) for cell in ordered] == [1, 4, 2, 3, 0]
    slow = {**reach, cells[1].cell.id: CellReach(frozenset({"f:a"}), 9.0)}
    assert next(order_cells(find_reaching_cells(cells, slow, {"f:a"}), slow)) == cells[2]


@pytest.mark.parametrize(
    ("text", "mentioned"),
    [
        ("zero or self.bfloat16_enabled()", {"bf16"}),
        ("isinstance(optimizer, BF16_Optimizer)", {"bf16"}),
        ("torch.float16", {"fp16"}),
        ("if self.gradient_accumulation_steps > 1", {ACCUMULATION}),
        ("if self.step > 1", set()),
    ],
)
def test_a_change_names_dtypes_and_windows(text: str, mentioned: set[str]) -> None:
    assert find_mentions({}, text) == mentioned


def test_cells_count_the_values_that_a_change_names() -> None:
    cell = Cell("training.grads", "reference", 0, 2, "bf16", "mlp", engine_variant="overlap_comm+2_by_caller")
    assert count_mentions(cell, {"bf16", ACCUMULATION, "overlap_comm", "fp16", "tiny_buckets"}) == 3
    assert count_mentions(make_cell("training.grads").cell, {"bf16", ACCUMULATION}) == 0


def test_laws_that_have_a_rare_word_of_the_changed_lines_come_first() -> None:
    laws = {"precision.buffers_keep_dtype", "torch_func.vmap", *(f"training.grads_{number}" for number in range(4))}
    text = "flat = torch.empty(size, dtypes[0], Grads)\nvmapped()"
    assert find_named_laws(laws, text) == {"precision.buffers_keep_dtype"}
    cells = [make_cell("training.grads"), make_cell("training.grads", 1), make_cell("torch_func.vmap", 1)]
    reach = {
        cell.cell.id: CellReach(frozenset({"f:a"}), seconds) for cell, seconds in zip(cells, (1, 1, 5), strict=True)
    }
    reaching = find_reaching_cells(cells, reach, {"f:a"})
    assert list(order_cells(reaching, reach)) == cells
    assert next(order_cells(reaching, reach, named_laws={"torch_func.vmap"})) == cells[2]


def test_a_cell_that_a_record_lacks_reaches_what_most_cells_of_its_law_and_stage_do() -> None:
    cells = [make_cell("training.grads", 1, f"{number}") for number in range(4)]
    others = [make_cell("training.grads", 2), make_cell("training.sgd_step", 1), make_cell("state.resume", 1)]
    functions = [{"f:a", "f:b"}, {"f:a", "f:c"}, {"f:a"}]
    verdicts = [Verdict.FAIL, Verdict.PASS, Verdict.PASS]
    reach = {
        cell.cell.id: CellReach(frozenset(names), 2.0, verdict)
        for cell, names, verdict in zip(cells[:3], functions, verdicts, strict=True)
    } | {others[1].cell.id: CellReach(frozenset({"f:d"}), 4.0, Verdict.CRASH)}
    sgd = replace(others[1], cell=replace(others[1].cell, model="blocks"))
    assert estimate_reach([*cells, *others, sgd], reach) == {
        cells[3].cell.id: CellReach(frozenset({"f:a"}), 2.0),
        sgd.cell.id: CellReach(frozenset({"f:d"}), 4.0, Verdict.CRASH),
    }


def test_cells_that_failed_when_they_were_recorded_come_later_and_get_no_option() -> None:
    cells = [make_cell("training.grads", stage) for stage in range(3)]
    verdicts = [Verdict.FAIL, Verdict.PASS, Verdict.CONTRACT]
    reach = {
        cell.cell.id: CellReach(frozenset({"f:a"}), 1.0, verdict) for cell, verdict in zip(cells, verdicts, strict=True)
    }
    reaching = find_reaching_cells(cells, reach, {"f:a"})
    assert list(order_cells(reaching, reach)) == [cells[1], cells[2], cells[0]]
    further, _ = add_further_cells(reaching, reach, claims_of_registry)
    assert {cell.cell.stage for cell in set(further) - set(cells)} == {1, 2}


def test_cells_that_reach_rare_functions_of_a_file_come_first_if_its_class_attributes_change() -> None:
    cells = [make_cell("training.grads", stage) for stage in range(3)]
    functions = [{"f:a"}, {"f:a", "f:a > if rare"}, {"f:a", "g:rare"}]
    reach = {cell.cell.id: CellReach(frozenset(names), 1.0) for cell, names in zip(cells, functions, strict=True)}
    reaching = find_reaching_cells(cells, reach, {f"f:{MODULE_LEVEL}"})
    assert list(order_cells(reaching, reach)) == [cells[1], cells[0], cells[2]]


def test_constants_of_a_file_whose_functions_no_cell_reaches_are_reached_by_all() -> None:
    cells = [make_cell("training.grads", stage) for stage in range(2)]
    reach = {cells[0].cell.id: CellReach(frozenset({"f:a"}), 1.0)}
    changed = {f"g:{MODULE_LEVEL}", "g:unreached"}
    reaching = find_reaching_cells(cells, reach, changed)
    assert reaching == {cells[0]: {f"g:{MODULE_LEVEL}"}}
    described = describe_selection("reference", "main", changed, cells, reaching, reach)
    assert "which the record does not measure, so that every cell runs: 1 (g:<module>)" in described
    assert "not sources of the record" not in described
    described = describe_selection("reference", "main", changed, cells, reaching, reach, {"csrc/adam.cpp"})
    assert "so that nothing says which cells they affect: 1 (csrc/adam.cpp)" in described


def test_a_file_that_is_no_record_of_reach_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"case": "x"}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="expected a file that `zharness check --record-reach FILE` wrote"):
        read_reach(path)


@pytest.mark.parametrize(("head", "version"), [({}, 1), ({"version": REACH_VERSION + 1}, REACH_VERSION + 1)])
def test_a_record_of_another_version_is_refused(tmp_path: Path, head: dict[str, int], version: int) -> None:
    path = tmp_path / "reach.jsonl"
    path.write_text(json.dumps({**head, "functions": ["f:a"]}) + "\n", encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        read_reach(path)
    assert f"of version {version}, expected version {REACH_VERSION}; record again with" in str(refused.value)
    assert f"`zharness check --engine NAME --record-reach {path}`" in str(refused.value)


def test_a_record_serves_every_checkout_and_release_of_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "reach.jsonl"
    cell = "training.grads[deepspeed@/home/a/DeepSpeed-zero2-w2-fp32-mlp]"
    lines = ({"version": REACH_VERSION, "functions": ["f:a"]}, {"cell": cell, "seconds": 1.0, "functions": [0]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for engine in ("deepspeed", "deepspeed@.", "deepspeed==0.19.8"):
        planned = PlannedCell(Cell("training.grads", engine, 2, 2, "fp32", "mlp"))
        assert list(find_reaching_cells([planned], read_reach(path), {"f:a"})) == [planned]


def test_compare_runs_the_cells_of_a_covering_array_that_reach_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reach.jsonl"
    names = ("training.grads[fsdp2-zero3-w2-fp32-mlp]", "training.grads[fsdp2-zero3-w3-bf16-mlp]")
    lines = (
        {"version": REACH_VERSION, "functions": ["f:a"]},
        *({"cell": name, "seconds": 1.0, "functions": [0]} for name in names),
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr(changed_cells, "find_changed_functions", lambda *_: {"f:a": "f:a"})
    monkeypatch.setattr(changed_cells, "find_unmeasured_files", lambda *_: [])
    monkeypatch.setattr(changed_cells, "read_changed_lines", lambda *_: "")
    options = CellOptions((), (2,), DEFAULT_MESH, ("fp32",), ("mlp",), 60.0, "pooled", 1, None)
    request = replace(options.build_change_request(("training.grads",)), engines=("fsdp2",))
    selected = select_changed_cells(request, claims_of_registry, ChangeSelection("HEAD", path))
    assert set(names) <= {planned.cell.id for planned in selected.cells}


def test_the_source_of_an_engine_may_be_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(ENGINE, encoding="utf-8")
    check = (
        "-m",
        "zharness",
        "check",
        "training.grads",
        "--engine",
        "my_engine:Engine",
        "--stage",
        "0",
        "--model",
        "mlp",
    )
    recorded = programs.run(*check, "--record-reach", "reach.jsonl", folder=tmp_path)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    functions = set().union(*(cell.functions for cell in read_reach(tmp_path / "reach.jsonl").values()))
    assert "my_engine.py:correct" in functions
    commit_all(tmp_path)
    (tmp_path / "my_engine.py").write_text(ENGINE.replace("return grads", "return dict(grads)"), encoding="utf-8")
    found = programs.run(*check, "--changed", "HEAD", "--reach", "reach.jsonl", folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "(my_engine.py:correct); cells that reach them: 1 of 1" in found.stdout
    other = programs.run(*check, "--world-size", "1", "--changed", "HEAD", "--reach", "reach.jsonl", folder=tmp_path)
    assert other.returncode == 2, other.stdout
    assert "reach.jsonl has none of the cells of my_engine:Engine" in other.stderr


def test_the_cells_that_reach_a_change_run_and_find_it(tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "engine.py").write_text(ENGINE, encoding="utf-8")
    commit_all(tmp_path)
    check = ("-m", "zharness", "check", *LAWS, "--engine", "shop.engine:Engine", "--stage", "0", "--model", "mlp")
    recorded = programs.run(*check, "--record-reach", "reach.jsonl", folder=tmp_path)
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    names = json.loads((tmp_path / "reach.jsonl").read_text(encoding="utf-8").splitlines()[0])["functions"]
    assert {"shop/engine.py:Engine.full_grads", "shop/engine.py:correct"} <= set(names)
    changed = ENGINE.replace("return grads", "return {name: 2 * grad for name, grad in grads.items()}")
    (package / "engine.py").write_text(changed, encoding="utf-8")
    changes = ("--changed", "HEAD", "--reach", "reach.jsonl")
    found = programs.run(*check, *changes, "--jsonl", "found.jsonl", folder=tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    rest = programs.run(*check, *changes, "--continue", "found.jsonl", folder=tmp_path)
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "\n0 cells in " in rest.stdout
    assert (
        "functions and branches changed since HEAD: 1 (shop/engine.py:correct); cells that reach them: 2 of 2"
        in found.stdout
    )
    assert "; cells with another option or window: " in found.stdout
    assert "training.grads[shop.engine:Engine-zero0-w2-fp32-mlp]" in found.stdout
    refused = programs.run(*check, "--changed", "nonsense", "--reach", "reach.jsonl", folder=tmp_path)
    assert refused.returncode == 2
    assert "expected a commit of the repository" in refused.stderr
    alone = programs.run(*check, "--changed", "HEAD", folder=tmp_path)
    assert alone.returncode == 2
    assert "--changed and --reach need each other" in alone.stderr
