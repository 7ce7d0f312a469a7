"""Let GPUs use deterministic algorithms, and name the operators that have no deterministic algorithm."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WARNING = re.compile(r"(?P<operator>[\w.:<> ]+?) does not have a deterministic implementation")


def use_deterministic_algorithms() -> None:
    """Let torch use a deterministic algorithm if there is one, and warn if there is none; call this in each process.

    Uninitialized memory is not filled, because users of an engine do not fill it either. The public function
    torch.use_deterministic_algorithms is not called, because it would import torch's compiler in every rank.
    """
    torch.set_deterministic_debug_mode("warn")
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


@contextmanager
def collect_nondeterministic_operators() -> Iterator[list[str]]:
    """Yield a list, to which each operator that runs without a deterministic algorithm is added once, in order.

    torch reports such an operator by a warning, which is not shown; other warnings are shown as before. If
    deterministic algorithms are not enabled, torch does not warn, and the list stays empty.
    """
    found: list[str] = []
    if not torch.are_deterministic_algorithms_enabled():  # they are never enabled on a CPU
        yield found
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WARNING.pattern)
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            """Keep the operator's name, or show another warning."""
            match = _WARNING.match(str(message))
            if match is None:
                show(message, category, *rest, **named)
            elif match["operator"] not in found:
                found.append(match["operator"])

        warnings.showwarning = collect
        yield found
