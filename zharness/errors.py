"""One class per way to be wrong."""

from __future__ import annotations


class ZHarnessError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(ZHarnessError):
    """The caller asked for something that does not exist or cannot be had here.

    The message says what was got, what is allowed and what to do; the command line prints it and exits with 2.
    """

    @classmethod
    def unknown_name(cls, kind: str, value: object, allowed: object, remedy: str = "") -> UsageError:
        """One sentence for a name that is not in a closed list."""
        names = ", ".join(str(name) for name in allowed) if not isinstance(allowed, str) else allowed  # type: ignore[attr-defined]
        tail = f"; {remedy}" if remedy else ""
        return cls(f"unknown {kind} {str(value)!r}; allowed: {names}{tail}")


class ConfigError(UsageError):
    """An engine configuration holds a key or a value that the engine does not honour."""


class MissingEngine(UsageError):
    """An engine is asked for whose package is not installed."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, unsafe to read, another model's, or cannot be written; nothing was changed."""


class EngineContractError(ZHarnessError):
    """An engine does not keep the Engine protocol: a method is missing, a name or a shape is wrong."""


class StaleGraphError(RuntimeError):
    """A backward needs weights that were changed after its forward.

    A RuntimeError, as vanilla PyTorch raises for a saved tensor that was modified in place.
    """


class NonFiniteError(ZHarnessError, FloatingPointError):
    """A loss or a gradient is infinite or not a number, and the configuration does not say to skip such a step."""


class WorldError(ZHarnessError):
    """The rank server itself failed: it died, or its channel broke."""


class HarnessFault(ZHarnessError):
    """The harness broke one of its own promises; never the engine's doing."""
