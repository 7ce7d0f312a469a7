"""Programs of whole batches: their text, what seeds draw, what an engine does not claim, weights of several uses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zharness.engines import deepspeed_pp, torch_pp
from zharness.engines.protocol import Feature
from zharness.laws.pipeline import SCHEDULES
from zharness.laws.pipeline_cuts import is_legal
from zharness.laws.pipeline_programs import (
    BATCHES,
    TEMPLATES,
    Call,
    CallKind,
    find_frozen,
    find_shared_weights,
    parse_call,
    select_parameter,
)
from zharness.parity.certificate import is_power_of_two
from zharness.workload import MODELS

CLAIMS = torch_pp.CAPABILITIES


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_program_is_what_its_text_says_and_legal(name: str) -> None:
    template = TEMPLATES[name]
    for seed in range(50):
        calls = template.draw_calls(seed, CLAIMS)
        assert tuple(parse_call(str(call)) for call in calls) == calls
        pending, saves = list[int](), 0
        for position, call in enumerate(calls):
            if call.kind in BATCHES:
                pending.append(call.number)
                assert len(set(pending)) == 1, "the means of these batches do not add up to a multiple of one mean"
                assert call.number in template.sizes
                assert call.kind is not CallKind.UNSEEN or is_power_of_two(call.number)
            elif call.kind in (CallKind.STEP, CallKind.ZERO_GRAD):
                assert pending
                pending = []
            elif call.kind not in (CallKind.LOOK, CallKind.SAVE):
                assert not pending, f"{call} at {position} leaves gradients"
            saves += call.kind is CallKind.SAVE
            assert saves or call.kind not in (CallKind.LOAD, CallKind.LOAD_OLD)
        assert not pending
        assert all(is_legal(template, calls[:at], call) for at, call in enumerate(calls)), "a cell could not give it"
        assert find_frozen(calls) is None or name.startswith("frozen")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_has_programs_without_clipping_under_its_own_name(schedule: str) -> None:
    template = TEMPLATES[schedule]
    assert (template.schedule, template.clip, template.features) == (schedule, None, ())


@pytest.mark.parametrize("name", ["accumulated_losses", "interleaved", "zero_bubble"])
def test_only_programs_named_clipped_ask_for_clipping(name: str) -> None:
    assert Feature.CLIP not in TEMPLATES[name].features
    assert Feature.CLIP in TEMPLATES[f"{name}_clipped"].features


def test_seeds_draw_different_programs() -> None:
    template = TEMPLATES["single"]
    assert len({template.draw_calls(seed, CLAIMS) for seed in range(20)}) == 20


def test_a_program_leaves_out_what_the_engine_does_not_claim() -> None:
    template = TEMPLATES["single"]
    refused = replace(CLAIMS, refuses={**CLAIMS.refuses, Feature.CHECKPOINT: "none", Feature.SCHEDULE: "none"})
    kinds = {call.kind for seed in range(20) for call in template.draw_calls(seed, refused)}
    assert kinds.isdisjoint({CallKind.SAVE, CallKind.LOAD, CallKind.LOAD_OLD})
    assert CallKind.EDIT in kinds
    assert template.select_optimizer(refused).schedule == (1.0,)
    assert Feature.IN_PLACE_EDITS in deepspeed_pp.capabilities_at(1).refuses
    assert Feature.IN_PLACE_EDITS not in deepspeed_pp.capabilities_at(0).refuses


def test_a_weight_is_frozen_until_it_is_trained_again() -> None:
    freeze, thaw = Call(CallKind.FREEZE, 2), Call(CallKind.THAW, 2)
    assert find_frozen([Call(CallKind.STEP)]) is None
    assert find_frozen([freeze, Call(CallKind.STEP)]) == freeze
    assert find_frozen([freeze, thaw]) is None


def test_weights_of_several_uses_are_those_that_blocks_or_calls_share() -> None:
    assert "blocks.0.linear.weight" in find_shared_weights(MODELS["skips"], 0)
    assert "blocks.3.linear.weight" not in find_shared_weights(MODELS["skips"], 0)
    assert not find_shared_weights(MODELS["chain"], 0)
    assert find_shared_weights(MODELS["tied_chain"], 0) == {"blocks.0.linear.weight", "blocks.1.linear.bias"}
    assert find_shared_weights(MODELS["tied_ends"], 0) == {"ends.weight", "ends.bias"}
    assert select_parameter(MODELS["tied_ends"], 0, Call(CallKind.FREEZE, 3)) == "ends.weight"
    assert select_parameter(MODELS["tied_ends"], 0, Call(CallKind.EDIT, 7)) == "ends.bias"


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if template.clip is not None])
def test_a_clipped_program_has_a_loss_of_a_small_norm_or_a_sum_of_batches(name: str) -> None:
    for seed in range(20):
        text = " ".join(map(str, TEMPLATES[name].draw_calls(seed, CLAIMS)))
        assert " faint:" in text or "train:1 scaled:1 step" in text


def test_some_programs_save_between_batches_and_run_more_micro_batches_than_ranks_hold() -> None:
    texts = [" ".join(map(str, each.draw_calls(seed, CLAIMS))) for each in TEMPLATES.values() for seed in range(20)]
    assert any("train:1 save train:1 step" in text for text in texts)
    assert any("train:8" in text for text in texts)
