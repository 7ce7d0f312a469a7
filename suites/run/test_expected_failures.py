"""A user's expected failures: parsed, narrowed by every axis, and reported if they match no cell."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from suites.run.failure_files import ENTRY, load_entries
from zharness import engines
from zharness.cell import Cell
from zharness.engines import Capabilities
from zharness.engines.registry import BUILT_IN
from zharness.errors import UsageError
from zharness.laws import DTYPES, find_laws, get_law
from zharness.run import Record, Request, Verdict, plan
from zharness.run.claims import get_engine_version
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.matching_failures import (
    find_expected_failure,
    find_failure_with_remedy,
    find_matching_failure,
    list_matchable_entries,
)
from zharness.run.shipped_failures import expected_failures_for, load_shipped_failures
from zharness.run.stale_failures import describe_stale_failures
from zharness.run.unmatched_failures import describe_unmatched_failures
from zharness.run.user_failures import read_expected_failures, require_narrow_entry

OLD_ENTRY = ENTRY.replace("expected_failure", "excuse").replace("law", "check")
ENGINES = [name for name in BUILT_IN if load_shipped_failures(name)]
WINDOWS = ("", "2_by_engine", "4_by_engine", "2_by_caller", "4_by_caller")
CELL = Cell("training.grads", "my.engine:factory", 0, 2, "fp32", "mlp")


def claims(engine: str, stage: int) -> Capabilities:
    found = engines.capabilities(engine, stage)
    assert found is not None
    return found


def test_a_file_may_name_its_engine_once_and_each_entry_knows_its_line(tmp_path: Path) -> None:
    head = 'engine = "my.engine:factory"\n'
    first, second = load_entries(
        tmp_path, head + ENTRY + 'world_sizes = [4]\ndtypes = ["bf16"]\n' + ENTRY + "stages = [0]\n"
    )
    assert first.location.endswith("ours.toml:3")
    assert second.location.endswith("ours.toml:12")
    assert not first.covers_cell(CELL, "(no release)")
    assert first.covers_cell(replace(CELL, world_size=4, dtype="bf16"), "(no release)")
    assert find_expected_failure(CELL, "(no release)", (first, second)) is second
    assert not replace(second, engine_variants=("tiny",)).covers_cell(CELL, "1.0")
    assert not replace(second, releases="<2").covers_cell(CELL, "(no release)"), (
        "an engine without release is in no range of releases"
    )


def test_older_names_mean_the_same_and_mix_with_the_new_ones_in_the_order_of_the_file(tmp_path: Path) -> None:
    (new,) = load_entries(tmp_path, 'engine = "ddp"\n' + ENTRY)
    (old,) = load_entries(tmp_path, 'engine = "ddp"\n' + OLD_ENTRY)
    assert old == new
    mixed = load_entries(
        tmp_path, 'engine = "ddp"\n' + OLD_ENTRY + ENTRY + OLD_ENTRY.replace("[[excuse]]", "[[ excuse ]] # old")
    )
    assert mixed == tuple(replace(new, location=f"{tmp_path / 'ours.toml'}:{line}") for line in (3, 10, 17))


def test_an_entry_whose_line_the_headers_do_not_tell_is_located_by_its_file(tmp_path: Path) -> None:
    (new,) = load_entries(tmp_path, 'engine = "ddp"\n' + ENTRY)
    inline = ", ".join(ENTRY.split("\n")[2:-1])
    for name in ("expected_failure", "excuse"):
        assert load_entries(tmp_path, f'engine = "ddp"\n{name} = [{{{inline}}}]') == (
            replace(new, location=str(tmp_path / "ours.toml")),
        )


def test_an_entry_with_several_engines_applies_to_each(tmp_path: Path) -> None:
    both = load_entries(tmp_path, 'engine = ["ddp", "zero1"]\n' + ENTRY)
    assert ([entry.engine for entry in both], len({each.location for each in both})) == (["ddp", "zero1"], 1)
    # zero1 cannot replace a gradient, and has no option that compiles the model
    of_ddp = (each for each in expected_failures_for("ddp") if each.engine_variants != ("captured",))
    shared = {each.location for each in of_ddp if each.check != "access.write_grad"}
    assert shared < {entry.location for entry in expected_failures_for("zero1")}, "zero1 runs the backward of DDP"


def test_a_user_s_expected_failure_comes_before_the_shipped_ones(tmp_path: Path) -> None:
    (mine,) = load_entries(tmp_path, 'engine = "fsdp2"\n' + ENTRY)
    assert expected_failures_for("fsdp2", (mine,))[0] is mine
    assert mine not in expected_failures_for("ddp", (mine,))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ENTRY, r"ours.toml:2: the expected failure lacks 'engine'"),
        ('engine = "ddp"\n' + ENTRY.replace("reason", "raeson"), r"unknown key of the expected .* at .*:3: 'raeson'"),
        ('engine = "ddp"\n' + ENTRY.replace('"training.grads"', '"trainig"'), r":3: unknown law 'trainig'"),
        ('engine = "ddp"\n' + ENTRY.replace('"fail"', '"flaky"'), r"unknown verdict .*'flaky'; allowed: fail, crash"),
        ('engine = "ddp"\n' + ENTRY + 'stages = ["3"]', r":3: got stages = \['3'\]; expected a list of int"),
        ('engine = "ddp"\n' + ENTRY + 'releases = "new"', r":3: Invalid specifier: 'new'"),
        (OLD_ENTRY + ENTRY.replace("reason", "raeson"), r"ours.toml:2: the expected failure lacks 'engine'"),
        ('engine = "ddp"\n' + OLD_ENTRY + ENTRY.replace('"fail"', '"flaky"'), r"unknown verdict .*:10: 'flaky'"),
        (
            'engine = "ddp"\n' + ENTRY + OLD_ENTRY.replace('"training.grads"', "3"),
            r":10: got check = 3; expected a str",
        ),
        (
            'engine = "ddp"\n' + ENTRY + 'check = "training"',
            r":3: .* has both 'law' and 'check'; give one key",
        ),
        (
            'engine = "ddp"\n' + ENTRY.replace('law = "training.grads"\n', ""),
            r":3: .* has neither 'law' nor 'check'; give one key",
        ),
        ('engine = "ddp"\n' + ENTRY.replace('"training.grads"', '"*"'), r":3: got law = '\*', .*; list the laws"),
        ('engine = "ddp"\n' + ENTRY.replace('"training.grads"', '["training.grads", "*"]'), r":3: got law = '\*'"),
        ('engine = "ddp"\n' + ENTRY.replace('"training.grads"', "[]"), r":3: got law = \[\]; expected a string"),
        ('engin = "ddp"\n' + ENTRY, r"unknown key in .*'engin'"),
        ("engine =", r"ours.toml is not valid TOML"),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        load_entries(tmp_path, text)


def test_an_entry_with_several_laws_covers_each_of_them_and_no_other(tmp_path: Path) -> None:
    text = ENTRY.replace('"training.grads"', '["training.grads", "backward"]')
    (entry,) = load_entries(tmp_path, 'engine = "my.engine:factory"\n' + text)
    laws = ("training.grads", "backward.bypass", "training.sgd_step")
    assert [entry.covers_cell(replace(CELL, law=law), "1.0") for law in laws] == [True, True, False]


@pytest.mark.parametrize(("variant", "is_allowed"), [("predivide_by_2", True), ("granularity_threshold", False)])
def test_every_law_may_be_covered_if_a_known_bug_of_the_option_affects_every_training(
    tmp_path: Path, variant: str, is_allowed: bool
) -> None:
    text = ENTRY.replace('"training.grads"', '"*"') + f'stages = [3]\nengine_variants = ["{variant}"]\n'
    if is_allowed:
        assert load_entries(tmp_path, 'engine = "deepspeed"\n' + text)
    else:
        with pytest.raises(UsageError, match="all have a known_bug"):
            load_entries(tmp_path, 'engine = "deepspeed"\n' + text)


def test_a_remedy_that_overrides_the_tested_option_is_refused(tmp_path: Path) -> None:
    text = 'engine = "fsdp2"\n' + ENTRY + 'engine_variants = ["one_group"]\ndocumented = "there"\n'
    assert load_entries(tmp_path, text + "remedy = { reduce_scatter_unused_params = true }\n")
    with pytest.raises(UsageError, match="the remedy overrides grouping, which engine_variants set"):
        load_entries(tmp_path, text + 'remedy = { grouping = "leaf" }\n')


@pytest.mark.parametrize("engine", ENGINES)
def test_every_entry_of_the_package_is_narrow(engine: str) -> None:
    for entry in load_shipped_failures(engine):
        require_narrow_entry(entry)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_entry_for_several_laws_excuses_a_basic_law_under_an_accumulation_window(engine: str) -> None:
    laws = ("training.grads", "training.accumulation", "training.sgd_step")
    cells = [
        Cell(law, engine, stage, world_size, dtype, model, variant, window)
        for law in laws
        for model in get_law(law).models
        for variant in get_law(law).workload_variants
        for stage, world_size, dtype, window in itertools.product(range(4), (2, 4), DTYPES, WINDOWS)
    ]
    covering = {
        entry.location: entry.laws
        for entry in load_shipped_failures(engine)
        for cell in cells
        if (entry.further_laws or "*" in entry.check)
        and not (entry.documented and entry.remedy)
        and entry.covers_cell(cell, get_engine_version(engine))
    }
    assert not covering


def test_details_narrow_an_entry_whose_cause_says_little(tmp_path: Path) -> None:
    (bare,) = load_entries(tmp_path, 'engine = "ddp"\n' + ENTRY)
    (precise,) = load_entries(tmp_path, 'engine = "ddp"\n' + ENTRY + 'details = ["in reduce", "in gather"]\n')
    cause = f"rank 0: {bare.signatures[0]}"
    assert bare.matches_failure(cause, "")
    assert precise.matches_failure(cause, "line 7, in gather")
    assert not precise.matches_failure(cause, "line 7, in forward")
    assert not precise.matches_failure("another cause", "line 7, in gather")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read expected failures from"):
        read_expected_failures([tmp_path / "none.toml"])


def test_an_entry_that_matches_no_cell_is_reported_by_a_run_with_all_cells_that_it_covers(tmp_path: Path) -> None:
    head = 'engine = "ddp"\n'
    (needed,) = load_entries(tmp_path, head + ENTRY)
    (idle,) = load_entries(tmp_path, head + ENTRY + 'models = ["gpt"]\n')
    (other_release,) = load_entries(tmp_path, head + ENTRY + 'releases = "<0.1"\nmodels = ["gpt"]\n')
    whole = plan(Request(engines=("ddp",)), claims)
    assert not describe_unmatched_failures(whole, claims, (needed, other_release))
    (description,) = describe_unmatched_failures(whole, claims, (idle,))
    assert description.startswith(f"{idle.location}: no cell of ddp")
    assert "delete this entry" in description
    shadowed = replace(needed, location="ours.toml:99")
    (description,) = describe_unmatched_failures(whole, claims, (needed, shadowed))
    assert description.startswith("ours.toml:99")
    narrow = plan(Request(("training.trajectory",), ("ddp",)), claims)
    assert not describe_unmatched_failures(narrow, claims, (needed, shadowed)), "a run without its cells cannot know"


def test_an_entry_that_another_release_of_the_run_matches_is_not_reported(tmp_path: Path) -> None:
    (needed,) = load_entries(tmp_path, 'engine = "ddp"\n' + ENTRY)
    refused = [replace(cell, unsupported_reason="not on this one") for cell in plan(Request(engines=("ddp",)), claims)]
    other = [replace(cell, cell=replace(cell.cell, engine="ddp==2.13.0")) for cell in refused]
    matched = plan(Request(engines=("ddp",)), claims)
    descriptions = describe_unmatched_failures([*other, *matched], claims, (needed,))
    assert not [description for description in descriptions if description.startswith(needed.location)]


@pytest.mark.parametrize("release", ["0.16.4", "0.18.8", "0.19.1", "0.19.5"])
def test_an_entry_for_what_an_older_release_lacks_is_not_reported_there(release: str) -> None:
    whole = plan(Request(engines=(f"deepspeed=={release}",), dtypes=tuple(DTYPES)), claims)
    assert not describe_unmatched_failures(whole, claims)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp1", "fsdp2", "ddp", "zero1", "reference"])
def test_every_shipped_expected_failure_matches_a_planned_cell(engine: str) -> None:
    assert not describe_unmatched_failures(plan(Request(engines=(engine,), dtypes=tuple(DTYPES)), claims), claims)


def test_an_entry_for_default_options_is_stale_on_those_alone() -> None:
    entry = replace(ENTRY_OF_ANY_SETTING, engine_variants=())
    named = replace(ENTRY_OF_ANY_SETTING, engine_variants=("overlap_comm",))
    default = Cell("training.grads", "reference", 1, 2, "fp32", "mlp")
    overlapped, both = (replace(default, engine_variant=f"overlap_comm{more}") for more in ("", "+2_by_engine"))
    alone = replace(default, world_size=1)  # nothing is reduced there
    assert [entry.is_stale_on(cell) for cell in (default, overlapped, both, alone)] == [True, False, False, False]
    assert [named.is_stale_on(cell) for cell in (overlapped, both)] == [True, False]
    assert replace(entry, world_sizes=(1,)).is_stale_on(alone)


def test_an_entry_for_joined_options_covers_the_cells_that_set_all_of_them() -> None:
    entry = replace(ENTRY_OF_ANY_SETTING, engine_variants=("overlap_comm+2_by_caller",))
    default = Cell("training.grads", "reference", 1, 2, "fp32", "mlp")
    settings = ("overlap_comm", "2_by_caller", "overlap_comm+tiny_buckets+2_by_caller", "overlap_comm+2_by_caller", "")
    covered = [entry.covers_cell(replace(default, engine_variant=setting), "1.0") for setting in settings]
    assert covered == [False, False, True, True, False]


def test_an_entry_for_options_describes_a_failure_with_the_remedy_of_another() -> None:
    documented = replace(ENTRY_OF_ANY_SETTING, documented="there", remedy={"a": 1}, signatures=("x",))
    other = replace(ENTRY_OF_ANY_SETTING, engine_variants=("overlap_comm",), verdict="crash", signatures=("y",))
    cell = Cell("training.grads", "reference", 1, 2, "fp32", "mlp", "", "overlap_comm+2_by_engine")
    entries = (documented, other)
    assert find_failure_with_remedy(cell, "1.0", "crash", "y", "", entries) is other
    assert find_failure_with_remedy(cell, "1.0", "fail", "y", "", entries) is None
    assert find_failure_with_remedy(replace(cell, engine_variant=""), "1.0", "crash", "y", "", entries) is None


def ended_under(setting: str, verdict: Verdict = Verdict.PASS, **cell: Any) -> Record:
    """Return the record of a cell of training.grads under a setting."""
    default = Cell("training.grads", "reference", 1, 2, "fp32", "mlp", "", setting)
    return Record(replace(default, **cell), 0, verdict, "1.0", "2.13.0")


def test_an_entry_for_options_is_stale_if_every_cell_that_sets_one_passes() -> None:
    entry = replace(ENTRY_OF_ANY_SETTING, engine_variants=("overlap_comm",), location="ours.toml:3")
    passed = [ended_under(""), ended_under("overlap_comm+2_by_engine"), ended_under("overlap_comm+tiny_buckets")]
    (description,) = describe_stale_failures(passed, (entry,))
    assert description.startswith(
        "ours.toml:3: training.grads: no failure in the cells of reference that set overlap_comm (2 passed,"
    )
    assert "delete this entry" in description
    failed = [*passed, ended_under("overlap_comm+4_by_engine", Verdict.FAIL)]
    assert not describe_stale_failures(failed, (entry,))
    assert not describe_stale_failures(passed[:1], (entry,)), "no cell sets the option"
    unsupported = ended_under("overlap_comm+2_by_engine", Verdict.UNSUPPORTED)
    assert not describe_stale_failures([unsupported, *passed[:1]], (entry,))
    other = ended_under("", variant="other")
    assert not describe_stale_failures([*passed, other], (entry,)), "another law variant may fail"
    narrowed = replace(entry, unless_engine_variants=("tiny_buckets", "2_by_engine"))
    assert not describe_stale_failures(passed, (narrowed,))


def test_stages_without_the_option_do_not_keep_an_entry_from_being_stale() -> None:
    # FSDP1 has no replicas at stage 0, where nothing is sharded; it has groups at every stage.
    entry = replace(ENTRY_OF_ANY_SETTING, engine="fsdp1", engine_variants=("two_replicas",), location="ours.toml:3")
    passed = [ended_under("two_replicas+one_group", engine="fsdp1", stage=2), ended_under("", engine="fsdp1", stage=0)]
    (description,) = describe_stale_failures(passed, (entry,))
    assert description.startswith("ours.toml:3: training.grads: no failure in the cells of fsdp1 that set two_replicas")
    assert not describe_stale_failures([*passed, ended_under("", engine="fsdp1", stage=3)], (entry,))
    assert not describe_stale_failures(passed, (replace(entry, engine_variants=("one_group",)),))
    assert not describe_stale_failures(passed, (replace(entry, engine_variants=("two_replicas", "one_group")),))


@pytest.mark.parametrize(
    "fields", [{"check": "training"}, {"stages": (1, 2)}, {"world_sizes": (2, 4)}, {"dtypes": ("fp32", "bf16")}]
)
def test_a_run_without_all_values_of_an_entry_does_not_make_it_stale(fields: dict[str, Any]) -> None:
    entry = replace(ENTRY_OF_ANY_SETTING, engine_variants=("overlap_comm",), **fields)
    assert not describe_stale_failures([ended_under("overlap_comm+2_by_engine")], (entry,))


@pytest.mark.parametrize("laws", [("training.*",), ("training.grads", "training.kernels", "torch_func")])
def test_an_entry_for_several_laws_is_stale_if_it_excused_no_cell_that_ran(laws: tuple[str, ...]) -> None:
    entry = replace(
        ENTRY_OF_ANY_SETTING, check=laws[0], further_laws=laws[1:], engine_variants=("overlap_comm",), location="a:1"
    )
    every_law = [ended_under("", Verdict.UNSUPPORTED, law=law.name) for law in find_laws(laws)]
    passed = [*every_law, ended_under("overlap_comm+2_by_engine")]
    (description,) = describe_stale_failures(passed, (entry,))
    assert description.startswith(f"a:1: {laws[0]}: no failure in the cells of reference")
    assert not describe_stale_failures([passed[0], passed[-1]], (entry,)), "the run has not all of its laws"
    assert not describe_stale_failures(every_law, (entry,)), "no covered cell ran"
    failed = ended_under("overlap_comm", Verdict.FAIL)
    excused = replace(failed, cause="z", expected_failure="x")
    assert not describe_stale_failures([*passed, excused], (entry,))
    assert not describe_stale_failures([*passed, failed], (entry,)), "an unexpected failure may be this one"
    excused_by_another = replace(failed, cause="another cause", expected_failure="x")
    assert describe_stale_failures([*passed, excused_by_another], (entry,))
    assert not describe_stale_failures([*every_law, excused_by_another], (entry,)), "no cell passed"


def test_each_law_of_an_entry_is_stale_for_itself_in_a_run_with_all_of_them() -> None:
    laws = ("training.grads", "training.kernels", "torch_func")
    entry = replace(ENTRY_OF_ANY_SETTING, check=laws[0], further_laws=laws[1:], engine_variants=("overlap_comm",))
    others = [ended_under("", Verdict.UNSUPPORTED, law=law.name) for law in find_laws(("torch_func",))]
    failed = replace(ended_under("overlap_comm", Verdict.FAIL), cause="z", expected_failure="x")
    passed = ended_under("overlap_comm", law="training.kernels")
    (description,) = describe_stale_failures([*others, failed, passed], (entry,))
    assert ": training.kernels: no failure in the cells of reference that set overlap_comm (1 passed" in description
    assert not describe_stale_failures([failed, passed], (entry,)), "a run of some of its laws"
    one_law = replace(entry, check="training.kernels", further_laws=())
    assert describe_stale_failures([passed], (one_law,))


@pytest.mark.parametrize("other", [{"variant": "another"}, {"stage": 2}, {"law": "training.kernels"}])
@pytest.mark.parametrize("check", ["training.grads", "training.*"])
def test_a_sample_of_cells_does_not_make_an_entry_stale(check: str, other: dict[str, Any]) -> None:
    # A covering array has few cells with an option: some other law, variant or stage with it may fail.
    entry = replace(ENTRY_OF_ANY_SETTING, check=check, engine_variants=("overlap_comm",))
    every_law = [ended_under("", Verdict.UNSUPPORTED, law=law.name) for law in find_laws((check,))]
    sample = [*every_law, ended_under("overlap_comm+2_by_engine"), ended_under("", **other)]
    is_covered = check == "training.*" or "law" not in other
    assert bool(describe_stale_failures(sample, (entry,))) is not is_covered
    whole = [*sample, ended_under("overlap_comm", **other)]
    assert describe_stale_failures(whole, (entry,))


def test_a_failure_under_a_setting_may_match_a_later_entry() -> None:
    first = replace(ENTRY_OF_ANY_SETTING, signatures=("one cause",))
    second = replace(ENTRY_OF_ANY_SETTING, signatures=("another cause",), engine_variants=("overlap_comm",))
    cell = Cell("training.grads", "reference", 1, 2, "fp32", "mlp", "", "tiny_buckets+overlap_comm")
    causes = ("another cause", "new", "one cause")
    found = [find_matching_failure(cell, "1.0", "fail", cause, "", (first, second)) for cause in causes]
    assert found == [second, first, first]


def test_an_entry_behind_a_wider_one_is_not_matchable_and_one_with_another_signature_is() -> None:
    first = replace(ENTRY_OF_ANY_SETTING, signatures=("one",))
    shadowed = replace(first, signatures=("one cause",), details=("in step",))
    other = replace(first, signatures=("one cause", "another cause"))
    entries = (first, shadowed, other)
    cell = Cell("training.grads", "reference", 1, 2, "fp32", "mlp")
    assert list_matchable_entries(cell, "1.0", entries) == [first, other]
    assert list_matchable_entries(cell, "1.0", (shadowed, first)) == [shadowed, first]


def test_an_entry_for_every_law_may_not_end_behind_the_newest_release_known() -> None:
    entry = replace(ENTRY_OF_ANY_SETTING, engine="deepspeed", check="*", releases="<=0.19.5")
    require_narrow_entry(entry)
    for releases in ("<=99", ">=0.18,<99", "==99.*"):
        with pytest.raises(UsageError, match="releases' that end at a known one"):
            require_narrow_entry(replace(entry, releases=releases))


ENTRY_OF_ANY_SETTING = ExpectedFailure("reference", "training.grads", "x", "y", "fail", ("z",))


def test_an_entry_for_a_glob_of_laws_under_an_option_is_never_stale_on_one_cell() -> None:
    entry = replace(ENTRY_OF_ANY_SETTING, check="*", engine_variants=("overlap_comm",))
    assert not entry.is_stale_on(Cell("training.grads", "reference", 1, 2, "fp32", "mlp", "", "overlap_comm"))
