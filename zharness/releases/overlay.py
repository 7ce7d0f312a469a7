"""Overlays: a release of an engine in a folder of its own, which a child process puts in front of what is installed.

An overlay is built beside its place and renamed into it, so whatever stands in the place is whole; the stamp inside
says for which Python and torch. Two processes that want the same one wait for each other. Once built it needs no
network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import torch

from zharness.errors import UsageError

_STAMP = ".zharness-overlay.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RELEASE = re.compile(r"[0-9][A-Za-z0-9.+!]*")
_KNOWN = re.compile(r"\(from versions: ([^)]*)\)")
_OFFLINE = ("Failed to establish a new connection", "Temporary failure in name resolution", "Connection refused")
_INSTALL_SECONDS = 600.0
_IMPORT_SECONDS = 120.0


@dataclass(frozen=True)
class Stamp:
    """What an overlay was built of and for."""

    distribution: str
    release: str
    python: str
    torch: str


def cache() -> Path:
    """The folder of everything that can be made again: ``$ZHARNESS_CACHE``, else ``zharness`` in the user's cache."""
    chosen = os.environ.get("ZHARNESS_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zharness"


def ensure(distribution: str, release: str) -> Path:
    """The overlay that holds ``release`` of ``distribution``; installed now unless a whole one is there.

    Raises UsageError when the release does not exist, cannot be fetched, does not install or does not import.
    """
    wanted = _stamp(distribution, release)
    place = cache() / "releases" / f"{distribution}-{release}-py{wanted.python}-torch{wanted.torch}"
    if _is_whole(place, wanted):
        return place
    with _alone(place):
        # Whoever held the lock may have built it meanwhile.
        if not _is_whole(place, wanted):
            _build(place, wanted)
    return place


def environment(path: Path) -> dict[str, str]:
    """This process's environment for a child in which the overlay ``path`` hides the installed release."""
    behind = os.environ.get("PYTHONPATH")
    chosen = {
        "PYTHONPATH": os.pathsep.join([str(path), behind] if behind else [str(path)]),
        # Releases that share one extension cache load each other's compiled operations.
        "TORCH_EXTENSIONS_DIR": str(path / ".torch_extensions"),
        # No operation is compiled ahead of time: minutes of compiler for what a test never calls.
        "DS_BUILD_OPS": "0",
    }
    return {**_accelerator(), **os.environ, **chosen}


def _accelerator() -> dict[str, str]:
    """DS_ACCELERATOR=cpu where there is no other; asked by NVML, as a process that forks ranks must not touch CUDA."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _stamp(distribution: str, release: str) -> Stamp:
    # Both become part of a path and of a command line.
    if not _NAME.fullmatch(distribution):
        raise UsageError(f"got distribution {distribution!r}; expected a package name such as deepspeed")
    if not _RELEASE.fullmatch(release):
        raise UsageError(f"got release {release!r} of {distribution}; expected a version such as 0.18.8")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Stamp(distribution, release, python, str(torch.__version__))


def _is_whole(place: Path, wanted: Stamp) -> bool:
    try:
        found = json.loads((place / _STAMP).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return bool(found == asdict(wanted))


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Only one process builds ``place``; the lock is the operating system's, so a killed holder lets go of it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(str(place.parent / f".{place.name}.lock"), timeout=_INSTALL_SECONDS + _IMPORT_SECONDS)
    try:
        lock.acquire()
    except filelock.Timeout as late:
        raise UsageError(
            f"another process has been building {place.name} for too long; end it, or set ZHARNESS_CACHE elsewhere"
        ) from late
    try:
        yield
    finally:
        lock.release()


def _build(place: Path, wanted: Stamp) -> None:
    prefix = f".{place.name}.building-"
    for left in place.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)  # of a process that was killed: we hold the lock, so nobody is in there
    beside = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
    try:
        _install(beside, wanted)
        _check_import(beside, wanted)
        (beside / _STAMP).write_text(json.dumps(asdict(wanted)))
        if place.exists():
            shutil.rmtree(place)  # without a valid stamp it is nobody's
        os.replace(beside, place)
    finally:
        # A KeyboardInterrupt comes through here too.
        shutil.rmtree(beside, ignore_errors=True)


def _install(folder: Path, wanted: Stamp) -> None:
    # No build isolation: DeepSpeed's setup.py then sees the torch in use, and nothing else is fetched for the build.
    # No dependencies: they come from the environment that the overlay is laid over.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--target", str(folder)]
    command += [f"{wanted.distribution}=={wanted.release}"]
    done = _run(command, environment(folder), _INSTALL_SECONDS, wanted)
    if done.returncode != 0:
        raise UsageError(_why(done.stdout, wanted))


def _check_import(folder: Path, wanted: Stamp) -> None:
    """Import it in a child and compare the version: a release that is not the one asked for must not be tested."""
    module = wanted.distribution.replace("-", "_")
    code = f"import {module}; print('version:', {module}.__version__, 'file:', {module}.__file__)"
    done = _run([sys.executable, "-c", code], environment(folder), _IMPORT_SECONDS, wanted)
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode != 0:
        raise UsageError(
            f"{wanted.distribution} {wanted.release} does not import with torch {wanted.torch} on Python "
            f"{wanted.python}: {lines[-1]}; try another release"
        )
    told = re.search(r"version: (\S+) file: (.*)", done.stdout)
    if told is None or told[1].split("+")[0] != wanted.release.split("+")[0] or not told[2].startswith(str(folder)):
        raise UsageError(
            f"got {lines[-1]!r} where {wanted.distribution} {wanted.release} was installed into {folder}; "
            "remove what shadows it from PYTHONPATH"
        )


def _run(command: list[str], env: dict[str, str], seconds: float, wanted: Stamp) -> subprocess.CompletedProcess[str]:
    # A folder of its own: ``python -c`` puts the current one first on the path, where a checkout hides the overlay.
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            return subprocess.run(
                command, env=env, cwd=elsewhere, timeout=seconds, text=True, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise UsageError(
                f"{wanted.distribution} {wanted.release} was not ready after {seconds:.0f} s; try: {_retry(wanted)}"
            ) from late


def _why(output: str, wanted: Stamp) -> str:
    """One sentence for a pip that failed."""
    subject, retry = f"{wanted.distribution}=={wanted.release}", _retry(wanted)
    known = _KNOWN.search(output)
    releases = [] if known is None or known[1] == "none" else known[1].split(", ")
    if releases:
        newest = ", ".join(releases[-8:])
        return f"{subject} does not exist; the newest of {len(releases)} releases are: {newest}"
    if known is not None or any(text in output for text in _OFFLINE):
        return f"{subject} cannot be fetched: no such package, or no network; once it is there, try: {retry}"
    if "No space left on device" in output:
        return f"{subject} does not fit on the disk of {cache()}; free some, or set ZHARNESS_CACHE to another folder"
    errors = [line.strip() for line in output.splitlines() if "error" in line.lower() or "No module named" in line]
    last = errors[-1] if errors else (output.strip().splitlines() or ["pip gave no reason"])[-1]
    return f"{subject} does not install: {last}; see the whole output with: {retry}"


def _retry(wanted: Stamp) -> str:
    return f"python -m pip download --no-deps --no-build-isolation {wanted.distribution}=={wanted.release}"
