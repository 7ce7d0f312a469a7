"""The any-order laws: their programs contain every verb, need the declared features, and detect broken engines."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from zharness.cell import Cell
from zharness.engines.protocol import Capabilities, Feature
from zharness.errors import EngineContractError, HarnessFault
from zharness.law_kit.hints import OLD_GRADIENT_ADDED_HINT, describe_added_gradient
from zharness.law_kit.program_executor import ForwardResult, is_equal_with_nan
from zharness.law_kit.program_features import ACT_FEATURES, MARK_FEATURES, find_required_features
from zharness.law_kit.program_interruption import inject_interruption
from zharness.law_kit.program_steps import INTEGERS, apply_input_marks
from zharness.law_kit.program_suspects import (
    FAILED_GRADS_ALONE_HINT,
    FAILED_GRADS_KEPT_HINT,
    LAST_FAILED_GRADS_KEPT_HINT,
    SUCCEEDED_GRADS_KEPT_HINT,
    UNDIVIDED_HINT,
    UNREDUCED_GRADS_KEPT_HINT,
    ZEROED_GRADS_ALONE_HINT,
    ZEROED_GRADS_KEPT_HINT,
    WindowBackwards,
    make_alone_suspects,
    make_kept_suspects,
    make_undivided_suspects,
)
from zharness.law_kit.program_templates import TEMPLATES_BY_MODEL, ProgramTemplate
from zharness.laws import LAWS
from zharness.parity import Mismatch, Part
from zharness.parity.baseline import Baseline, LocalResult
from zharness.run.locate import can_locate_divergence
from zharness.workload import Batch, model_spec
from zharness.workload.programs import Act, Mark, Verb

CLAIMS_ALL = Capabilities(stages=frozenset({0}))
LAW_BY_MODEL = {
    **dict.fromkeys(("mlp", "mlp_context", "mlp_routed"), LAWS["training.any_order"]),
    "changing": LAWS["parameters.any_order"],
    **dict.fromkeys(("stepped_heads", "stepped_context", "routed"), LAWS["mesh.any_order"]),
    "stepped_sequence": LAWS["mesh.any_order_clipped"],
}
TEMPLATE_NAMES = [(model, variant) for model, variants in TEMPLATES_BY_MODEL.items() for variant in variants]
SEEDS = range(20)


def get_template(model: str, variant: str) -> ProgramTemplate:
    return TEMPLATES_BY_MODEL[model][variant]


@pytest.mark.parametrize(("model", "variant"), TEMPLATE_NAMES)
def test_an_engine_that_claims_everything_gets_every_verb_of_the_template(model: str, variant: str) -> None:
    for seed in SEEDS:
        template = get_template(model, variant)
        assert Counter(template.make_program(seed, "fp32", CLAIMS_ALL).verbs) == Counter(template.draw_verbs(seed))


def test_every_act_and_every_mark_occurs_in_a_template() -> None:
    verbs = [verb for model, variant in TEMPLATE_NAMES for verb in get_template(model, variant).draw_verbs(0)]
    assert {verb.act for verb in verbs} == {*Act}
    assert {mark for verb in verbs for mark in verb.marks} == {*Mark}


@pytest.mark.parametrize(("model", "variant"), TEMPLATE_NAMES)
def test_a_variant_requires_every_feature_of_its_program_that_cannot_be_dropped(model: str, variant: str) -> None:
    droppable = {*ACT_FEATURES.values(), *MARK_FEATURES.values()}
    needs = {*LAW_BY_MODEL[model].required_features(variant)}
    for seed in SEEDS:
        assert {
            *find_required_features(get_template(model, variant).make_program(seed, "fp32", CLAIMS_ALL))
        } <= needs | droppable


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_a_feature_that_an_engine_does_not_claim_is_not_in_its_program(feature: Feature) -> None:
    claims = replace(CLAIMS_ALL, refuses={feature: "not claimed"})
    for model, variant in TEMPLATE_NAMES:
        if feature not in LAW_BY_MODEL[model].required_features(variant):
            assert feature not in find_required_features(get_template(model, variant).make_program(0, "fp32", claims))


def norms(model: str, template: ProgramTemplate, world_size: int) -> list[float]:
    """Return the norm of the reduced gradients of the first window, for each seed."""
    found = []
    for seed in SEEDS:
        baseline = Baseline(model_spec(model), seed, world_size)
        grads = [local.grads for step in range(template.window) for local in baseline.run_all_ranks(step)]
        factor = 1.0 if template.reduction == "sum" else 1.0 / len(grads)
        total = [factor * torch.stack([local[name] for local in grads]).sum(dim=0) for name in grads[0]]
        found.append(float(torch.stack([grad.double().square().sum() for grad in total]).sum().sqrt()))
    return found


@pytest.mark.parametrize("world_size", [2, 8])  # the more ranks, the smaller is the norm of their mean
@pytest.mark.parametrize(
    ("model", "variant"), [pair for pair in TEMPLATE_NAMES if get_template(*pair).clip is not None]
)
def test_most_programs_with_clipping_clip_their_gradients(model: str, variant: str, world_size: int) -> None:
    template = get_template(model, variant)
    assert template.clip is not None
    over = [norm > template.clip for norm in norms(model, template, world_size)]
    assert sum(over) > len(over) / 2


def test_a_micro_batch_of_two_samples_is_left_whole() -> None:
    two = Batch(torch.ones(2, 3), torch.ones(2, 1))
    program = ProgramTemplate((), "sgd").make_program_of_verbs(())
    assert apply_input_marks(two, Verb(Act.FORWARD, (Mark.FEW,)), 0, 0, program).num_samples == 2


def test_a_program_of_integers_has_powers_of_two_of_samples() -> None:
    four, program = Batch(torch.ones(4, 3), torch.ones(4, 1)), ProgramTemplate((), INTEGERS).make_program_of_verbs(())
    few = Verb(Act.FORWARD, (Mark.FEW,))
    assert [apply_input_marks(four, few, rank, 0, program).num_samples for rank in range(3)] == [2, 1, 2]


@pytest.mark.parametrize("name", ["inputs", "target"])
def test_a_micro_batch_that_was_overwritten_is_reported_as_changed(name: str) -> None:
    batch = Batch(torch.ones(4, 3), torch.ones(4, 1))
    kept = ForwardResult(torch.zeros(()), batch, batch.map_tensors(torch.clone))
    assert not kept.is_batch_changed()
    getattr(batch, name)[0] = 0
    assert kept.is_batch_changed()


def test_nan_that_stays_is_not_a_change() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert is_equal_with_nan(nan, nan.clone())
    assert not is_equal_with_nan(nan, one)
    assert is_equal_with_nan(torch.tensor([1, 2]), torch.tensor([1, 2]))


def test_a_gradient_that_contains_an_older_one_is_told_from_other_wrong_ones() -> None:
    rows, old = [[torch.tensor([1.0, 2.0])], [torch.tensor([4.0, 8.0])]], torch.tensor([16.0, 64.0])

    def describe(*found: float) -> str:
        return describe_added_gradient(torch.tensor(found), rows, old, torch.float32)

    assert describe(21.0, 74.0) == OLD_GRADIENT_ADDED_HINT
    assert describe(13.0, 42.0) == f"0.5 x {OLD_GRADIENT_ADDED_HINT}"
    assert not describe(21.0, 10.0)  # in one of two elements
    one, added = [[torch.tensor([1.0])]], torch.tensor([16.0])
    assert describe_added_gradient(torch.tensor([17.0]), one, added, torch.float32) == OLD_GRADIENT_ADDED_HINT
    assert not describe_added_gradient(torch.tensor([9.0]), one, added, torch.float32)
    assert not describe_added_gradient(torch.tensor([5.0]), one, torch.zeros(1), torch.float32)


def make_backward(grad: float) -> list[LocalResult]:
    """Return the local gradients of one backward on one rank."""
    return [LocalResult(torch.zeros(()), {"w": torch.tensor([grad])})]


def test_kinds_of_discarded_gradients_that_an_engine_keeps_are_told_from_each_other() -> None:
    reduced, unreduced, failed, window = (make_backward(grad) for grad in (1, 10, 100, 1000))
    backwards = WindowBackwards()
    backwards.add(reduced, 0)
    backwards.add(unreduced, 1)
    backwards.unreduced.append(unreduced)
    backwards.discard()
    for micro in (2, 3):
        backwards.add_failed(failed, micro)
        backwards.discard()
    backwards.add(window, 4)
    found = make_kept_suspects(backwards.list_kept_by_hint(), backwards.rows, 2)
    sums = {hint: sum(float(local.grads["w"]) for row in rows for local in row) for hint, rows in found.items()}
    assert sums == {
        UNREDUCED_GRADS_KEPT_HINT: 2020,
        FAILED_GRADS_KEPT_HINT: 2400,
        LAST_FAILED_GRADS_KEPT_HINT: 2200,
        SUCCEEDED_GRADS_KEPT_HINT: 2022,
        ZEROED_GRADS_KEPT_HINT: 2422,
    }
    assert make_kept_suspects({UNREDUCED_GRADS_KEPT_HINT: []}, [window], 2) == {}
    alone = make_alone_suspects(backwards.failed, backwards.discarded, 2)
    assert {hint: sum(float(local.grads["w"]) for row in rows for local in row) for hint, rows in alone.items()} == {
        FAILED_GRADS_ALONE_HINT: 400,
        ZEROED_GRADS_ALONE_HINT: 422,
    }
    assert make_alone_suspects([], [], 2) == {}


def test_an_engine_that_does_not_divide_backwards_in_no_sync_is_told() -> None:
    unreduced, reduced = make_backward(10), make_backward(1000)
    found = make_undivided_suspects([unreduced], [unreduced, reduced], window=4, factor=0.5)
    assert [float(local.grads["w"]) for row in found[UNDIVIDED_HINT] for local in row] == [20, 500]
    assert make_undivided_suspects([unreduced], [reduced], window=4, factor=0.5) == {}


def test_an_exception_that_does_not_reach_the_caller_is_the_engines_fault() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with (
        pytest.raises(EngineContractError, match="did not reach"),
        inject_interruption(net, Act.FAILED_FORWARD),
        suppress(InterruptedError),
    ):
        net(torch.ones(1, 2))


def test_a_backward_that_is_not_run_is_the_engines_fault() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(EngineContractError, match="without running"), inject_interruption(net, Act.FAILED_BACKWARD):
        net(torch.ones(1, 2))


def test_a_block_in_which_no_child_module_runs_is_the_harnesss_fault() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(HarnessFault, match="nothing was interrupted"), inject_interruption(net, Act.FAILED_BACKWARD):
        pass


@pytest.mark.parametrize("act", [Act.FAILED_FORWARD, Act.FAILED_BACKWARD])
def test_an_injected_exception_is_caught_and_leaves_no_hook(act: Act) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with inject_interruption(net, act):
        net(torch.ones(1, 2)).sum().backward()
        raise AssertionError("it was not interrupted")
    net(torch.ones(1, 2)).sum().backward()


def test_the_position_of_a_verb_is_not_taken_for_a_micro_batch() -> None:
    wrong = Mismatch(7, Part.FORWARD, "output", (0,), None, 0, 0, 1.0, 2.0, 0.0, 1, 1, 1)
    for law, located in (("training.any_order", False), ("training.grads", True)):
        cell = Cell(law, "reference", 0, 2, "fp32", "mlp", LAWS[law].variants[0].name)
        assert can_locate_divergence(wrong, cell, CLAIMS_ALL) is located
