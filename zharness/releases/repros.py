"""The catalogue of bug reproductions in ``repro/``: parsed, run on a release, and judged by what they print.

A script runs on its own under ``torchrun``; the second paragraph of its docstring is ``key: value`` lines, the facts of
``Repro``.
"""

from __future__ import annotations

import ast
import itertools
import operator
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path

from zharness.engines import registry
from zharness.errors import HarnessFault, MissingEngine, UsageError
from zharness.releases import overlay

FOLDER = Path(__file__).resolve().parents[2] / "repro"
MARKER = "repro: REPRODUCED: "
NOT_YET = "not yet"
_LINE = re.compile(r"^([a-z]+): +(\S.*)$", re.MULTILINE)
_BOUND = re.compile(r"(<=|>=|==|<|>)([0-9][\w.+!]*)")
_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_UNREGISTERED = {"fsdp1": "torch"}  # engines that no check runs on
_SECONDS = 120.0
_GRACE_SECONDS = 10.0


class Verdict(Enum):
    """How one run of a reproduction ended."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    FAILED_OTHERWISE = "failed otherwise"


@dataclass(frozen=True)
class Repro:
    """One script and the facts of its header.

    ``affects`` is a list of bounds on the release (``>=0.18.3,<=0.19.5``), ``fixed`` the first release without the bug
    or None, ``broken`` a release that shows it where the installed one does not. ``signature`` is part of the error,
    ``ok`` the line that a run without the bug prints.
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

    def sides(self) -> tuple[str | None, ...]:
        """The releases that a run without a chosen one shows: the installed one (None), then the broken one."""
        return (None,) if self.broken is None else (None, self.broken)

    def expected(self, release: str) -> Verdict | None:
        """What ``release`` should show according to the header; None where the header does not say."""
        at = _version(release)
        if self.fixed is not None and at >= _version(self.fixed):
            return Verdict.NOT_REPRODUCED
        bounds = _BOUND.findall(self.affects)
        return Verdict.REPRODUCED if all(_COMPARE[sign](at, _version(bound)) for sign, bound in bounds) else None


@dataclass(frozen=True)
class ReproResult:
    """The verdict of one run, the line that decided it, and all that was printed."""

    repro: Repro
    release: str
    verdict: Verdict
    evidence: str
    expected: Verdict | None
    seconds: float
    command: str
    output: str

    @property
    def as_expected(self) -> bool:
        """Whether the release showed what it should; a run that failed otherwise never did."""
        return self.verdict is not Verdict.FAILED_OTHERWISE and self.expected in (None, self.verdict)


def catalogue(folder: Path = FOLDER) -> tuple[Repro, ...]:
    """Every reproduction, by engine and id. Raises UsageError where there are none or a header is wrong."""
    scripts = sorted(folder.glob("*.py"))
    if not scripts:
        raise UsageError(
            f"no reproductions in {folder}: they are part of a checkout, not of an installed package; "
            "clone the repository and install it with: pip install -e ."
        )
    found = sorted((parse(script) for script in scripts), key=lambda repro: (repro.engine, repro.id))
    for one, other in itertools.pairwise(found):
        if one.id == other.id:
            raise UsageError(f"{one.path.name} and {other.path.name} both have the id {one.id}; ids are unique")
    return tuple(found)


def find(identifier: str, folder: Path = FOLDER) -> Repro:
    """The reproduction with this id (a leading ``#`` is allowed). Raises UsageError for an unknown one."""
    known = {repro.id: repro for repro in catalogue(folder)}
    if identifier.lstrip("#") not in known:
        raise UsageError.unknown("reproduction", identifier, known, "`zharness list repros` says what each one shows")
    return known[identifier.lstrip("#")]


def parse(script: Path) -> Repro:
    """The facts in the docstring of ``script``. Raises UsageError when one is missing or unreadable."""
    paragraphs = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")
    said = dict(_LINE.findall(paragraphs[1])) if len(paragraphs) > 1 else {}
    needed = ("id", "engine", "symptom", "reported", "affects", "fixed", "ranks", "law", "signature", "ok")
    missing = [key for key in needed if key not in said]
    if missing:
        raise UsageError(f"{script}: the docstring lacks the lines {', '.join(f'{key}:' for key in missing)}")
    if not said["ranks"].isdecimal() or int(said["ranks"]) < 1:
        raise UsageError(f"{script}: got ranks: {said['ranks']}; expected a positive number")
    if not all(_BOUND.fullmatch(bound.strip()) for bound in said["affects"].split(",")):
        raise UsageError(f"{script}: got affects: {said['affects']}; expected bounds such as >=0.18.3,<=0.19.5")
    return Repro(
        path=script,
        fixed=None if said["fixed"] == NOT_YET else said["fixed"],
        broken=said.get("broken"),
        ranks=int(said["ranks"]),
        **{key: said[key] for key in needed if key not in ("fixed", "ranks")},
    )


