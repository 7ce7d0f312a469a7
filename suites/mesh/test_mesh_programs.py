"""Programs on meshes stay exact: float32 holds every sum of the models after every step that a program makes."""

from __future__ import annotations

import pytest
import torch

from zharness.engines import optimizers
from zharness.law_kit.integer_steps import SIGN_STEPS
from zharness.law_kit.program_templates import TEMPLATES_BY_MODEL
from zharness.parity.baseline import Baseline, convert_to_float64
from zharness.parity.certificate import SIGNIFICAND_BITS, bound_partial_sums
from zharness.workload import model_spec
from zharness.workload.exact_routed import ExpertLayer
from zharness.workload.programs import Act

MODELS = ("stepped_heads", "stepped_sequence", "stepped_context", "routed")
DATA_SIZE = 2
SAMPLES = 4
WINDOW = 4  # the most backwards in a step, or micro-batches that a mean of all ranks divides by
SEEDS = range(20)


def count_steps(model: str) -> int:
    """Return the largest number of steps that a program of a model makes."""
    return max(
        sum(verb.act in (Act.STEP, Act.IDLE) for verb in template.draw_verbs(0)) // template.window
        for template in TEMPLATES_BY_MODEL[model].values()
    )


@pytest.mark.parametrize("model", MODELS)
def test_float32_holds_the_sums_of_every_step(model: str) -> None:
    held = []
    for seed in SEEDS:
        baseline = Baseline(model_spec(model), seed, DATA_SIZE)
        module = baseline.build_module()
        optimizer = optimizers.build(dict(module.named_parameters()), SIGN_STEPS)
        schedule = optimizers.schedule(optimizer, SIGN_STEPS)
        for step in range(count_steps(model)):
            weights = {name: param.detach() for name, param in module.named_parameters()}
            assert all(torch.equal(weight, weight.round()) for weight in weights.values())
            optimizer.zero_grad()
            for at in range(DATA_SIZE):
                batch = baseline.batch(at, step)
                bound = bound_partial_sums(baseline, batch, baseline.objective, weights)
                held.append(bound * SAMPLES * DATA_SIZE * WINDOW * DATA_SIZE < 2.0 ** SIGNIFICAND_BITS[torch.float32])
                baseline.objective(module(batch.inputs), batch).backward()
            optimizer.step()
            schedule.step()
    assert sum(held) >= 0.99 * len(held)


def test_the_certificate_of_a_choice_covers_every_expert() -> None:
    baseline = Baseline(model_spec("routed"), 0, DATA_SIZE)
    model = baseline.build_module()
    layer = model.get_submodule("moe")
    assert isinstance(layer, ExpertLayer)
    with torch.no_grad():
        layer.experts[3].get_parameter("weight").fill_(-7.0)
    wide, _ = convert_to_float64(model, baseline.batch(0, 0), take_abs=True)
    first = wide.get_parameter("moe.experts.0.weight")
    assert torch.equal(first, torch.full_like(first, 7.0))
