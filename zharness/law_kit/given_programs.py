"""Let a cell name the program that a law runs, ``steps(v f b s)``, in place of the one that its seed draws."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from zharness.engines.protocol import Capabilities
from zharness.errors import UsageError

_GIVEN = re.compile(r"(\w*)\(([^()]*)\)")


def split_variant(name: str) -> tuple[str, str]:
    """Return the name of a law variant without its program, and the program's words ('' if the program is drawn)."""
    match = _GIVEN.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def join_variant(name: str, program_text: str) -> str:
    """Return the name of a law variant with the program ``program_text``."""
    return f"{name}({program_text})"


@dataclass(frozen=True)
class ProgramCell:
    """The facts that a program depends on: model, variant without a program, seed, dtype and the engine's claims."""

    model: str
    variant: str
    seed: int
    dtype: str
    claims: Capabilities


@dataclass(frozen=True)
class ProgramForm:
    """The functions that draw a law's programs and make them smaller; a program is words with spaces between them.

    ``make_legal`` returns the words of a program that are legal in their order and that the engine claims. It raises
    UsageError for a word that no program has. ``cut`` yields programs of fewer or simpler words, the largest reductions
    first; these programs need not be legal.
    """

    draw: Callable[[ProgramCell], str]
    make_legal: Callable[[ProgramCell, str], str]
    cut: Callable[[ProgramCell, str], Iterator[str]]

    def choose(self, name: str, cell: ProgramCell) -> str:
        """Return the words of the program of a variant: those that ``name`` gives, or those that the seed draws."""
        return split_variant(name)[1] or self.draw(cell)

    def require_legal(self, name: str, cell: ProgramCell) -> None:
        """Raise UsageError for a program that the variant ``name`` gives and that the engine cannot run."""
        program_text = split_variant(name)[1]
        legal = self.make_legal(cell, program_text) if program_text else program_text
        if legal != program_text:
            pairs = zip_longest(program_text.split(), legal.split())
            first = next(word for word, kept in pairs if word != kept)
            raise UsageError(
                f"got the program {program_text!r}, in which {first!r} is not legal; expected only calls that are "
                f"legal after those before them and that the engine claims, such as {legal or self.draw(cell)!r}"
            )

    def iter_smaller(self, cell: ProgramCell, program_text: str) -> Iterator[str]:
        """Yield legal programs that are smaller than ``program_text``, the largest reductions first, each once."""
        seen = {program_text, ""}
        for candidate in self.cut(cell, program_text):
            legal = self.make_legal(cell, candidate)
            if legal not in seen:
                seen.add(legal)
                yield legal
