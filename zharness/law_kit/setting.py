"""Define the setting of a cell: the engine options, the accumulation window and the way of calling backward.

A cell id contains the setting in braces after the engine: ``deepspeed{overlap_comm+2_by_engine+tensor_backward}``.
Default settings are left out of the id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache

from zharness.engines.protocol import AccumulationOwner, Feature
from zharness.errors import UsageError

SEPARATOR = "+"
_WINDOW = re.compile(r"(?P<steps>\d+)_by_(?P<owner>engine|caller)")


class BackwardCall(Enum):
    """The way in which a law runs an ordinary backward."""

    ENGINE = "engine_backward"
    TENSOR = "tensor_backward"
    SCALE = "scale_backward"


REQUIRED_FEATURES = {
    BackwardCall.ENGINE: Feature.ENGINE_BACKWARD,
    BackwardCall.TENSOR: Feature.TENSOR_BACKWARD,
    BackwardCall.SCALE: Feature.SCALE_BACKWARD,
}
OWNER_FEATURES = {
    AccumulationOwner.ENGINE: Feature.ENGINE_ACCUMULATION,
    AccumulationOwner.CALLER: Feature.CALLER_ACCUMULATION,
}


class SettingSupport(Enum):
    """The settings, apart from engine options, for which a law is stated."""

    OPTIONS_ONLY = "the law has accumulation windows and backward calls of its own"
    WINDOWS = "the law's scenario runs in each micro-batch of a window"
    WINDOWS_AND_CALLS = "the law repeats each micro-batch in a window, with any call of backward"


@dataclass(frozen=True)
class Setting:
    """The engine options that a cell sets, its accumulation window, and the way in which it calls backward.

    ``accumulation_steps`` is the number of micro-batches in the accumulation window. ``owner``, the engine or its
    caller, divides the losses and ends the accumulation window; it matters only if the window has more than one
    micro-batch.
    """

    options: tuple[str, ...] = ()
    accumulation_steps: int = 1
    owner: AccumulationOwner = AccumulationOwner.CALLER
    backward_call: BackwardCall = BackwardCall.ENGINE

    @property
    def label(self) -> str:
        """The text of the setting in a cell id; the text of the default setting is empty."""
        window = [self.window] if self.accumulation_steps > 1 else []
        call = [self.backward_call.value] if self.backward_call is not BackwardCall.ENGINE else []
        return SEPARATOR.join([*self.options, *window, *call])

    @property
    def window(self) -> str:
        """The name of the accumulation window, as in ``2_by_engine``."""
        return f"{self.accumulation_steps}_by_{self.owner.value}" if self.accumulation_steps > 1 else "1"

    @property
    def loss_divisor(self) -> int:
        """The number by which the caller divides each loss: the size of an accumulation window that the caller owns."""
        return self.accumulation_steps if self.owner is AccumulationOwner.CALLER else 1

    @classmethod
    @cache
    def parse(cls, label: str) -> Setting:
        """Parse the label of a setting.

        Names that denote neither an accumulation window nor a call of backward are engine options.

        Raises UsageError for a second accumulation window or call of backward, and for a window of fewer than two
        micro-batches.
        """
        names = label.split(SEPARATOR) if label else []
        windows = [match for name in names if (match := _WINDOW.fullmatch(name))]
        calls = [call for call in BackwardCall if call.value in names]
        if len(windows) > 1 or len(calls) > 1 or len(set(names)) < len(names):
            call_names = ", ".join(call.value for call in BackwardCall)
            raise UsageError(
                f"got the setting {label!r}; expected engine options, at most one accumulation window (2_by_engine, "
                f"4_by_caller), and at most one of {call_names}; each once, joined by {SEPARATOR!r}"
            )
        steps = int(windows[0]["steps"]) if windows else 1
        if windows and steps < 2:
            raise UsageError(
                f"got the accumulation window {windows[0][0]!r}; an accumulation window has two or more micro-batches"
            )
        owner = AccumulationOwner(windows[0]["owner"]) if windows else AccumulationOwner.CALLER
        options = tuple(
            name for name in names if not _WINDOW.fullmatch(name) and name not in {call.value for call in BackwardCall}
        )
        return cls(options, steps, owner, calls[0] if calls else BackwardCall.ENGINE)

    def required_features(self) -> tuple[Feature, ...]:
        """Return the features that an engine has to claim for this accumulation window and call of backward."""
        owner = (OWNER_FEATURES[self.owner],) if self.accumulation_steps > 1 else ()
        call = (REQUIRED_FEATURES[self.backward_call],) if self.backward_call is not BackwardCall.ENGINE else ()
        return owner + call

    def has_direct_backwards(self, support: SettingSupport) -> bool:
        """Return whether the engine owns the window although the law calls backward without the engine."""
        is_own_call = support is SettingSupport.WINDOWS or self.backward_call is BackwardCall.TENSOR
        return self.accumulation_steps > 1 and self.owner is AccumulationOwner.ENGINE and is_own_call

    def reason_unsupported(self, law: str, support: SettingSupport) -> str:
        """Return the reason why the law named ``law`` is not stated for this setting, or '' if it is."""
        if self.accumulation_steps > 1 and support is SettingSupport.OPTIONS_ONLY:
            return f"{law} is not stated for the window {self.window}: {support.value}"
        if self.backward_call is not BackwardCall.ENGINE and support is not SettingSupport.WINDOWS_AND_CALLS:
            return f"{law} is not stated for {self.backward_call.value}: it calls backward in ways of its own"
        if self.loss_divisor > 1 and self.backward_call is BackwardCall.TENSOR:
            return "an engine cannot count the micro-batches of its caller, who calls loss.backward()"
        return ""


DEFAULT_SETTING = Setting()


def split_settings(settings: Iterable[str]) -> list[str]:
    """Return the parts of all ``settings``, in their order."""
    return [part for setting in settings for part in setting.split(SEPARATOR)]
