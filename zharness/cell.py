"""Define a cell, which is one law on one engine, stage, world size, dtype and model, and parse its id."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from zharness.errors import UsageError
from zharness.mesh import DEFAULT_MESH, Mesh
from zharness.names import ID_FORM

# float32 with factors of products rounded to 11 bits. This is a setting of the GPU, and no tensor's dtype.
TF32 = "tf32"
_ID = re.compile(
    r"(?P<law>\w+\.\w+)\[(?P<engine>[^\[\]{}]+?)(?:\{(?P<engine_variant>[^\[\]{}]+)\})?"
    r"-zero(?P<stage>\d+)-w(?P<world_size>\d+)(?:\.(?P<mesh>[a-z_]+\d+(?:\.[a-z_]+\d+)*))?-(?P<dtype>[a-z]+\d+)"
    r"-(?P<model>\w+|[A-Za-z_][\w.]*:[A-Za-z_]\w*(?:\([\w.=,]+\))?)(?:-(?P<variant>\w*\([\w :,]+\)|\w+))?\]"
)


@dataclass(frozen=True, order=True)
class Cell:
    """One law on one engine at one stage, world size, dtype and model.

    ``engine`` is the name of a registered engine or ``package.module:factory``, followed by ``==RELEASE`` if a certain
    release was requested. ``model`` is the name of one of zharness's models or ``package.module:factory``, followed by
    ``(key=value)`` if arguments make the model smaller. ``variant`` is the name of the law variant, or empty. If the
    law draws a program, ``(v f b s)`` after the name gives the program instead. ``engine_variant`` is the name of a set
    of engine options, which must not change any number that the engine computes, or the name of a configuration file;
    it may be empty. ``mesh`` has the axes of parallelism beside data parallelism.
    """

    law: str
    engine: str
    stage: int
    world_size: int
    dtype: str
    model: str
    variant: str = ""
    engine_variant: str = ""
    mesh: Mesh = DEFAULT_MESH

    @property
    def engine_label(self) -> str:
        """The engine as it appears in the cell's id: ``engine``, or ``engine{engine_variant}`` if the cell has one."""
        return f"{self.engine}{{{self.engine_variant}}}" if self.engine_variant else self.engine

    @property
    def storage_dtype(self) -> str:
        """The dtype of the cell's tensors: ``dtype``, and ``fp32`` for a cell whose products are in TF32."""
        return dtype_of_storage(self.dtype)

    @property
    def world_label(self) -> str:
        """The world size and the mesh as they appear in the cell's id: ``w2``, or ``w4.tp2`` on a mesh."""
        return f"w{self.world_size}.{self.mesh.label}" if self.mesh.sizes else f"w{self.world_size}"

    @property
    def id(self) -> str:
        """The cell's id, ``group.law[engine-zero3-w2-fp32-model]``, which is also its pytest id.

        If the cell has a law variant, ``-variant`` follows the model. If it has an engine variant, ``{engine_variant}``
        follows the engine. If it has a mesh, the axes follow the world size: ``w4.tp2``.
        """
        tail = f"-{self.variant}" if self.variant else ""
        return f"{self.law}[{self.engine_label}-zero{self.stage}-{self.world_label}-{self.dtype}-{self.model}{tail}]"

    def seed(self, salt: int = 0) -> int:
        """Return a 31-bit seed that is derived from the cell's id and ``salt``.

        Cells that differ only in law, engine, stage or variants get the same seed, so that they train the same model on
        the same data and their numbers can be compared. Cells of meshes with the same number of micro-batches in a
        step, such as w4.tp2 and w2, also get the same seed. Another ``salt`` gives another seed.
        """
        key = f"{self.model}-w{self.mesh.data_size(self.world_size)}-{self.dtype}-{salt}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") & 0x7FFFFFFF

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell whose id is ``text``. Raise UsageError if ``text`` is not a cell id."""
        match = _ID.fullmatch(text)
        if match is None:
            laws = text.partition("[")[0]
            names_several = not {"*", "?"}.isdisjoint(text)
            several = f"; to run several cells, give {laws!r} and options such as --engine, --stage and --mesh"
            remedy = several if names_several else ""
            raise UsageError(
                f"not a cell id: {text!r}; expected {ID_FORM.format(law='LAW', variant='VARIANT')}, where .MESH and "
                f"-VARIANT may be missing, for example training.grads[reference-zero3-w2-fp32-mlp]{remedy}"
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
            mesh=Mesh.parse(fields["mesh"] or ""),
        )


def dtype_of_storage(dtype: str) -> str:
    """Return the dtype of the tensors of cells of ``dtype``: ``fp32`` for ``tf32``, else ``dtype``."""
    return "fp32" if dtype == TF32 else dtype


def parse_integers(text: str) -> tuple[int, ...]:
    """Parse integers separated by commas, such as ``0,1,2``, and drop duplicates. Raise UsageError for other text."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"got {text!r}; expected integers separated by commas, as in 0,1,2") from None


def refuse_partial_ids(patterns: Iterable[str]) -> None:
    """Raise UsageError for a pattern of laws with a bracket, because a glob reads brackets as a set of letters."""
    for pattern in patterns:
        if "[" in pattern:
            Cell.parse(pattern)


def is_cell_id(text: str) -> bool:
    """Return whether ``text`` has the form of a cell id, such as ``training.grads[reference-zero3-w2-fp32-mlp]``."""
    return _ID.fullmatch(text) is not None
