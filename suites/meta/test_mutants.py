"""Mutants are killed by the laws that are meant to kill them, and the first divergence names what was broken.

This runs one target for each law, and with --exhaustive one for each law and mesh. `zharness mutants --scope targets`
runs and judges all targets so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zharness.device import compute_device_type
from zharness.kill_matrix import MutantRunner, make_target_cell
from zharness.laws import LAWS, get_law
from zharness.mutants import MUTANTS, Mutant, Origin, Target
from zharness.run import PlannedCell, Verdict
from zharness.run.cell_planner import unsupported_reason
from zharness.run.mesh_claims import applies_to_model
from zharness.world import Isolation

SERIES = list(Origin)
BY_AGE = sorted(MUTANTS.values(), key=lambda mutant: SERIES.index(mutant.origin))
KILLS = [
    (mutant, target) for mutant in BY_AGE if mutant.is_broken_on(compute_device_type()) for target in mutant.targets
]
# Of a law's mutants on each mesh the newest, since it was written when the law killed the others. The laws of any order
# differ by their variant, so there it is one for each variant.
SAMPLE = list(
    {
        (target.law, target.variant if target.law.endswith(".any_order") else "", target.mesh): (mutant, target)
        for mutant, target in KILLS
    }.values()
)

LONG = {"mesh.other_mesh"}  # builds engines on every mesh
WITHOUT_MESH = {target.law for _, target in SAMPLE if not target.mesh}  # what kills these on a mesh as well is sampled

# Killed, but blamed on the local gradient in some target: their numbers match no known fault of a reduction, nor do
# those of averages_the_means_of_ranks, which weights the gradients of ranks by other factors.
MISNAMED = {
    "fsdp2_forgets_once",
    "only_the_first_backward_counts",
    "second_no_sync_begins_anew",
    "reduced_once_a_backward",
    "counts_the_last_micro_batch_twice",
    "slips_by_one_element",
    "averages_the_means_of_ranks",
}


def is_long(target: Target) -> bool:
    """Return whether a target runs with --exhaustive alone: its law takes long, or has a target without a mesh, too."""
    return target.law in LONG or bool(target.mesh and target.law in WITHOUT_MESH)


def describe_parameter(value: Mutant | Target) -> str:
    if isinstance(value, Mutant):
        return value.name
    return "-".join(filter(None, (value.law, value.model, value.mesh, value.variant, value.dtype)))


@pytest.fixture(scope="module")
def runner() -> Iterator[MutantRunner]:
    with MutantRunner(
        isolation=Isolation.FRESH
    ) as started:  # 60 s for a cell: four ranks that save and load on two busy cores took 20
        yield started


@pytest.mark.parametrize(
    ("mutant", "target"),
    [pytest.param(*each, marks=[pytest.mark.exhaustive] * is_long(each[1])) for each in SAMPLE],
    ids=describe_parameter,
)
def test_a_mutant_is_killed_and_the_first_divergence_is_named(
    runner: MutantRunner, mutant: Mutant, target: Target
) -> None:
    cell = make_target_cell(mutant, target)
    assert applies_to_model(get_law(target.law), target.model, cell.mesh)
    assert not unsupported_reason(get_law(cell.law), cell, mutant.claims(cell.stage))
    record = runner.run(PlannedCell(cell))
    assert record.verdict.is_broken, record.cause or record.verdict
    assert target.named_by(record.divergence, record.cause) or mutant.name in MISNAMED, record.cause


def test_the_first_module_with_a_wrong_output_is_named(runner: MutantRunner) -> None:
    mutant = MUTANTS["adds_to_one_module"]
    record = runner.run(PlannedCell(make_target_cell(mutant, mutant.targets[0])))
    assert record.module_departures.startswith("first in forward order: blocks.0.down, call 0, output 0"), record.cause
    assert record.module_departures in record.cause


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS.values() if mutant.equivalent], ids=describe_parameter)
def test_an_equivalent_mutant_passes(runner: MutantRunner, mutant: Mutant) -> None:
    for target in (Target("training.grads", model="exact"), Target("training.trajectory", variant="adamw")):
        record = runner.run(PlannedCell(make_target_cell(mutant, target)))
        assert record.verdict is Verdict.PASS, record.cause


def test_nine_tenths_of_the_mutants_have_the_expected_first_divergence() -> None:
    assert 10 * len(MISNAMED) <= sum(bool(mutant.targets) for mutant in MUTANTS.values())


def test_every_law_kills_some_mutant() -> None:
    assert {target.law for _, target in KILLS} == {name for name, law in LAWS.items() if law.models}


def test_every_mutant_describes_its_fault_and_names_a_target_or_is_equivalent() -> None:
    for mutant in MUTANTS.values():
        assert mutant.description
        assert bool(mutant.targets) != bool(mutant.equivalent)
        assert set(mutant.stages) == set(mutant.claims(mutant.stages[0]).stages)
