"""Parse the bug reproductions in ``repro/``, run them on a release, and judge their output.

An installed package has the folder as ``zharness/repro``. Each script also runs without this package, under
``torchrun``. The second paragraph of a script's docstring, its header, has lines of the form ``key: value``, which give
the fields of ``Repro``.
"""

from __future__ import annotations

import ast
import operator
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from zharness.engines import registry
from zharness.errors import UsageError
from zharness.releases import launch, overlay
from zharness.releases.prepared_release import PreparedRelease, get_installed_version

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED_FOLDER = _PACKAGE / "repro"  # pyproject.toml gives it this name
REPRO_FOLDER = _INSTALLED_FOLDER if _INSTALLED_FOLDER.is_dir() else _PACKAGE.parent / "repro"
PACKAGE_FILE = "__init__.py"  # the only file of an installed folder that is not a script
MARKER = "repro: REPRODUCED: "
NOT_YET = "not yet"
CUDA = "cuda"
SCHEMA_VERSION = 1
_ID = re.compile(r"#?\d[\w-]*|\w+(-\w+)+")
_LINE = re.compile(r"^([a-z]+): +(\S.*)$", re.MULTILINE)
_BOUND = re.compile(r"(<=|>=|==|<|>)([0-9][\w.+!]*)")
_COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
TIMEOUT_SECONDS = 300.0  # long enough that only a hang reaches it, even on a busy machine


class ReproVerdict(Enum):
    """The verdict of one run of a reproduction: whether the run shows the bug, or why this is unknown."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    FAILED_OTHERWISE = "failed otherwise"
    UNSUPPORTED = "unsupported"  # not run, because a requirement is missing
    NOT_RUN = "not run"  # the release cannot be installed


@dataclass(frozen=True)
class Repro:
    """One reproduction: the path of its script and the fields of the script's header.

    ``affects`` is a list of bounds on the release, such as ``>=0.18.3,<=0.19.5``. ``fixed`` is the first release
    without the bug (None: not fixed yet). ``broken`` is a release that shows the bug if the installed one does not.
    ``needs`` is ``cuda`` if the bug does not show on a CPU, else empty. ``signature`` is a part of the error message,
    and ``ok`` is the line that a run without the bug prints.
    """

    path: Path
    id: str
    engine: str
    symptom: str
    reported: str
    affects: str
    fixed: str | None
    broken: str | None
    ranks: int
    law: str
    signature: str
    ok: str
    needs: str = ""

    def default_releases(self) -> tuple[str, ...]:
        """Return the default releases to run, as ``--on`` spells them: one that has the fix and one that has the bug.

        If the installed release has the fix, the installed release is the first one. A release of torch that is not
        installed is returned only if it is in the cache, since its download takes several GB.
        """
        package = get_distribution(self.engine)
        installed = get_installed_version(package)
        shows = self.engine if self.broken is None else f"{self.engine}=={self.broken}"
        sides: tuple[str, ...] = (shows,)
        if self.fixed is not None:
            has_fix = installed is not None and self.expected_verdict(installed) is ReproVerdict.NOT_REPRODUCED
            sides = (self.engine if has_fix else f"{self.engine}=={self.fixed}", shows)
        cheap = [side for side in dict.fromkeys(sides) if package != overlay.TORCH or _is_available(side, installed)]
        return tuple(cheap) or (self.engine,)

    def expected_verdict(self, release: str) -> ReproVerdict | None:
        """Return the verdict that the header predicts for ``release``, or None if the header predicts nothing."""
        try:
            at = _parse_version(release)
        except InvalidVersion:  # a release that cannot be installed has no version
            return None
        if self.fixed is not None and at >= _parse_version(self.fixed):
            return ReproVerdict.NOT_REPRODUCED
        bounds = _BOUND.findall(self.affects)
        return (
            ReproVerdict.REPRODUCED
            if all(_COMPARE[sign](at, _parse_version(bound)) for sign, bound in bounds)
            else None
        )


@dataclass(frozen=True)
class ReproResult:
    """The result of one run: the verdict, the line that decided it, and the whole output."""

    repro: Repro
    release: str
    verdict: ReproVerdict
    evidence: str
    expected_verdict: ReproVerdict | None
    command: str
    seconds: float = 0.0
    output: str = ""

    @property
    def is_expected(self) -> bool:
        """Return whether the verdict does not contradict the header's prediction.

        The result is False for the verdicts FAILED_OTHERWISE and NOT_RUN, and True for UNSUPPORTED.
        """
        if self.verdict is ReproVerdict.UNSUPPORTED:
            return True
        return self.verdict in (ReproVerdict.REPRODUCED, ReproVerdict.NOT_REPRODUCED) and self.expected_verdict in (
            None,
            self.verdict,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the result as a dictionary that can be written as a JSON line."""
        return {
            "schema": SCHEMA_VERSION,
            "repro": self.repro.id,
            "engine": self.repro.engine,
            "release": self.release,
            "torch_version": overlay.torch_version(),
            "verdict": self.verdict.value,
            "expected": self.expected_verdict.value if self.expected_verdict is not None else None,
            "as_expected": self.is_expected,
            "evidence": self.evidence,
            "law": self.repro.law,
            "reported": self.repro.reported,
            "seconds": round(self.seconds, 4),
            "command": self.command,
            "output": self.output,
            "machine": describe_machine(),
        }


