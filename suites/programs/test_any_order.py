"""The laws of any order: what their callers say is heard, and what they do is judged."""

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
from zharness.law_kit.program_executor import ForwardResult
from zharness.law_kit.program_features import ACT_FEATURES, MARK_FEATURES, find_required_features
from zharness.law_kit.program_interruption import inject_interruption
from zharness.law_kit.program_steps import apply_input_marks
from zharness.law_kit.program_templates import TEMPLATES_BY_MODEL, ProgramTemplate
from zharness.laws import LAWS
from zharness.parity import Mismatch, Part
from zharness.parity.baseline import Baseline
from zharness.run.locate import can_locate_divergence
from zharness.workload import Batch, model_spec
from zharness.workload.programs import Act, Mark, Verb

CLAIMS_ALL = Capabilities(stages=frozenset({0}))
CHECK_OF = {"mlp": LAWS["training.any_order"], "changing": LAWS["parameters.any_order"]}
SPOKEN = [(model, variant) for model, variants in TEMPLATES_BY_MODEL.items() for variant in variants]
SEEDS = range(20)


def repertoire(model: str, variant: str) -> ProgramTemplate:
    return TEMPLATES_BY_MODEL[model][variant]


@pytest.mark.parametrize(("model", "variant"), SPOKEN)
def test_an_engine_that_claims_everything_hears_every_word_in_any_order(model: str, variant: str) -> None:
    for seed in SEEDS:
        wished = repertoire(model, variant)
        assert Counter(wished.make_program(seed, "fp32", CLAIMS_ALL).verbs) == Counter(wished.draw_verbs(seed))


def test_every_act_and_every_mark_is_spoken() -> None:
    verbs = [verb for model, variant in SPOKEN for verb in repertoire(model, variant).draw_verbs(0)]
    assert {verb.act for verb in verbs} == {*Act}
    assert {mark for verb in verbs for mark in verb.marks} == {*Mark}


@pytest.mark.parametrize(("model", "variant"), SPOKEN)
def test_a_variant_needs_all_that_its_words_take_but_those_that_may_go_unsaid(model: str, variant: str) -> None:
    unsaid = {*ACT_FEATURES.values(), *MARK_FEATURES.values()}
    needs = {*CHECK_OF[model].required_features(variant)}
    for seed in SEEDS:
        assert {
            *find_required_features(repertoire(model, variant).make_program(seed, "fp32", CLAIMS_ALL))
        } <= needs | unsaid


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_what_an_engine_does_not_claim_is_not_asked_of_it(feature: Feature) -> None:
    claims = replace(CLAIMS_ALL, refuses={feature: "not claimed"})
    for model, variant in SPOKEN:
        if feature not in CHECK_OF[model].required_features(variant):
            assert feature not in find_required_features(repertoire(model, variant).make_program(0, "fp32", claims))


def norms(model: str, wished: ProgramTemplate, world_size: int) -> list[float]:
    """Of the gradients of the ranks' first window, as the caller's engine reduces them, one for each seed."""
    found = []
    for seed in SEEDS:
        baseline = Baseline(model_spec(model), seed, world_size)
        grads = [local.grads for step in range(wished.window) for local in baseline.run_all_ranks(step)]
        factor = 1.0 if wished.reduction == "sum" else 1.0 / len(grads)
        total = [factor * torch.stack([local[name] for local in grads]).sum(dim=0) for name in grads[0]]
        found.append(float(torch.stack([grad.double().square().sum() for grad in total]).sum().sqrt()))
    return found


@pytest.mark.parametrize("world_size", [2, 8])  # the more ranks, the smaller is the norm of their mean
@pytest.mark.parametrize(("model", "variant"), [pair for pair in SPOKEN if repertoire(*pair).clip is not None])
def test_most_callers_who_clip_have_gradients_that_are_clipped(model: str, variant: str, world_size: int) -> None:
    wished = repertoire(model, variant)
    assert wished.clip is not None
    over = [norm > wished.clip for norm in norms(model, wished, world_size)]
    assert sum(over) > len(over) / 2


def test_a_micro_batch_of_two_samples_is_left_whole() -> None:
    two = Batch(torch.ones(2, 3), torch.ones(2, 1))
    assert apply_input_marks(two, Verb(Act.FORWARD, (Mark.FEW,)), 0, 0).num_samples == 2


@pytest.mark.parametrize("name", ["inputs", "target"])
def test_a_micro_batch_that_was_written_over_is_another(name: str) -> None:
    batch = Batch(torch.ones(4, 3), torch.ones(4, 1))
    kept = ForwardResult(torch.zeros(()), batch, batch.map_tensors(torch.clone))
    assert not kept.is_batch_changed()
    getattr(batch, name)[0] = 0
    assert kept.is_batch_changed()


def test_an_exception_that_an_engine_keeps_to_itself_is_the_engines_fault() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with (
        pytest.raises(EngineContractError, match="did not reach"),
        inject_interruption(net, Act.FAILED_FORWARD),
        suppress(InterruptedError),
    ):
        net(torch.ones(1, 2))


def test_a_backward_that_is_not_run_is_the_engines_fault() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(EngineContractError, match="without having run"), inject_interruption(net, Act.FAILED_BACKWARD):
        net(torch.ones(1, 2))


def test_where_nothing_ran_that_could_be_interrupted_the_harness_is_at_fault() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(HarnessFault, match="nothing was interrupted"), inject_interruption(net, Act.FAILED_BACKWARD):
        pass


@pytest.mark.parametrize("act", [Act.FAILED_FORWARD, Act.FAILED_BACKWARD])
def test_an_exception_halfway_is_caught_and_leaves_no_hook(act: Act) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with inject_interruption(net, act):
        net(torch.ones(1, 2)).sum().backward()
        raise AssertionError("it was not interrupted")
    net(torch.ones(1, 2)).sum().backward()


def test_the_place_of_a_verb_is_not_taken_for_a_micro_batch() -> None:
    wrong = Mismatch(7, Part.FORWARD, "output", (0,), None, 0, 0, 1.0, 2.0, 0.0, 1, 1, 1)
    for check, located in (("training.any_order", False), ("training.grads", True)):
        case = Cell(check, "reference", 0, 2, "fp32", "mlp", LAWS[check].variants[0].name)
        assert can_locate_divergence(wrong, case, CLAIMS_ALL) is located
