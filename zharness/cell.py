"""Cells: one law on one engine, with its id and its seed."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from zharness.errors import UsageError

_ID = re.compile(
    r"(?P<law>\w+\.\w+)\[(?P<engine>[^\[\]{}]+?)(?:\{(?P<engine_variant>[^\[\]{}]+)\})?"
    r"-zero(?P<stage>\d+)-w(?P<world_size>\d+)-(?P<dtype>[a-z]+\d+)"
    r"-(?P<model>\w+|[A-Za-z_][\w.]*:[A-Za-z_]\w*(?:\([\w.=,]+\))?)(?:-(?P<variant>\w+))?\]"
)


@dataclass(frozen=True, order=True)
class Cell:
    """One law on one engine at one stage, world size, dtype and model.

    ``engine`` is a registered name or ``package.module:factory``, followed by ``==RELEASE`` where a release was
    requested. ``model`` is a model of the workload or ``package.module:factory``, followed by ``(key=value)`` where it
    is made smaller. ``variant`` is the law's variant; ``engine_variant`` names engine options that must not change a
    number, or a configuration file.
    """

    law: str
    engine: str
    stage: int
    world_size: int
    dtype: str
    model: str
    variant: str = ""
    engine_variant: str = ""

    @property
    def engine_label(self) -> str:
        """The engine's name in the id: ``engine``, or ``engine{variant}``."""
        return f"{self.engine}{{{self.engine_variant}}}" if self.engine_variant else self.engine

    @property
    def id(self) -> str:
        """The cell's id, ``group.law[engine-zero3-w2-fp32-model]``, which is also its pytest id.

        ``-variant`` follows the model if the law has variants, ``{variant}`` the engine if an engine variant was
        requested.
        """
        tail = f"-{self.variant}" if self.variant else ""
        return f"{self.law}[{self.engine_label}-zero{self.stage}-w{self.world_size}-{self.dtype}-{self.model}{tail}]"

    def seed(self, salt: int = 0) -> int:
        """Return a 31-bit seed that follows from the id, so that the id alone determines what the cell computes.

        Law, engine, stage and variants are left out of the digest: cells that differ only in those train the same model
        on the same data, so their numbers can be compared.
        """
        key = f"{self.model}-w{self.world_size}-{self.dtype}-{salt}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") & 0x7FFFFFFF

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell whose id is ``text``. Raises UsageError if ``text`` is not a cell id."""
        match = _ID.fullmatch(text)
        if match is None:
            raise UsageError(
                f"not a cell id: {text!r}; expected group.law[engine-zeroS-wN-dtype-model], "
                "for example training.grads[reference-zero3-w2-fp32-mlp]"
            )
        fields = match.groupdict()
        return cls(
            law=fields["law"],
            engine=fields["engine"],
            stage=int(fields["stage"]),
            world_size=int(fields["world_size"]),
            dtype=fields["dtype"],
            model=fields["model"],
            variant=fields["variant"] or "",
            engine_variant=fields["engine_variant"] or "",
        )


def parse_integers(text: str) -> tuple[int, ...]:
    """Parse integers separated by commas, as in ``0,1,2``, without duplicates. Raises UsageError for anything else."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"got {text!r}; expected integers separated by commas, as in 0,1,2") from None


def is_cell_id(text: str) -> bool:
    """Return whether ``text`` has the form of a cell id."""
    return _ID.fullmatch(text) is not None
