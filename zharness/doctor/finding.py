"""Define the results of the inspections that ``zharness doctor`` runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """The severity of a finding: no problem, a warning, or a problem that prevents runs or makes them untrustworthy."""

    OK = "ok"
    WARNING = "warning"  # the harness runs, but slower or with fewer features
    PROBLEM = "problem"  # ranks cannot run, or their results cannot be trusted


@dataclass(frozen=True)
class Finding:
    """The result of one inspection: its title, severity and observation; ``remedy`` is empty if nothing is wrong."""

    title: str
    severity: Severity
    observation: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the finding as a dictionary that can be written as JSON."""
        return {"what": self.title, "state": self.severity.value, "found": self.observation, "remedy": self.remedy}


def ok_finding(title: str, observation: object) -> Finding:
    """Return a finding with severity OK and no remedy."""
    return Finding(title, Severity.OK, str(observation))


def make_finding(title: str, observation: object, severity: Severity, is_bad: bool, remedy: str) -> Finding:
    """Return a finding with ``severity`` and ``remedy`` if ``is_bad`` is True, or with severity OK and no remedy."""
    return Finding(title, severity, str(observation), remedy) if is_bad else ok_finding(title, observation)


def format_bytes(byte_count: float) -> str:
    """Format a number of bytes with a unit, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if byte_count < 1024:
            return f"{byte_count:.4g} {unit}"
        byte_count /= 1024
    return f"{byte_count:.4g} GiB"
