"""Match the names of laws, and check names that a user wrote against the known ones.

The module does not import torch, so that a wrong name is answered at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import cache

from zharness.errors import UsageError, find_close_names

STAGES = (0, 1, 2, 3)
ID_FORM = "{law}[ENGINE-zeroSTAGE-wRANKS.MESH-DTYPE-MODEL-{variant}]"  # of a cell on a mesh, with a variant of its law


@cache
def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether the law's name matches the glob ``pattern``, or the law belongs to the group ``pattern``."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def require_laws(patterns: Sequence[str], laws: Collection[str]) -> None:
    """Raise UsageError for a pattern that matches none of ``laws``."""
    for pattern in patterns:
        if not any(matches_pattern(name, pattern) for name in laws):
            refuse_law_variant(pattern, laws)
            groups = list(dict.fromkeys(name.partition(".")[0] for name in laws))
            names_a_law = bool(pattern.partition(".")[2].strip("*"))
            known = [*groups, *laws] if not names_a_law and find_close_names(pattern, groups) else laws
            remedy = "`zharness list laws` prints every law; a pattern may use * and may name a group"
            raise UsageError.unknown_name("law", pattern, known, remedy)


def refuse_law_variant(pattern: str, laws: Collection[str]) -> None:
    """Raise UsageError for the name of a law with a variant behind it, which only the id of a cell can name."""
    law, _, variant = pattern.partition("-")
    if variant and law in laws:
        example = ID_FORM.format(law=law, variant=variant)
        raise UsageError(f"unknown law {pattern!r}; a variant of {law} is named in the id of a cell, as in {example!r}")


def require_law(name: str, laws: Collection[str]) -> None:
    """Raise UsageError if ``name``, which is no pattern, is none of ``laws``."""
    if name not in laws:
        raise UsageError.unknown_name("law", name, laws, "`zharness list laws` prints every law")


def require_mutants(patterns: Sequence[str], mutants: Collection[str]) -> None:
    """Raise UsageError for a glob that matches none of ``mutants``."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in mutants):
            raise UsageError.unknown_name(
                "mutant", pattern, mutants, "`zharness list mutants` says what each does wrong"
            )


def require_model(name: str, models: Collection[str]) -> None:
    """Raise UsageError if ``name`` is none of ``models``."""
    if name not in models:
        remedy = "or package.module:factory; `zharness list models` describes the models"
        raise UsageError.unknown_name("model", name, sorted(models), remedy)


def require_stages(stages: Sequence[int]) -> None:
    """Raise UsageError for a number that is no ZeRO stage."""
    for stage in stages:
        if stage not in STAGES:
            raise UsageError.unknown_name("stage", stage, STAGES)


def require_dtypes(dtypes: Sequence[str], known: Collection[str]) -> None:
    """Raise UsageError for a dtype that is none of ``known``."""
    for dtype in dtypes:
        if dtype not in known:
            raise UsageError.unknown_name("dtype", dtype, known)
