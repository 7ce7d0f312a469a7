"""Name the old weights that a wrong engine used in a forward of a program instead of its newest weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zharness.law_kit.hints import add_hint
from zharness.law_kit.judge_context import JudgeContext
from zharness.law_kit.record_comparisons import EXCEPT_VECTORS, STALE_FORWARD_HINT, replace_vectors
from zharness.parity import Comparison
from zharness.parity.attribution import is_close_to_mean

WEIGHTS_NOT_CHANGED_HINT = f"{STALE_FORWARD_HINT} the last change"

MATRICES_NOT_CHANGED_HINT = f"{WEIGHTS_NOT_CHANGED_HINT}{EXCEPT_VECTORS}"


def hint_old_weights(
    ctx: JudgeContext,
    comparison: Comparison,
    weights_version: int,
    compute: Callable[[nn.Module], Tensor],
    found: Tensor,
) -> Comparison:
    """Add a hint to the mismatch of ``found`` if it was computed with weights from before their last change.

    ``compute(module)`` returns the tensor that plain PyTorch computes with the weights of ``module``.
    """
    if comparison.mismatch is None or not weights_version:
        return comparison
    new, old = (ctx.rank_records("params", weights_version - age)[0] for age in (0, 1))
    for hint, weights in iter_old_weights(new, old):
        if compute(ctx.baseline.build_module(weights)).equal(found):
            return add_hint(comparison, hint)
    return comparison


def has_old_backward(
    grad: Tensor, rows: Sequence[Sequence[Tensor]], old_rows: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> bool:
    """Return whether ``grad`` is the sum of ``rows`` if one row, or each row, is taken from ``old_rows``.

    A row has the gradients of all ranks in one backward. ``old_rows`` has the gradients with the weights from before
    their last change. The sum over ranks is in ``dtype``.
    """
    choices = [[*rows[:at], old, *rows[at + 1 :]] for at, old in enumerate(old_rows)]
    terms = ([term for row in chosen for term in row] for chosen in (*choices, old_rows))
    return any(is_close_to_mean(grad, each, len(rows), dtype) for each in terms)


def iter_old_weights(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield each hint with the weights of a wrong engine that used some weights of ``old`` instead of ``new``.

    The engine used all old weights, only the old matrices, or, like an engine that prefetches, the old weights of
    consecutive submodules.
    """
    yield WEIGHTS_NOT_CHANGED_HINT, old
    yield MATRICES_NOT_CHANGED_HINT, replace_vectors(old, new)
    modules = list(dict.fromkeys(name.partition(".")[0] for name in new))
    for size in range(1, len(modules)):
        for start in range(len(modules) - size + 1):
            chosen = modules[start : start + size]
            weights = {name: old[name] if name.partition(".")[0] in chosen else new[name] for name in new}
            yield f"{WEIGHTS_NOT_CHANGED_HINT}, those of {', '.join(chosen)}", weights
