"""List weights that a wrong engine may have used in a forward of a program in the place of its newest ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from zharness.law_kit.record_comparisons import EXCEPT_VECTORS, STALE_FORWARD_HINT, replace_vectors

WEIGHTS_NOT_CHANGED_HINT = f"{STALE_FORWARD_HINT} the last change"

MATRICES_NOT_CHANGED_HINT = f"{WEIGHTS_NOT_CHANGED_HINT}{EXCEPT_VECTORS}"


def iter_old_weights(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield each hint with the weights of an engine that used weights of ``old`` in the place of ``new`` ones.

    It used all of the old ones, the matrices alone, or those of consecutive submodules, as an engine that prefetches.
    """
    yield WEIGHTS_NOT_CHANGED_HINT, old
    yield MATRICES_NOT_CHANGED_HINT, replace_vectors(old, new)
    modules = list(dict.fromkeys(name.partition(".")[0] for name in new))
    for size in range(1, len(modules)):
        for start in range(len(modules) - size + 1):
            chosen = modules[start : start + size]
            weights = {name: old[name] if name.partition(".")[0] in chosen else new[name] for name in new}
            yield f"{WEIGHTS_NOT_CHANGED_HINT}, those of {', '.join(chosen)}", weights