def run(repro: Repro, release: str | None = None, seconds: float = _SECONDS) -> ReproResult:
    """Run ``repro`` on the installed release, or on ``release`` in an overlay of its own, and judge it.

    Raises MissingEngine, or UsageError where the release cannot be had. Nothing that it started outlives it.
    """
    package = distribution(repro.engine)
    installed = _installed(package)
    if release is None or release == installed:
        if installed is None:
            raise MissingEngine(f"{repro.engine} is not installed; try: pip install 'zharness[{repro.engine}]'")
        release, env = installed, dict(os.environ)
    elif package == "torch":
        raise UsageError(
            f"got {repro.engine} of torch {release}, but torch {installed} is installed, an overlay holds no torch; "
            f"install that torch in an environment of its own and run there: zharness repro {repro.id}"
        )
    else:
        env = overlay.environment(overlay.ensure(package, release))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc_per_node={repro.ranks}", str(repro.path)]
    begun = time.monotonic()
    code, output = _launch(command, {**env, **_loopback()}, seconds)
    verdict, evidence = judge(repro, code, output, seconds)
    return ReproResult(
        repro=repro,
        release=release,
        verdict=verdict,
        evidence=evidence,
        expected=repro.expected(release),
        seconds=time.monotonic() - begun,
        command=f"zharness repro {repro.id} --engine {repro.engine}=={release}",
        output=output,
    )


def judge(repro: Repro, code: int | None, output: str, seconds: float = _SECONDS) -> tuple[Verdict, str]:
    """The verdict on a launch that ended with ``code`` (None: at the deadline), and the line that decided it.

    The marker and the signature decide, not the code alone: a script that does not import ends with 1 as well.
    """
    shown = re.search(f"{re.escape(MARKER)}(?P<error>[^\n]*{re.escape(repro.signature)}[^\n]*)", output)
    if code is None:
        return Verdict.FAILED_OTHERWISE, f"did not end within {seconds:.0f} s"
    if shown is not None and code == 1:
        return Verdict.REPRODUCED, shown["error"]
    if repro.ok in output.splitlines() and code == 0:
        return Verdict.NOT_REPRODUCED, repro.ok
    return Verdict.FAILED_OTHERWISE, f"{_cause(output)} (the launcher ended with {code})"


def _cause(output: str) -> str:
    """The line that best says why a launch failed: a rank's signal, else the last exception that is not torchrun's."""
    # Not SIGTERM: with that the launcher ends the ranks that are left when one has failed.
    died = re.search(r"Signal (?!15 )\d+ \(\w+\)", output)
    if died is not None:
        return died[0]
    raised = [line for line in output.splitlines() if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b", line)]
    own = [line for line in raised if "ChildFailedError" not in line]
    lines = own or [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing was printed"


def distribution(engine: str) -> str:
    """The package whose release says which bugs ``engine`` has. Raises UsageError for an unknown engine."""
    return _UNREGISTERED.get(engine) or registry.info(engine).distribution


def _installed(package: str) -> str | None:
    """The installed release of ``package``; of torch without its build (``+cpu``), which decides no bug."""
    try:
        release = metadata.version(package)
        return release.partition("+")[0] if package == "torch" else release
    except metadata.PackageNotFoundError:
        return None


def _version(text: str) -> tuple[int, ...]:
    """The release numbers of ``text``; what follows ``+`` names a build."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))


def _loopback() -> dict[str, str]:
    """Ranks of one machine need no other interface, and a host name that does not resolve must not stop them."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _launch(command: list[str], env: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Exit code (None: ended at the deadline) and output. The whole tree of processes is gone on return."""
    with tempfile.TemporaryDirectory() as logs, open(Path(logs) / "output", "wb") as output:
        # A file, not a pipe: a rank that outlived its launcher would keep a pipe open and the reader waiting.
        # A session of its own: Ctrl-C reaches this process alone, which then ends the tree in order.
        child = subprocess.Popen(
            # A log for each rank: what they write into one file at the same time is not lines any more.
            [*command[:3], f"--log-dir={logs}", "--redirects=3", *command[3:]],
            env={"OMP_NUM_THREADS": "1", **env},  # torchrun's own default, set here so that it does not warn
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
        written = [*sorted(Path(logs).rglob("std*.log")), Path(logs) / "output"]
        return code, "\n".join(file.read_text(errors="replace") for file in written)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End ``child`` and what it started: its ranks have sessions of their own, so one killpg does not reach them."""
    if child.poll() is not None:
        return
    family = _descendants(child.pid)
    child.terminate()  # the launcher ends its ranks in answer
    try:
        child.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
    # Only who is still the same process: a number may have been given to another one meanwhile.
    for pid in family & _processes().keys():
        with suppress(ProcessLookupError):
            _kill(pid[0])
    try:
        child.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired as alive:
        raise HarnessFault(f"process {child.pid} of a reproduction cannot be ended") from alive


def _kill(pid: int) -> None:
    """Kill a process and wait for its end, which on a busy machine comes a while later."""
    ended = os.pidfd_open(pid)  # there wherever /proc is, from which its number was read
    try:
        os.kill(pid, signal.SIGKILL)
        wait([ended], timeout=_GRACE_SECONDS)
    finally:
        os.close(ended)


def _processes() -> dict[tuple[int, str], int]:
    """Every process (number and start time) and its parent, where the system lists them; empty where it does not."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we were looking
            fields = status.read_text().rpartition(")")[2].split()
            found[int(status.parent.name), fields[19]] = int(fields[1])
    return found


def _descendants(pid: int) -> set[tuple[int, str]]:
    """The processes below ``pid``."""
    parents = _processes()
    found: set[tuple[int, str]] = set()
    left = [pid]
    while left:
        above = left.pop()
        below = {process for process, parent in parents.items() if parent == above}
        found |= below
        left += [process[0] for process in below]
    return found
