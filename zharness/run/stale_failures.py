"""Find expected failures for options or past releases of which no cell in a run failed as expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zharness.engines.registry import capabilities
from zharness.law_kit.setting import split_settings
from zharness.laws.registry import find_laws
from zharness.mesh import DEFAULT_MESH
from zharness.names import STAGES, matches_pattern
from zharness.run.expected_failures import ExpectedFailure
from zharness.run.mesh_claims import needs_mesh
from zharness.run.record import Record, Verdict
from zharness.run.shipped_failures import expected_failures_for


def describe_stale_failures(records: Sequence[Record], user_failures: Sequence[ExpectedFailure] = ()) -> list[str]:
    """Describe each expected failure for options or past releases that excused no cell of one of its laws.

    An entry is described only if the run has all of its laws, stages, world sizes and dtypes; a law that the engine
    does not support counts as run. Each pattern of its laws (a name, a group or a glob) is described separately, and
    only if every law variant passed in a covered cell of every stage at which the variant ran with any options. Few
    cells of a covering array have one given option, so that another variant or stage may still fail. Stages at which
    the engine lacks the options of the entry do not count. A cell that fails as another entry expects says nothing
    about this entry. A cell that fails unexpectedly may have the failure of this entry with another message. If the
    entry is stale on a single cell, it is not described, because the record of that cell says so. The key
    ``unless_engine_variants`` of an entry excludes cells that pass under further options.
    """
    return [
        f"{entry.location}: {', '.join(passed)}: no failure in the cells of {engine} that "
        f"{'set ' + ' or '.join(entry.engine_variants) if entry.engine_variants else 'it covers'} "
        f"({sum(map(len, passed.values()))} passed, for example {next(iter(passed.values()))[0].cell.id}), but was "
        f"expected to fail ({entry.upstream}); narrow or delete this entry"
        for engine in dict.fromkeys(record.cell.engine for record in records)
        for entry, passed in iter_passing_entries([r for r in records if r.cell.engine == engine], user_failures)
    ]


def iter_passing_entries(
    records: Sequence[Record], user_failures: Sequence[ExpectedFailure]
) -> Iterator[tuple[ExpectedFailure, dict[str, list[Record]]]]:
    """Yield each entry for options or past releases that excused no cell of some of its law patterns on one engine.

    The dictionary maps each of these patterns to the cells that passed.
    """
    ran = [record for record in records if record.verdict is not Verdict.UNSUPPORTED]
    attempted = {record.cell.law for record in records}
    for entry in expected_failures_for(records[0].cell.engine, user_failures) if ran else ():
        is_of_whole_run = entry.engine_variants or entry.describes_a_way_to_fail
        if not is_of_whole_run or entry.isolation or not has_all_values(entry, ran, attempted):
            continue
        stages = {stage for stage in {record.cell.stage for record in ran} if has_options_at(entry, stage)}
        cells = [record for record in ran if record.cell.stage in stages]
        by_pattern = {pattern: list_passing_cells(entry, pattern, cells) for pattern in entry.laws}
        passed = {pattern: cells for pattern, cells in by_pattern.items() if cells}
        if passed:
            yield entry, passed


def has_options_at(entry: ExpectedFailure, stage: int) -> bool:
    """Return whether the engine claims the options of ``entry`` at ``stage``; windows are options at every stage."""
    claims = [capabilities(entry.engine, at) for at in STAGES]
    at_any_stage = {name for found in claims if found is not None for name in found.engine_options}
    here = claims[STAGES.index(stage)]
    missing = at_any_stage - set(here.engine_options) if here is not None else set()
    return not entry.engine_variants or any(
        missing.isdisjoint(split_settings([setting])) for setting in entry.engine_variants
    )


def list_passing_cells(entry: ExpectedFailure, pattern: str, ran: Sequence[Record]) -> list[Record]:
    """Return the cells of the laws of ``pattern`` that passed although ``entry`` covers them.

    Returns an empty list if one of the cells needs the entry, or if too few of them ran to decide.
    """
    of_pattern = [record for record in ran if matches_pattern(record.cell.law, pattern)]
    covered = [record for record in of_pattern if entry.covers_cell(record.cell, record.engine_version)]
    passed = [record for record in covered if record.verdict is Verdict.PASS]
    is_reported = any(record.stale_reason for record in covered)
    is_needed = any(not record.is_expected or is_excused_by(entry, record) for record in covered)
    return [] if is_reported or is_needed or not has_every_variant(entry, of_pattern, passed) else passed


def is_excused_by(entry: ExpectedFailure, record: Record) -> bool:
    """Return whether ``record``, of a cell that ``entry`` covers, failed or kept to a contract as ``entry`` expects."""
    if record.verdict is Verdict.CONTRACT:
        return record.documentation_url == entry.documented and record.cause == entry.reason
    return entry.describes_failure(record.verdict.value, record.cause, record.details)


def has_every_variant(entry: ExpectedFailure, ran: Sequence[Record], passed: Sequence[Record]) -> bool:
    """Return whether ``passed`` has each law variant and stage that ``entry`` covers and that ran with any options."""
    any_options = replace(entry, engine_variants=(), unless_engine_variants=())
    wanted = {spelling(record) for record in ran if any_options.covers_cell(record.cell, record.engine_version)}
    return wanted == set(map(spelling, passed))


def spelling(record: Record) -> tuple[str, str, int]:
    """Return the law, the law variant and the stage of a record."""
    return record.cell.law, record.cell.variant, record.cell.stage


def has_all_values(entry: ExpectedFailure, ran: Sequence[Record], attempted: set[str]) -> bool:
    """Return whether a run has each law, stage, world size and dtype that ``entry`` names, with any options.

    ``attempted`` are the laws of the run, including laws that the engine does not support. Laws that need a mesh count
    only for an entry that names a mesh, since no other entry covers a cell of these laws. If an entry also covers cells
    without a mesh, the run needs no cell of the entry's meshes.
    """
    cells = [record.cell for record in ran]
    meshes = {cell.mesh for cell in cells}
    laws = [law for law in find_laws(entry.laws) if law.models and (entry.meshes or not needs_mesh(law))]
    return (
        {law.name for law in laws} <= attempted
        and {*entry.stages} <= {cell.stage for cell in cells}
        and {*entry.world_sizes} <= {cell.world_size for cell in cells}
        and (
            all(any(mesh.has_axes(text) for mesh in meshes) for text in entry.meshes)
            or (DEFAULT_MESH in meshes and DEFAULT_MESH.label in entry.meshes)
        )
        and {*entry.dtypes} <= {cell.storage_dtype for cell in cells}
    )
