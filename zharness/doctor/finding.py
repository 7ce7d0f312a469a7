"""One line of the doctor's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"  # runs, but slower, or with less than there could be
    PROBLEM = "problem"  # ranks do not run, or what they compute proves nothing


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it where it is not as it should be."""

    title: str
    severity: Severity
    observation: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Plain data."""
        return {"what": self.title, "state": self.severity.value, "found": self.observation, "remedy": self.remedy}


def ok_finding(title: str, observation: object) -> Finding:
    """A finding that asks for nothing."""
    return Finding(title, Severity.OK, str(observation))


def make_finding(title: str, observation: object, severity: Severity, is_bad: bool, remedy: str) -> Finding:
    """``fine``, or where it is ``bad`` a finding of state ``trouble`` with its ``remedy``."""
    return Finding(title, severity, str(observation), remedy) if is_bad else ok_finding(title, observation)


def format_bytes(byte_count: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if byte_count < 1024:
            return f"{byte_count:.4g} {unit}"
        byte_count /= 1024
    return f"{byte_count:.4g} GiB"
