"""Group alarms by their cause, and find the group that explains another alarm."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from zharness.hunt.causes import AlarmCause, find_cause
from zharness.mesh import DEFAULT_MESH
from zharness.run.program_runner import ProgramOutcome, format_program_command
from zharness.workload.programs import SOURCE_KINDS, LayerKind, Program, Verb

MAX_CAUSE = 300  # characters of a cause in the description of a group
PLAIN_LAYERS = (LayerKind.LINEAR, LayerKind.MATRIX, LayerKind.RELU, LayerKind.GELU)


@dataclass
class AlarmGroup:
    """Alarms with one cause: their smallest programs have the same cause (``find_cause``) and need the same options.

    ``known`` says where the cause is already recorded; it is empty for a new cause. ``script`` is the name of the
    exported script, and ``draws`` are the numbers of the draws that raised the alarm.
    """

    number: int
    smallest: Program
    outcome: ProgramOutcome
    known: str = ""
    script: str = ""
    script_result: str = ""
    draws: list[int] = field(default_factory=list)

    @property
    def cause(self) -> AlarmCause:
        """The cause of the failure of the smallest program."""
        return find_cause(self.smallest, self.outcome)

    def has_cause(self, cause: AlarmCause, smallest: Program) -> bool:
        """Return whether an alarm with this cause belongs to the group; ``smallest`` is its shrunk program.

        The shrunk program has to have the same cause, options and mesh as the group.
        """
        has_setting = set(self.smallest.options) == set(smallest.options) and self.smallest.mesh == smallest.mesh
        return self.cause == cause and has_setting

    def explains(self, cause: AlarmCause, program: Program) -> bool:
        """Return whether ``program``, which is not shrunk, contains the smallest program and fails like it."""
        return cause.may_shrink_to(self.cause) and contains_program(program, self.smallest)

    def describe(self, engine: str) -> str:
        """Describe the group in a few lines, with the command that runs its smallest program."""
        status = f"known ({self.known})" if self.known else "new"
        options, mesh = ", ".join(self.smallest.options) or "no option", self.smallest.mesh
        ranks = f"{self.smallest.world_size} ranks{f' on the mesh {mesh.label}' if mesh.sizes else ''}"
        where = f"stage {self.smallest.stage}, {ranks}, {options}, {len(self.draws)} draws"
        cause = textwrap.shorten(self.outcome.cause, MAX_CAUSE, placeholder=" ...")
        lines = [
            f"{self.number}. {status}: {self.outcome.verdict.value}; {where}",
            f"   {self.smallest}",
            f"   {cause}",
        ]
        lines.append(f"   again: {format_program_command(engine, [self.smallest])}")
        if self.script or self.script_result:
            lines.append(f"   script: {self.script or 'none'} ({self.script_result})")
        return "\n".join(lines)


def contains_program(program: Program, smaller: Program) -> bool:
    """Return whether ``program`` has the settings, the layers and, in order, the verbs of ``smaller``."""
    has_settings = (
        set(smaller.options) <= set(program.options)
        and smaller.stage <= program.stage
        and smaller.world_size <= program.world_size
        and smaller.mesh in (DEFAULT_MESH, program.mesh)
        and (smaller.window == 1 or (smaller.window, smaller.window_owner) == (program.window, program.window_owner))
        and smaller.dtype in ("fp32", program.dtype)
        and (smaller.clip is None or program.clip is not None)
    )
    own, other = count_layers(program), count_layers(smaller)
    return has_settings and all(own[kind] >= count for kind, count in other.items()) and has_verbs(program, smaller)


def count_layers(program: Program) -> Counter[LayerKind]:
    """Count the layers of each kind, except first layers, dense layers and activations, which replace each other."""
    ignored = (*SOURCE_KINDS, *PLAIN_LAYERS)
    return Counter(layer.kind for layer in program.walk() if layer.kind not in ignored)


def has_verbs(program: Program, smaller: Program) -> bool:
    """Return whether the verbs of ``smaller`` occur in ``program`` in their order, with at least their marks."""
    remaining = iter(program.verbs)
    return all(any(is_like(verb, wanted) for verb in remaining) for wanted in smaller.verbs)


def is_like(verb: Verb, wanted: Verb) -> bool:
    """Return whether ``verb`` is the act of ``wanted`` with at least its marks."""
    return verb.act is wanted.act and set(wanted.marks) <= set(verb.marks)


def find_group(groups: Sequence[AlarmGroup], cause: AlarmCause, smallest: Program) -> AlarmGroup | None:
    """Return the group of an alarm whose smallest program is ``smallest``, or None if the cause has no group yet."""
    return next((group for group in groups if group.has_cause(cause, smallest)), None)


def find_explanation(groups: Sequence[AlarmGroup], cause: AlarmCause, program: Program) -> AlarmGroup | None:
    """Return the group that explains the alarm of ``program``, which is not shrunk, or None."""
    return next((group for group in groups if group.explains(cause, program)), None)
