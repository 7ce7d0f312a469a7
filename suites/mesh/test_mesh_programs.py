"""Programs on meshes stay exact: float32 holds every sum of the models after every step that a program makes."""

from __future__ import annotations

import fnmatch
from functools import partial

import pytest
import torch

from zharness.engines import optimizers
from zharness.errors import RoundedScenarioError
from zharness.law_kit import program_exact
from zharness.law_kit.clipped_step import bound_clipped_parts, compute_first_absolute_grads
from zharness.law_kit.integer_steps import MOVED_BY_SIGNS, SIGN_STEPS
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.program_exact import ExactProgramJudge, holds_sums
from zharness.law_kit.program_templates import CLIPPED_TEMPLATES, TEMPLATES_BY_MODEL, ProgramTemplate
from zharness.mesh import TENSOR, Mesh
from zharness.parity.baseline import Baseline, convert_to_float64
from zharness.parity.bounds import replay_roundoff
from zharness.parity.certificate import SIGNIFICAND_BITS, bound_partial_sums
from zharness.workload import model_spec
from zharness.workload.exact_routed import ExpertLayer
from zharness.workload.programs import Act, Verb

# On four ranks cp2 leaves two micro-batches in a step, tp2 too, and rep2 and ep four.
CASES = (
    *((model, data_size) for model in ("stepped_heads", "stepped_sequence", "routed") for data_size in (2, 4)),
    ("stepped_context", 2),
)
SAMPLES = 4
SEEDS = range(20)


def count_steps(template: ProgramTemplate) -> int:
    """Return the number of steps that a program of a template makes."""
    return sum(verb.act in (Act.STEP, Act.IDLE) for verb in template.draw_verbs(0)) // template.window


def count_terms(template: ProgramTemplate) -> int:
    """Return the largest number of backwards in a step, times the number of micro-batches that it divides by."""
    in_phrases = max(sum(word[0] in "nb" for word in phrase.split()) for phrase in template.phrases)
    return max(in_phrases, template.window) * template.window


def train(model: str, data_size: int, steps: int) -> tuple[list[list[float]], set[str]]:
    """Train by SIGN_STEPS, and return the bounds of each step's sums, and which parameters moved."""
    bounds: list[list[float]] = [[] for _ in range(steps)]
    moved = set()
    for seed in SEEDS:
        baseline = Baseline(model_spec(model), seed, data_size)
        module = baseline.build_module()
        start = {name: param.detach().clone() for name, param in module.named_parameters()}
        optimizer = optimizers.build(dict(module.named_parameters()), SIGN_STEPS)
        schedule = optimizers.schedule(optimizer, SIGN_STEPS)
        for step in range(steps):
            weights = {name: param.detach() for name, param in module.named_parameters()}
            assert all(torch.equal(weight, weight.round()) for weight in weights.values())
            optimizer.zero_grad()
            for at in range(data_size):
                batch = baseline.batch(at, step)
                bounds[step].append(bound_partial_sums(baseline, batch, baseline.objective, weights))
                baseline.objective(module(batch.inputs), batch).backward()
            optimizer.step()
            schedule.step()
        moved |= {name for name, param in module.named_parameters() if not torch.equal(param, start[name])}
    return bounds, moved


@pytest.mark.parametrize(("model", "data_size"), CASES)
def test_float32_holds_the_sums_of_every_step(model: str, data_size: int) -> None:
    templates = TEMPLATES_BY_MODEL[model].values()
    bounds, moved = train(model, data_size, max(count_steps(template) for template in templates))
    for template in templates:
        terms = SAMPLES * data_size**2 * count_terms(template)
        held = [
            [bound * terms < 2.0 ** SIGNIFICAND_BITS[torch.float32] for bound in of_step]
            for of_step in bounds[: count_steps(template)]
        ]
        assert all(held[0])  # a judge raises an error else
        assert sum(map(sum, held)) >= 0.99 * sum(map(len, held))
    names = [name for name, _ in model_spec(model).model(0).named_parameters()]
    for pattern in MOVED_BY_SIGNS:
        matched = fnmatch.filter(names, pattern)
        assert not matched or moved & {*matched}, pattern


def test_the_certificate_of_a_choice_covers_every_expert() -> None:
    baseline = Baseline(model_spec("routed"), 0, 2)
    model = baseline.build_module()
    layer = model.get_submodule("moe")
    assert isinstance(layer, ExpertLayer)
    with torch.no_grad():
        layer.experts[3].get_parameter("weight").fill_(-7.0)
    wide, _ = convert_to_float64(model, baseline.batch(0, 0), take_abs=True)
    first = wide.get_parameter("moe.experts.0.weight")
    assert torch.equal(first, torch.full_like(first, 7.0))


def test_a_missing_certificate_of_the_initial_weights_is_an_error() -> None:
    ctx = JudgeContext(Baseline(model_spec("routed"), 0, 2), (), torch.float32)
    too_large = 2.0 ** SIGNIFICAND_BITS[torch.float32]
    assert holds_sums(ctx, too_large - 1, steps=0)
    assert not holds_sums(ctx, too_large, steps=1)
    with pytest.raises(RoundedScenarioError):
        holds_sums(ctx, too_large, steps=0)


@pytest.mark.parametrize(
    ("model", "mesh", "is_bounded"), [("sequence", "tp2", True), ("sequence", "", False), ("heads", "tp2", False)]
)
def test_only_gradients_that_tp_may_clip_as_sums_of_parts_have_room_for_it(
    model: str, mesh: str, is_bounded: bool
) -> None:
    ctx = JudgeContext(Baseline(model_spec(model), 0, 2), (), torch.float32, mesh=Mesh.parse(mesh))
    room = bound_clipped_parts(ctx, partial(compute_first_absolute_grads, ctx))
    assert room.keys() == (set(ctx.baseline.parameter_names) if is_bounded else set())
    [terms] = compute_first_absolute_grads(ctx)
    roundings = ctx.mesh.size(TENSOR)  # of each term: of its product, and of the sums of the other ranks' parts to it
    for name, error in room.items():
        rounded = replay_roundoff(torch.float32) * torch.stack([each.grads[name] for each in terms]).mean(dim=0)
        assert bool((error >= roundings * rounded).all())
        assert bool((error <= (roundings + 2) * rounded).all()), "more than a scaled sum's roundings, to first order"


def test_the_sums_of_a_micro_batch_are_bounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = JudgeContext(Baseline(model_spec("stepped_sequence"), 0, 2), (), torch.float32, mesh=Mesh.parse("tp2"))
    judge = ExactProgramJudge(ctx, CLIPPED_TEMPLATES[""].make_program_of_verbs((Verb(Act.FORWARD),)))
    calls = []
    monkeypatch.setattr(program_exact, "bound_partial_sums", lambda *_: calls.append(1) or 8.0)
    bounds = [judge.bound_sums(Verb(Act.FORWARD), micro, ctx.baseline.objective) for micro in (0, 0, 1)]
    assert bounds == [8.0] * 3
    assert len(calls) == 2 * ctx.data_size
