"""One line of the doctor's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"  # runs, but slower, or with less than there could be
    PROBLEM = "problem"  # ranks do not run, or what they compute proves nothing


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it where it is not as it should be."""

    what: str
    state: State
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Plain data."""
        return {"what": self.what, "state": self.state.value, "found": self.found, "remedy": self.remedy}


def fine(what: str, found: object) -> Finding:
    """A finding that asks for nothing."""
    return Finding(what, State.OK, str(found))


def judged(what: str, found: object, trouble: State, bad: bool, remedy: str) -> Finding:
    """``fine``, or where it is ``bad`` a finding of state ``trouble`` with its ``remedy``."""
    return Finding(what, trouble, str(found), remedy) if bad else fine(what, found)


def size(count: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
