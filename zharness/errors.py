"""Define the exceptions that this package raises on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

MAX_LISTED_NAMES = 12  # a longer list is cut if the message says where to find the names
MAX_CLOSE_NAMES = 3
MAX_NAMES_BESIDE_CLOSE = 5  # a list this short is shown beside the close names, because it explains more
MIN_LIKENESS = 0.65  # of SequenceMatcher, from 0 to 1; two swapped letters of three give 0.67
MAX_LIKENESS_LOSS = 0.05  # names that are less close than the closest by more than this are left out


def find_close_names(text: str, names: Sequence[str]) -> list[str]:
    """Return at most three of ``names`` that ``text`` may have been meant to be, the closest first.

    The part after the last dot of a name counts as a name: ``grads`` is close to ``training.grads``.
    """
    wanted = text.lower().strip("*?.")
    if not any(character.isalpha() for character in wanted):
        return []  # no number is meant to be another
    matcher, likeness = SequenceMatcher(b=wanted), dict[str, float]()
    for name in names:
        for spelling in (name.lower(), name.lower().rpartition(".")[2]):
            matcher.set_seq1(spelling)
            likeness[name] = max(likeness.get(name, 0.0), matcher.ratio())
    least = max(MIN_LIKENESS, max(likeness.values(), default=0.0) - MAX_LIKENESS_LOSS)
    close = [name for name in likeness if likeness[name] >= least]
    return sorted(close, key=lambda name: -likeness[name])[:MAX_CLOSE_NAMES]


class ZHarnessError(Exception):
    """Base class of the errors that this package raises on purpose."""


class UsageError(ZHarnessError):
    """Raised if the caller passed a value that does not exist or cannot be used on this machine.

    The message states the value, the allowed values and a remedy; the command line prints it and exits with status 2.
    """

    @classmethod
    def unknown_name(cls, kind: str, value: object, allowed: object, remedy: str = "") -> UsageError:
        """Return the error for a name that is not ``allowed``, an iterable of names or a text that lists them.

        The message names those that are close to ``value``, or else all of them. ``remedy`` is appended to it, and
        says where to find the names if there are many.
        """
        names = [] if isinstance(allowed, str) else [str(name) for name in allowed]  # type: ignore[attr-defined]
        close = find_close_names(str(value), names)
        if close:
            shown = f" Allowed: {', '.join(names)}" if len(names) <= MAX_NAMES_BESIDE_CLOSE else ""
            tail = shown + (f" ({remedy})" if remedy else "")
            return cls(f"unknown {kind} {str(value)!r}; did you mean {' or '.join(map(repr, close))}?{tail}")
        is_long = bool(remedy) and len(names) > MAX_LISTED_NAMES
        listed = [*names[:4], f"... ({len(names)} in all)"] if is_long else names
        tail = f"; {remedy}" if remedy else ""
        shown = allowed if isinstance(allowed, str) else ", ".join(listed) or "none"
        return cls(f"unknown {kind} {str(value)!r}; allowed: {shown}{tail}")


class ConfigError(UsageError):
    """Raised if an engine configuration has a key or a value that the engine does not support."""


class UnknownStage(ConfigError):
    """Raised if an engine is built at a ZeRO stage that it does not have."""


class EngineRefusal(ConfigError):
    """Raised if an engine's own code refuses, while the engine is built, a configuration that it claims to support."""


class MissingEngine(UsageError):
    """Raised if the package of the requested engine is not installed."""


class CheckpointError(UsageError):
    """Raised if a checkpoint is missing, damaged, unsafe to read, of another model, or cannot be written.

    No state was changed when this error is raised.
    """


class EngineContractError(ZHarnessError):
    """Raised if an engine violates the Engine protocol: a method is missing, or a name or a shape is wrong."""


class StaleGraphError(RuntimeError):
    """Raised if a backward needs weights that were changed after its forward.

    The class is a RuntimeError, like the error of plain PyTorch for a saved tensor that was modified in place.
    """


class NonFiniteError(ZHarnessError, FloatingPointError):
    """Raised if a loss or a gradient is infinite or NaN, and the configuration does not skip such steps."""


class WorldError(ZHarnessError):
    """Raised if the machinery that runs ranks failed, for example because the rank server died."""


class HarnessFault(ZHarnessError):
    """Raised for an internal error of the harness, which no engine can cause."""


class RoundedScenarioError(HarnessFault):
    """Raised if plain PyTorch rounds a number of a scenario that has to be exact, so that no engine can be judged.

    In fp32 that is a mistake of the harness. TF32 rounds factors that fp32 holds.
    """