def load_catalogue(folder: Path = REPRO_FOLDER) -> tuple[Repro, ...]:
    """Return all reproductions in ``folder``, sorted by engine and id.

    Raises UsageError if there are none, if a header is wrong, or if two scripts have the same id.
    """
    scripts = sorted(path for path in folder.glob("*.py") if path.name != PACKAGE_FILE)
    if not scripts:
        raise UsageError(f"found no reproduction in {folder}; expected scripts that end in .py; install zharness again")
    found = sorted((parse_repro(script) for script in scripts), key=lambda repro: (repro.engine, repro.id))
    by_id: dict[str, Repro] = {}
    for repro in found:
        other = by_id.setdefault(repro.id, repro)
        if other is not repro:
            raise UsageError(f"{other.path.name} and {repro.path.name} both have the id {repro.id}; change one")
    return tuple(found)


def find_repros(identifier: str, folder: Path = REPRO_FOLDER) -> tuple[Repro, ...]:
    """Return the reproduction with the id ``identifier``, or all reproductions of the issue with this number.

    A leading ``#`` is ignored. Raises UsageError if no reproduction matches.
    """
    known = {repro.id: repro for repro in load_catalogue(folder)}
    wanted = identifier.lstrip("#")
    found = [repro for id_, repro in known.items() if id_ == wanted]
    # Several reproductions of one issue have ids such as 8026-func and 8026-autograd.
    found = found or [repro for id_, repro in known.items() if wanted.isdecimal() and id_.startswith(f"{wanted}-")]
    if not found:
        raise UsageError.unknown_name(
            "reproduction", identifier, sorted(known), "`zharness list repros` says what each one shows"
        )
    return tuple(found)


def find_repro(engine: str, identifier: str, folder: Path = REPRO_FOLDER) -> Repro:
    """Return the only reproduction of ``engine`` that ``identifier`` names.

    Raises UsageError unless ``identifier`` names exactly one reproduction of ``engine``.
    """
    found = [repro for repro in find_repros(identifier, folder) if repro.engine == engine]
    if len(found) != 1:
        several = ", ".join(repro.id for repro in found) or "none"
        raise UsageError(
            f"{identifier} must name one reproduction of {engine}, but matches {several}; "
            "`zharness list repros` lists all of them"
        )
    return found[0]


def is_repro_id(text: str) -> bool:
    """Return whether ``text`` has the form of a reproduction's id. No name of a law or group has this form."""
    return _ID.fullmatch(text) is not None


def parse_repro(script: Path) -> Repro:
    """Return the reproduction that the docstring of ``script`` describes.

    Raises UsageError if a line of the header is missing or malformed.
    """
    paragraphs = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")
    facts = dict(_LINE.findall(paragraphs[1])) if len(paragraphs) > 1 else {}
    needed = ("id", "engine", "symptom", "reported", "affects", "fixed", "ranks", "law", "signature", "ok")
    missing = [key for key in needed if key not in facts]
    if missing:
        raise UsageError(f"{script}: the docstring lacks the lines {', '.join(f'{key}:' for key in missing)}")
    if not facts["ranks"].isdecimal() or int(facts["ranks"]) < 1:
        raise UsageError(f"{script}: got the line ranks: {facts['ranks']}; expected a positive integer")
    bounds = [_BOUND.fullmatch(bound.strip()) for bound in facts["affects"].split(",")]
    if not all(bound and _is_version(bound[2]) for bound in bounds):
        raise UsageError(
            f"{script}: got the line affects: {facts['affects']}; expected bounds such as >=0.18.3,<=0.19.5"
        )
    named = [facts[key] for key in ("fixed", "broken") if facts.get(key, NOT_YET) != NOT_YET]
    if not all(map(_is_version, named)):
        raise UsageError(
            f"{script}: got fixed and broken releases {', '.join(named)}; expected releases such as 0.18.8"
        )
    if facts.get("needs", CUDA) != CUDA:
        raise UsageError(f"{script}: got the line needs: {facts['needs']}; allowed: {CUDA}")
    return Repro(
        path=script,
        fixed=None if facts["fixed"] == NOT_YET else facts["fixed"],
        broken=facts.get("broken"),
        needs=facts.get("needs", ""),
        ranks=int(facts["ranks"]),
        **{key: facts[key] for key in needed if key not in ("fixed", "ranks")},
    )


