"""Define what a covering array covers: the depth of a run, the laws, and the axes with the values of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import cast

from zharness.cell import Cell, dtype_of_storage
from zharness.engines import AccumulationOwner, Capabilities
from zharness.engines.options import find_exclusion
from zharness.law_kit.setting import SEPARATOR, BackwardCall, Setting
from zharness.laws import Law
from zharness.run.configuration import cell_setting

Value = tuple[str, object]  # the name of an axis, and a value on it

WINDOWS = (
    (1, AccumulationOwner.CALLER),
    *((steps, owner) for steps in (2, 4) for owner in (AccumulationOwner.ENGINE, AccumulationOwner.CALLER)),
)


class Depth(IntEnum):
    """The cells of a run that names no cell. Each depth has the cells of the lower depths and further cells."""

    MATRIX = 1  # each law under one setting
    LAWS = 2  # each law also has a cell with each value of each axis, and each two values have a common cell
    LAW_VARIANTS = 3  # each variant of each law has a cell with each value; laws that cover triples have cells for them
    SETTINGS = 4  # each variant of each law runs every setting of the array


@dataclass(frozen=True)
class CoveredLaw:
    """A law, or one variant of it, that has to have a cell with each value.

    ``name`` is the name of the law or variant in pairs. Its cells take the models and law variants in ``subjects`` in
    turn.
    """

    law: Law
    name: str
    subjects: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Axes:
    """The values of each axis over which cells of one engine are chosen. The first value of an axis is the default.

    ``claims_at`` maps each stage to the claims of the engine at that stage. ``find_refusal`` returns the reason why a
    cell cannot run, or ''. A setting has at most ``joined_options`` options.
    """

    engine: str
    claims_at: dict[int, Capabilities]
    world_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    find_refusal: Callable[[Law, Cell], str]
    joined_options: int = 2

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The names of all options that this machine can run at some stage."""
        return tuple(
            dict.fromkeys(
                name
                for claims in self.claims_at.values()
                for name, option in claims.engine_options.items()
                if not option.absent
            )
        )

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The values of all axes that the engine claims at some stage."""
        settings = (
            *(("window", Setting((), *window)) for window in WINDOWS),
            *(("call", Setting(backward_call=call)) for call in BackwardCall),
        )
        return (
            *(("option", name) for name in self.options),
            *(("stage", stage) for stage in self.claims_at),
            *(
                (axis, setting.window if axis == "window" else setting.backward_call.value)
                for axis, setting in settings
                if self.claims_setting(setting)
            ),
            *(("world size", size) for size in self.world_sizes),
            *(("dtype", dtype) for dtype in self.dtypes),
        )

    def claims_setting(self, setting: Setting) -> bool:
        """Return whether the engine claims the features of ``setting`` at some stage."""
        required = setting.required_features()
        return any(all(claims.refusal(f) is None for f in required) for claims in self.claims_at.values())

    def place_values(self, covered: CoveredLaw, stage: int, values: Sequence[Value]) -> Cell:
        """Return a cell of ``covered`` at ``stage`` with ``values``, the first model and variant, and defaults."""
        chosen = dict(values)
        defaults = ("1", BackwardCall.ENGINE.value)
        names = [name for axis, name in values if axis in ("option", "window", "call") and name not in defaults]
        size, dtype = chosen.get("world size", self.world_sizes[0]), chosen.get("dtype", self.dtypes[0])
        law, label = covered.law.name, SEPARATOR.join(map(str, names))
        model, variant = covered.subjects[0]
        return Cell(law, self.engine, stage, cast(int, size), str(dtype), model, variant, label)

    def may_run(self, law: Law, stage: int, label: str, world_size: int, dtype: str) -> bool:
        """Return False only if ``find_refusal`` refuses every cell of ``law`` at this stage with these values.

        The values alone show most refusals, so that no cell is planned for each model and variant of the law.
        """
        setting = cell_setting(label)
        return (
            dtype_of_storage(dtype) in law.dtypes
            and not setting.reason_unsupported(law.name, law.setting_support)
            and self.are_compatible(stage, setting.options, world_size, dtype)
        )

    def are_compatible(self, stage: int, names: Sequence[str], world_size: int, dtype: str) -> bool:
        """Return whether a cell of this stage, world size and dtype can set the options ``names`` together."""
        known = self.claims_at[stage].engine_options
        return all(
            name in known and not known[name].explain_cell_limit(world_size, dtype_of_storage(dtype)) for name in names
        ) and not find_exclusion({name: known[name] for name in names})
