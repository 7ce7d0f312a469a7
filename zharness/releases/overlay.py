"""Build overlays: folders with one release of an engine each, put before the installed packages on the import path.

An overlay is built in a temporary folder and then renamed, so a folder with an overlay's name is complete. A stamp file
in the overlay records the Python and the torch for which it was built. A lock lets only one process build an overlay at
a time. Using a finished overlay needs no network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
from tqdm import tqdm

from zharness.environment import set_variables
from zharness.errors import UsageError
from zharness.releases import launch, usage_locks

TORCH = "torch"
STAMP_FILE = ".zharness-overlay.json"
BUILDING_INFIX = ".building-"  # part of the names of folders that are being built or removed
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RELEASE = re.compile(r"[0-9][A-Za-z0-9.+!]*")
_NEEDS_PYTHON = r"[:;] {} Requires-Python ([^;\n]+)"
_KNOWN_RELEASES = re.compile(r"\(from versions: ([^)]*)\)")
_RAISED_ERROR = re.compile(r"^\s*([\w.]*(?:Error|Exception): \S.*)$", re.MULTILINE)  # the last line of a traceback
_OFFLINE_MESSAGES = (
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Connection refused",
)
_SPACE_HINT = "free some space, or set ZHARNESS_CACHE (for temporary files TMPDIR) to another folder"
_INSTALL_SECONDS = 1800.0  # torch with CUDA's libraries is several GB
_IMPORT_SECONDS = 300.0


@dataclass(frozen=True)
class Stamp:
    """The release that an overlay contains, and the Python and torch for which it was built."""

    distribution: str
    release: str
    python: str
    torch: str

    def __str__(self) -> str:
        """Return the name of the package and its release."""
        return f"{self.distribution} {self.release}"


def cache_folder() -> Path:
    """Return the cache folder: ``$ZHARNESS_CACHE`` if it is set, else ``zharness`` in the user's cache folder."""
    chosen = os.environ.get("ZHARNESS_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zharness"


def ensure_overlay(distribution: str, release: str) -> Path:
    """Return the folder of the overlay with ``release`` of ``distribution``; build the overlay if it is missing.

    Raises UsageError if the release does not exist, or cannot be downloaded, installed or imported.
    """
    wanted = _make_stamp(distribution, release)
    folder = _overlay_path(wanted)
    with cache_write_guard(str(wanted)):
        usage_locks.mark_in_use(folder)
    if _is_whole(folder, wanted):
        return folder
    with cache_write_guard(str(wanted)), build_lock(folder):
        # Another process may have built it while this one waited for the lock.
        if not _is_whole(folder, wanted):
            _build(folder, wanted)
    return folder


def is_cached(distribution: str, release: str) -> bool:
    """Return whether the cache contains a complete overlay of ``release`` of ``distribution``."""
    wanted = _make_stamp(distribution, release)
    return _is_whole(_overlay_path(wanted), wanted)


@contextmanager
def cache_write_guard(subject: str) -> Iterator[None]:
    """Turn an OSError raised in the block (disk full, no permission) into a UsageError that names ``subject``."""
    try:
        yield
    except OSError as error:
        file_name = error.filename or ""
        raise UsageError(
            f"{subject} cannot be put into {cache_folder()}: {error.strerror or error}"
            f"{file_name and f': {file_name}'}; {_SPACE_HINT}"
        ) from error


def overlay_environment(path: Path, extensions_folder: Path | None = None) -> dict[str, str]:
    """Return the environment of a child process in which the release in ``path`` hides the installed one.

    Compiled extensions are stored in ``extensions_folder`` (None: in ``path``).
    """
    existing_path = os.environ.get("PYTHONPATH")
    chosen = {
        "PYTHONPATH": os.pathsep.join([str(path), existing_path] if existing_path else [str(path)]),
        # Releases that share one extension cache load each other's compiled operations.
        "TORCH_EXTENSIONS_DIR": str((extensions_folder or path) / ".torch_extensions"),
        # Compiling all operations ahead of time takes minutes, and tests call few of them.
        "DS_BUILD_OPS": "0",
    }
    accelerator = {} if has_cuda() else {"DS_ACCELERATOR": "cpu"}
    return {**accelerator, **os.environ, **chosen}


def has_cuda() -> bool:
    """Return whether this machine has a GPU that torch can use.

    The check uses NVML, because a process that forks ranks must not initialise CUDA.
    """
    if torch_version().endswith("+cpu"):
        return False
    import torch

    with set_variables({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


def torch_version() -> str:
    """Return ``torch.__version__`` with its local version such as ``+cpu``, without importing torch if possible.

    The version is read from torch's file ``version.py``, because importing torch takes seconds. Package metadata cannot
    be used: in a wheel from PyPI it lacks the local version, and in a source tree it is out of date.
    """
    spec = None if TORCH in sys.modules else importlib.util.find_spec(TORCH)
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin is not None else None
    if file is not None and file.is_file():
        text = file.read_text(encoding="utf-8")
        if match := re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE):
            return match[1]
    import torch

    return str(torch.__version__)


def check_name(distribution: str) -> None:
    """Raise UsageError unless ``distribution`` is a valid package name, because paths and commands contain the name."""
    if not _NAME.fullmatch(distribution):
        raise UsageError(f"got distribution {distribution!r}; expected a package name such as deepspeed")


def _make_stamp(distribution: str, release: str) -> Stamp:
    """Return the stamp of a release for this Python and torch.

    Raises UsageError if ``distribution`` is not a package name or ``release`` is not a version.
    """
    check_name(distribution)
    if not _RELEASE.fullmatch(release):
        raise UsageError(f"got release {release!r} of {distribution}; expected a version such as 0.18.8")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    # An overlay of torch depends on no other torch.
    torch_release = release if distribution == TORCH else torch_version()
    return Stamp(distribution, release, python, torch_release)


def _overlay_path(wanted: Stamp) -> Path:
    """Return the path of the overlay that has the stamp ``wanted``."""
    return cache_folder() / "releases" / f"{wanted.distribution}-{wanted.release}-py{wanted.python}-torch{wanted.torch}"


def _is_whole(folder: Path, wanted: Stamp) -> bool:
    """Return whether ``folder`` contains a complete overlay with the stamp ``wanted``."""
    try:
        found = json.loads((folder / STAMP_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return bool(found == asdict(wanted))


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """Hold the lock that lets only one process at a time build ``folder``.

    The operating system frees the lock if the process is killed. A process that has to wait for the lock prints a line
    to standard error. Raises UsageError if the lock is not free before the time-out.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(str(folder.parent / f".{folder.name}.lock"), timeout=_INSTALL_SECONDS + _IMPORT_SECONDS)
    try:
        with suppress(filelock.Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            tqdm.write(f"waiting for another process that builds {folder.name}", file=sys.stderr)
            lock.acquire()
    except filelock.Timeout as error:
        raise UsageError(
            f"another process has been building {folder.name} for too long; end that process, or set ZHARNESS_CACHE"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, wanted: Stamp) -> None:
    """Install a release in a temporary folder, check that it can be imported, and rename the folder to ``folder``."""
    prefix = f".{folder.name}{BUILDING_INFIX}"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)  # left by a killed process: this process has the lock, so no other uses the folder
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        with tqdm(desc=f"installing {wanted}", bar_format="{desc}", leave=False, disable=not sys.stderr.isatty()):
            _install(temporary, wanted)
            _check_import(temporary, wanted)
        (temporary / STAMP_FILE).write_text(json.dumps(asdict(wanted)))
        if folder.exists():
            shutil.rmtree(folder)  # incomplete: it has no valid stamp
        os.replace(temporary, folder)
    finally:
        # This also runs on KeyboardInterrupt.
        shutil.rmtree(temporary, ignore_errors=True)


def _install(folder: Path, wanted: Stamp) -> None:
    """Install a release into ``folder`` with pip. Raises UsageError if pip fails."""
    # Without build isolation DeepSpeed's setup.py uses the installed torch, and nothing is downloaded for the build.
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--target", str(folder)]
    # Dependencies come from the installed environment. Only torch pins exact releases of its dependencies (CUDA's
    # libraries, sympy), so the dependencies of torch are installed with it.
    command += [] if wanted.distribution == TORCH else ["--no-deps"]
    command += [f"{wanted.distribution}=={wanted.release}"]
    # The environment's constraints would forbid the requested release.
    env = {**overlay_environment(folder), "PIP_CONSTRAINT": ""}
    done = run_isolated(command, env, _INSTALL_SECONDS, str(wanted), f"; try: {_retry_command(wanted)}")
    if done.returncode != 0:
        raise UsageError(_explain_pip_failure(done.stdout, wanted))


def _check_import(folder: Path, wanted: Stamp) -> None:
    """Import the release from ``folder`` in a child process.

    Raises UsageError if the import fails or the imported version is not the requested version.
    """
    module = wanted.distribution.replace("-", "_")
    found = import_and_get_version(
        folder,
        module,
        overlay_environment(folder),
        str(wanted),
        f"{_other_releases_hint(wanted)}; or use another torch",
    )
    if found.split("+")[0] != wanted.release.split("+")[0]:
        raise UsageError(
            f"{folder} contains version {found} although {wanted} was installed into it; try another release"
        )


def import_and_get_version(folder: Path, module: str, env: Mapping[str, str], subject: str, remedy: str) -> str:
    """Import ``module`` in a child process with the environment ``env`` and return its version, which may be empty.

    Raises UsageError if the import fails, or if the module is imported from outside ``folder``. ``subject`` names the
    release in the error message, and ``remedy`` ends the message if the import fails.
    """
    code = f"import {module} as m; print('version:', getattr(m, '__version__', ''), 'file:', m.__file__)"
    done = run_isolated([sys.executable, "-c", code], env, _IMPORT_SECONDS, f"the import of {subject}")
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode != 0:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        with_torch = "" if module == TORCH else f"with torch {torch_version()} "
        raise UsageError(f"{subject} cannot be imported {with_torch}on Python {python}: {lines[-1]}; {remedy}")
    match = re.search(r"version: (\S*)\s+file: (.*)", done.stdout)
    if match is None or not Path(match[2]).is_relative_to(folder):
        raise UsageError(
            f"expected {subject} in {folder}, but the import gave {lines[-1]!r}; "
            "remove any other folder with this package from PYTHONPATH"
        )
    return match[1]


def run_isolated(
    command: list[str], env: Mapping[str, str] | None, seconds: float, subject: str, remedy: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in a temporary folder, with stdout and stderr merged, and end all processes that it started.

    Raises UsageError if the command has not ended after ``seconds``; the message contains ``subject`` and
    ``remedy``.
    """
    # ``python -c`` puts the current folder first on the path, where a checkout would hide the overlay.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        # Temporary files of an ended command are removed with the folder.
        chosen = {**(os.environ if env is None else env), "TMPDIR": folder}
        with launch.CommandGroup().start(command, chosen, output, Path(folder)) as child:
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired as error:
                raise UsageError(f"{subject} was not ready after {seconds:.0f} s{remedy}") from error
        output.seek(0)
        return subprocess.CompletedProcess(command, code, output.read().decode(errors="replace"))


def _explain_pip_failure(output: str, wanted: Stamp) -> str:
    """Return one sentence that explains why pip failed to install ``wanted``; ``output`` is what pip printed."""
    subject, retry = f"{wanted.distribution}=={wanted.release}", _retry_command(wanted)
    needed = re.search(_NEEDS_PYTHON.format(re.escape(wanted.release)), output)
    if needed is not None:
        return (
            f"{subject} needs Python {needed[1].strip()}, and this is {wanted.python}; {_other_releases_hint(wanted)}"
        )
    known = _KNOWN_RELEASES.search(output)
    releases = [] if known is None or known[1] == "none" else known[1].split(", ")
    if releases:
        newest = ", ".join(releases[-8:])
        return (
            f"{subject} does not exist; the newest of {len(releases)} releases are: {newest}; "
            f"try: {wanted.distribution}=={releases[-1]}"
        )
    if known is not None or any(text in output for text in _OFFLINE_MESSAGES):
        return f"{subject} cannot be downloaded: no such package, or no network; try again with: {retry}"
    if "No space left on device" in output:
        return f"{subject} does not fit on the disk of {cache_folder()}, or of {tempfile.gettempdir()}; {_SPACE_HINT}"
    errors = _RAISED_ERROR.findall(output) or [
        line.strip() for line in output.splitlines() if "error" in line.lower() or "No module named" in line
    ]
    last = errors[-1] if errors else (output.strip().splitlines() or ["pip gave no reason"])[-1]
    return f"{subject} cannot be installed: {last}; see the whole output with: {retry}"


def _other_releases_hint(wanted: Stamp) -> str:
    """Return a hint with the command that lists the other releases of the package."""
    return f"for other releases try: python -m pip index versions {wanted.distribution}"


def _retry_command(wanted: Stamp) -> str:
    """Return the pip command that downloads the release again and shows the whole error."""
    return f"python -m pip download --no-deps --no-build-isolation {wanted.distribution}=={wanted.release}"
