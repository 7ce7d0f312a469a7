"""Await each all-gather of ZeRO-3 in releases of DeepSpeed that await only the last of several all-gathers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from packaging.version import Version

# https://github.com/deepspeedai/DeepSpeed/pull/8539: gloo completes all-gathers in any order, so DeepSpeed reads
# weights from uninitialized memory. The failing cells would change from run to run, and would say nothing about their
# law.
FIRST_AWAITING_RELEASE = Version("0.19.8")


def await_all_gathers(release: str) -> None:
    """Make ZeRO-3 of ``release``, which is imported already, await each all-gather at the end of a step.

    Releases since 0.19.8 do this themselves and are not changed.
    """
    if Version(release) < FIRST_AWAITING_RELEASE:
        init: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters").Init
        if not hasattr(init._allgather_params_coalesced, "__wrapped__"):  # its server may have changed it
            init._allgather_params_coalesced = gather_one_by_one(init._allgather_params_coalesced)


def gather_one_by_one(gather: Callable[..., None]) -> Callable[..., None]:
    """Return a method that calls ``gather``, which takes a list of parameters, with one parameter at a time."""

    @wraps(gather)
    def gather_each(self: Any, params: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        for param in params:
            gather(self, [param], *args, **kwargs)

    return gather_each
