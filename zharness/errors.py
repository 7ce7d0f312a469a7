"""The exceptions that this package raises on purpose."""

from __future__ import annotations


class ZHarnessError(Exception):
    """Base class of the errors that this package raises on purpose."""


class UsageError(ZHarnessError):
    """The caller passed a value that does not exist or cannot be used on this machine.

    The message states the value, the allowed values and a remedy; the command line prints it and exits with status 2.
    """

    @classmethod
    def unknown_name(cls, kind: str, value: object, allowed: object, remedy: str = "") -> UsageError:
        """Return the error for a name that is not ``allowed``, an iterable of names or a text that lists them.

        ``remedy`` is appended to the message.
        """
        names = ", ".join(str(name) for name in allowed) if not isinstance(allowed, str) else allowed  # type: ignore[attr-defined]
        tail = f"; {remedy}" if remedy else ""
        return cls(f"unknown {kind} {str(value)!r}; allowed: {names}{tail}")


class ConfigError(UsageError):
    """An engine configuration has a key or a value that the engine does not support."""


class MissingEngine(UsageError):
    """The package of the requested engine is not installed."""


class CheckpointError(UsageError):
    """A checkpoint is missing, damaged, unsafe to read, of another model, or cannot be written; no state changed."""


class EngineContractError(ZHarnessError):
    """An engine violates the Engine protocol: a method is missing, or a name or a shape is wrong."""


class StaleGraphError(RuntimeError):
    """A backward needs weights that were changed after its forward.

    A RuntimeError, like the one that plain PyTorch raises for a saved tensor that was modified in place.
    """


class NonFiniteError(ZHarnessError, FloatingPointError):
    """A loss or a gradient is infinite or NaN, and the configuration does not skip such steps."""


class WorldError(ZHarnessError):
    """The machinery that runs ranks failed: the rank server died, a channel broke, or a peer ended an exchange."""


class HarnessFault(ZHarnessError):
    """An internal error of the harness, which no engine can cause."""
