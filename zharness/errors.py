"""Define the exceptions that this package raises on purpose."""

from __future__ import annotations


class ZHarnessError(Exception):
    """Base class of the errors that this package raises on purpose."""


class UsageError(ZHarnessError):
    """Raised if the caller passed a value that does not exist or cannot be used on this machine.

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
    """Raised if an engine configuration has a key or a value that the engine does not support."""


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
