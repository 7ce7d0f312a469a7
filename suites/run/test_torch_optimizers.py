"""A cell whose optimizer options the installed torch does not know is unsupported, and not an error of a rank."""

from __future__ import annotations

from dataclasses import replace

from zharness import engines
from zharness.cell import Cell
from zharness.engines.protocol import OptimizerSpec
from zharness.laws import get_law
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
