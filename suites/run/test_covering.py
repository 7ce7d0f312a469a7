"""Covering arrays: settings are parsed, and the chosen cells can run and cover every pair that a cell can cover."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

import pytest

from zharness import engines
from zharness.cell import Cell
from zharness.engines import AccumulationOwner, EngineOption, Feature
from zharness.engines.options import find_exclusion
from zharness.errors import UsageError
from zharness.law_kit.setting import BackwardCall, Setting, SettingSupport
from zharness.laws import DTYPES, find_laws
from zharness.run import Request, plan
from zharness.run.cell_planner import plan_cell
from zharness.run.claimed_pairs import NO_LAW
from zharness.run.configuration import cell_setting
from zharness.run.covering import build_settings, list_pairs, name_in_pairs, pair_kind
from zharness.run.covering_axes import Axes, Depth
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.law_variants import select_models
from zharness.run.mesh_claims import needs_mesh
from zharness.run.plan import ARRAY_WORLD_SIZES, plan_with_coverage


def claims_of_registry(engine: str, stage: int) -> engines.Capabilities:
    """Return the claims of a built-in engine, which the registry knows without building it."""
    claims = engines.capabilities(engine, stage)
    assert claims is not None, engine
    return claims


@pytest.mark.parametrize("label", ["", "overlap_comm", "a+b+2_by_engine", "4_by_caller+scale_backward"])
def test_a_setting_is_parsed_back_from_its_label(label: str) -> None:
    assert Setting.parse(label).label == label


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        ("2_by_engine+4_by_engine", "at most one accumulation window"),
        ("tensor_backward+scale_backward", "at most one of engine_backward"),
        ("overlap_comm+overlap_comm", "each once"),
        ("1_by_engine", "two or more micro-batches"),
    ],
)
def test_a_setting_that_contradicts_itself_is_refused(label: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Setting.parse(label)


def test_a_law_says_for_which_settings_it_is_not_stated() -> None:
    window = Setting(accumulation_steps=2, owner=AccumulationOwner.ENGINE)
    tensor = Setting(backward_call=BackwardCall.TENSOR)
    by_caller = Setting(accumulation_steps=2, backward_call=BackwardCall.TENSOR)
    own, windows, both = SettingSupport
    assert "2_by_engine" in window.reason_unsupported("training.grads", own)
    assert not window.reason_unsupported("training.grads", windows)
    assert "tensor_backward" in tensor.reason_unsupported("training.grads", windows)
    assert not tensor.reason_unsupported("training.grads", both)
    assert "cannot count" in by_caller.reason_unsupported("training.grads", both)


def test_options_that_exclude_each_other_are_named() -> None:
    wide, narrow = EngineOption({"a": {"b": 1}}), EngineOption({"a": {"b": 2}})
    other = EngineOption({"c": 1}, excludes={"wide": "c needs a narrow b"})
    assert find_exclusion({"wide": wide, "narrow": narrow}) == "wide and narrow give different values to one key"
    assert find_exclusion({"wide": wide, "other": other}) == "other excludes wide: c needs a narrow b" or (
        find_exclusion({"wide": wide, "other": other}) == "wide excludes other: c needs a narrow b"
    )
    assert not find_exclusion({"narrow": narrow, "other": other})


@pytest.mark.parametrize(
    ("variant", "complaint"),
    [
        ("no_such_option", "unknown variant of engine 'reference':? .*no_such_option"),
        ("overlap_comm+no_overlap", "overlap_comm and no_overlap give different values to one key"),
    ],
)
def test_a_request_with_a_wrong_option_is_refused_before_anything_runs(variant: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        plan(Request(("training.grads",), engine_variant=variant), claims_of_registry)


@pytest.mark.parametrize(
    ("engine", "depth"),
    [
        ("reference", Depth.LAWS),
        ("reference", Depth.LAW_VARIANTS),
        pytest.param("fsdp2", Depth.LAW_VARIANTS, marks=pytest.mark.exhaustive),
    ],
)
def test_the_chosen_cells_cover_every_pair_and_each_can_run(engine: str, depth: Depth) -> None:
    request = Request(
        engines=(engine,), depth=depth, array_world_sizes=ARRAY_WORLD_SIZES, array_dtypes=("fp32", "bf16", "fp16")
    )
    planned = plan_with_coverage(request, claims_of_registry)
    covering = planned.coverings[engine]
    runnable = [cell.cell for cell in planned.cells if not cell.unsupported_reason]
    assert set(covering.cells) <= set(runnable)
    pairs = set().union(*(list_pairs(cell, name_in_pairs(cell, depth)) for cell in runnable))
    assert pairs == covering.covered == covering.coverable
    for law, option in product(
        ("training.grads", "state.resume", "backward.recurrent"), claims_of_registry(engine, 3).variants
    ):
        alone = plan(Request((law,), (engine,), (3,), engine_variant=option), claims_of_registry)
        for name in {name_in_pairs(cell.cell, depth) for cell in alone if not cell.unsupported_reason}:
            assert frozenset((name, ("option", option))) in covering.covered, (name, option)
    assert frozenset(("training.grads", ("window", "4_by_caller"))) in covering.covered
    models = {value for pair in covering.covered for value in pair if isinstance(value, tuple) and value[0] == "model"}
    assert all(frozenset((model, ("window", "1"))) in covering.covered for model in models)
    assert any(pair_kind(pair) == "model x option" for pair in covering.covered)
    if depth is Depth.LAW_VARIANTS:
        assert_triples_are_covered(engine, runnable)


def assert_triples_are_covered(engine: str, runnable: Sequence[Cell]) -> None:
    """Assert that a law which covers triples has a cell for each option, world size and dtype that can be together."""
    (law,) = (law.name for law in find_laws(()) if law.covers_triples)
    met = {
        (option, cell.world_size, cell.dtype)
        for cell in runnable
        if cell.law == law
        for option in cell_setting(cell.engine_variant).options
    }
    for option, size, dtype in product(claims_of_registry(engine, 3).variants, ARRAY_WORLD_SIZES, ("fp32", "bf16")):
        request = Request((law,), (engine,), (2, 3), (size,), (dtype,), engine_variant=option)
        if any(not cell.unsupported_reason for cell in plan(request, claims_of_registry)):
            assert (option, size, dtype) in met, (option, size, dtype)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_variant_is_not_combined_with_an_array(depth: int) -> None:
    with pytest.raises(UsageError, match=f"got the variant 'overlap_comm' and depth {depth}; .* use depth 1"):
        plan(Request(("training.grads",), engine_variant="overlap_comm", depth=depth), claims_of_registry)


def test_pairs_that_the_array_gave_up_are_covered_and_the_others_have_a_reason() -> None:
    request = Request(engines=("fsdp2",), depth=2, array_world_sizes=ARRAY_WORLD_SIZES, array_dtypes=("fp32", "bf16"))
    covering = plan_with_coverage(request, claims_of_registry).coverings["fsdp2"]
    for option, value in (("one_group", ("world size", 3)), ("kept_after_backward", ("window", "4_by_caller"))):
        assert frozenset((("option", option), value)) in covering.covered, (option, value)
    reasons = "\n".join(covering.uncoverable)
    assert re.search(r"not coverable: \d+ option x option: the options exclude each other", reasons)
    assert re.search(r"not coverable: \d+ law x option: fsdp2 does not claim gradient clipping", reasons)
    assert re.search(r"not coverable: 2 call x window: no law that the engine supports is stated for both", reasons)
    assert "in no cell of the array" not in reasons
    assert f"option x window: {NO_LAW}" not in reasons
    assert covering.describe().splitlines()[1].strip() == covering.uncoverable[0]


def test_every_kind_of_pair_is_counted() -> None:
    request = Request(depth=2, array_world_sizes=ARRAY_WORLD_SIZES)
    (sentence,) = (
        covering.describe() for covering in plan_with_coverage(request, claims_of_registry).coverings.values()
    )
    with_law = ("law x option", "law x window", "law x world size")
    for kind in (*with_law, "option x option", "option x window"):
        assert kind in sentence, sentence


def test_depth_four_runs_every_law_under_every_setting() -> None:
    request = Request(("training.grads",), depth=4, array_world_sizes=ARRAY_WORLD_SIZES)
    covering = plan_with_coverage(request, claims_of_registry).coverings["reference"]
    options = claims_of_registry("reference", 3).engine_options
    pairs = {
        frozenset((("option", first), ("option", second)))
        for first in options
        for second in options
        if first < second and not find_exclusion({first: options[first], second: options[second]})
    }
    assert pairs <= covering.covered


def test_a_law_alone_is_covered_without_pairs_of_other_values() -> None:
    laws = [law.name for law in find_laws(("training.grads",))]
    cells = plan(Request(tuple(laws), depth=2, array_world_sizes=ARRAY_WORLD_SIZES), claims_of_registry)
    every = plan(Request(tuple(laws), depth=4, array_world_sizes=ARRAY_WORLD_SIZES), claims_of_registry)
    assert 20 < len(cells) < len(every)


def test_an_expected_failure_covers_a_cell_by_one_part_of_its_setting() -> None:
    entry = ExpectedFailure(
        "reference", "training.grads", "x", "y", "fail", ("z",), engine_variants=("overlap_comm", "2_by_engine")
    )

    def covers(setting: str) -> bool:
        """Return whether the entry covers a cell with this setting."""
        return entry.covers_cell(Cell("training.grads", "reference", 1, 2, "fp32", "mlp", "", setting), "1.0")

    assert covers("overlap_comm")
    assert covers("tiny_buckets+2_by_engine")
    assert not covers("")
    assert not covers("tiny_buckets")


def test_an_option_takes_its_refusals_to_the_claims() -> None:
    option = EngineOption({"a": 1}, refuses={Feature.CLIP: "a cannot clip"}, reduce_dtypes={"fp32": "bf16"})
    claims = engines.Capabilities(frozenset({0}), variants={"a": option, "b": {"b": 1}})
    assert claims.with_options(("a",)).refusal(Feature.CLIP) == "a cannot clip"
    assert claims.with_options(("a",)).reduce_dtypes == {"fp32": "bf16"}
    assert claims.with_options(("b",)).refusal(Feature.CLIP) is None
    assert set(claims.neutral_options) == {"a", "b"}


def test_an_option_names_the_laws_and_models_in_which_it_has_an_effect() -> None:
    option = EngineOption({"a": 1}, laws=frozenset({"state.resume-adamw"}), models=frozenset({"mlp"}))
    assert not option.explain_law_limit("state.resume", "adamw", "mlp")
    assert "state.resume-adamw" in option.explain_law_limit("state.resume", "sgd", "mlp")
    assert "mlp" in option.explain_law_limit("state.resume", "adamw", "conv")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_setting_that_is_left_out_of_an_array_is_refused_by_the_planner_for_every_model(engine: str) -> None:
    claims_at = {stage: claims_of_registry(engine, stage) for stage in claims_of_registry(engine, 0).stages}
    axes = Axes(engine, claims_at, ARRAY_WORLD_SIZES, tuple(DTYPES), lambda law, cell: "")
    settings, left_out = build_settings(axes)[::7], 0
    for law in (law for law in find_laws(()) if not needs_mesh(law)):
        subjects = list(select_models(law, ()))[:2]
        for setting in settings:
            values = setting.engine_variant, setting.world_size, setting.dtype
            if not axes.may_run(law, setting.stage, *values):
                left_out += 1
                for model, variant in subjects:
                    label, size, dtype = values
                    cell = Cell(law.name, engine, setting.stage, size, dtype, model, variant, label)
                    assert plan_cell(law, cell, claims_at[setting.stage]).unsupported_reason, cell
    assert left_out > 100
