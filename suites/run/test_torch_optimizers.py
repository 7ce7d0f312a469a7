"""A cell whose optimizer options the installed torch does not know is unsupported, and not an error of a rank."""

from __future__ import annotations

from dataclasses import replace

from zharness import engines
from zharness.cell import Cell
from zharness.engines.optimizers import reason_not_in_torch
from zharness.engines.protocol import OptimizerSpec
from zharness.laws import LAWS, get_law
from zharness.run.cell_planner import plan_cell


def test_a_cell_is_unsupported_if_this_torch_s_optimizer_does_not_know_an_argument_of_its_variant() -> None:
    law = get_law("training.optimizer_options")
    unknown = OptimizerSpec("adam", {"lr": 1.0, "argument_of_a_later_torch": True})
    variants = tuple(replace(each, optimizer=unknown) if each.name == "sgd_maximize" else each for each in law.variants)
    cell = Cell(law.name, "ddp", 0, 2, "fp32", "mlp", "sgd_maximize")
    claims = engines.capabilities("ddp", 0)
    assert claims is not None
    planned = plan_cell(replace(law, variants=variants), cell, claims)
    assert planned.unsupported_reason.endswith("takes no argument_of_a_later_torch")
    assert not plan_cell(law, cell, claims).unsupported_reason


def test_the_pinned_torch_knows_the_arguments_of_every_variant() -> None:
    # A misspelt argument would leave its variant out on every torch.
    specs = {variant.name: variant.optimizer for law in LAWS.values() for variant in law.variants if variant.optimizer}
    assert len(specs) > 20
    assert {name: reason for name, spec in specs.items() if (reason := reason_not_in_torch(spec))} == {}