def run_repro(
    repro: Repro,
    engine: str,
    environment: PreparedRelease,
    seconds: float = TIMEOUT_SECONDS,
    command_group: launch.CommandGroup | None = None,
) -> ReproResult:
    """Run ``repro`` on ``engine`` in ``environment`` and judge its output.

    If the script needs CUDA and this machine has no GPU, the script is not run and the verdict is UNSUPPORTED. All
    processes that the run started are ended.
    """
    if repro.needs == CUDA and not overlay.has_cuda():
        return build_result(
            repro, engine, environment.release, ReproVerdict.UNSUPPORTED, "needs CUDA, and this machine has none"
        )
    begun = time.monotonic()
    code, output = run_script(repro.path, repro.ranks, environment, seconds, command_group)
    verdict, evidence = judge_output(repro, code, output, seconds)
    return replace(
        build_result(repro, engine, environment.release, verdict, evidence),
        seconds=time.monotonic() - begun,
        output=output,
    )


def run_script(
    path: Path,
    ranks: int,
    environment: PreparedRelease,
    seconds: float = TIMEOUT_SECONDS,
    command_group: launch.CommandGroup | None = None,
) -> tuple[int | None, str]:
    """Run the script at ``path`` under torchrun in ``environment``; return the exit code and the output.

    The exit code is None if the run was ended after ``seconds``.
    """
    arguments = [sys.executable, "--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={ranks}", str(path)]
    env = {**(environment.environment or os.environ), **_loopback_environment()}
    return launch.run_torchrun(arguments, env, seconds, command_group or launch.CommandGroup())


def build_result(repro: Repro, engine: str, release: str, verdict: ReproVerdict, evidence: str) -> ReproResult:
    """Return a result with the given verdict and evidence, in which the time and the output are still empty.

    ``engine`` is the release as the user named it; ``release`` is its version, or empty if the version is unknown.
    """
    is_checkout = registry.is_checkout(engine)
    again = engine if is_checkout or not release else f"{repro.engine}=={release}"
    return ReproResult(
        repro=repro,
        release=f"@ {release}".rstrip() if is_checkout else release,
        verdict=verdict,
        evidence=evidence,
        # The version of a checkout does not determine which fixes and bugs it has.
        expected_verdict=None if is_checkout else repro.expected_verdict(release),
        command=f"zharness repro {repro.id} --on {again}",
    )


def describe_machine() -> str:
    """Return the version of Python, the operating system and the kind of device, as in ``Python 3.12.3, Linux-6.1``."""
    device = "CUDA, nccl" if overlay.has_cuda() else "CPU, gloo"
    return f"Python {platform.python_version()}, {platform.platform()}, {device}"


def get_distribution(engine: str) -> str:
    """Return the name of the package that contains ``engine``; its release determines which bugs ``engine`` has.

    Raises UsageError for an unknown engine.
    """
    return registry.info(engine).distribution


def judge_output(
    repro: Repro, code: int | None, output: str, seconds: float = TIMEOUT_SECONDS
) -> tuple[ReproVerdict, str]:
    """Return the verdict of a run that ended with the exit code ``code``, and the line of the output that decided it.

    ``code`` is None if the run was ended at the deadline. The verdict depends on the marker and the signature as well
    as on the exit code, because a script that cannot be imported also ends with 1.
    """
    shown = re.search(f"{re.escape(MARKER)}(?P<error>[^\n]*{re.escape(repro.signature)}[^\n]*)", output)
    if code is None:
        return ReproVerdict.FAILED_OTHERWISE, f"did not end within {seconds:.0f} s"
    if shown is not None and code == 1:
        return ReproVerdict.REPRODUCED, shown["error"]
    if repro.ok in output.splitlines() and code == 0:
        return ReproVerdict.NOT_REPRODUCED, repro.ok
    return ReproVerdict.FAILED_OTHERWISE, f"{_failure_cause(output)} (the launcher ended with {code})"


def _failure_cause(output: str) -> str:
    """Return the line that best explains a failed run: the signal that ended a rank, else the last exception.

    Exceptions that torchrun itself raises are ignored.
    """
    # SIGTERM does not count, because torchrun sends it to the remaining ranks after a failure.
    died = re.search(r"Signal (?!15 )\d+ \(\w+\)", output)
    if died is not None:
        return died[0]
    raised = [line for line in output.splitlines() if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b", line)]
    errors = [line for line in raised if "ChildFailedError" not in line]
    lines = errors or [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing was printed"


def _is_available(engine: str, installed_version: str | None) -> bool:
    """Return whether the release of torch that ``engine`` names is installed or in the cache."""
    release = registry.split_release(engine)[1]
    if release is None or (installed_version is not None and registry.is_same_release(release, installed_version)):
        return True
    return overlay.is_cached(overlay.TORCH, release)


def _parse_version(text: str) -> Version:
    """Return ``text`` as a version without its local version (after ``+``).

    Raises InvalidVersion if ``text`` is not a version.
    """
    return Version(text.partition("+")[0])


def _is_version(text: str) -> bool:
    """Return whether ``text`` is a version."""
    try:
        return bool(_parse_version(text))
    except InvalidVersion:
        return False


def _loopback_environment() -> dict[str, str]:
    """Return the environment variables that make gloo use the loopback interface.

    With this interface, gloo works even if the host name does not resolve.
    """
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
