"""Await each all-gather of ZeRO-3 where a release of DeepSpeed awaits the last of several only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from packaging.version import Version

# https://github.com/deepspeedai/DeepSpeed/pull/8539: gloo ends all-gathers in any order, so that weights are read from
# memory that nothing has written. The cells that this hits change from run to run, and say nothing about their law.
FIRST_AWAITING_RELEASE = Version("0.19.8")


def await_all_gathers(release: str) -> None:
    """Make ZeRO-3 of ``release``, which is imported already, await each all-gather that a step ends with.

    Releases since 0.19.8 do so themselves, and are left as they are.
    """
    if Version(release) < FIRST_AWAITING_RELEASE:
        init: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init
        if not hasattr(init._allgather_params_coalesced, "__wrapped__"):  # a rank imports what its server has changed
            init._allgather_params_coalesced = gather_one_by_one(init._allgather_params_coalesced)


def gather_one_by_one(gather: Callable[..., None]) -> Callable[..., None]:
    """Return ``gather``, a method of lists of parameters, as one that calls it with one parameter at a time."""

    @wraps(gather)
    def gather_each(self: Any, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        for param in params:
            gather(self, [param], *args, **kwargs)

    return gather_each
