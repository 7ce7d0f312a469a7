"""Write the names that other pytest plugins define: their options, markers, fixtures and settings of ini files.

    python scripts/plugin_names.py FOLDER [--into suites/pytest_ranks/plugin_names.toml] [PACKAGE ...]

The script installs the newest release of each package, with its requirements, into a folder of its own below FOLDER,
and lists the names in a pytest that has no other plugins. The names of a package include those of the plugins that it
requires, but not those of pytest itself. Without PACKAGEs, the script updates all packages of the file; with PACKAGEs,
it replaces or adds only these. If a package cannot be installed or pytest does not start with it, the package stays in
the file with the reason; some start `--with` an older pytest, or with a package that they do not require.

The file lists the 105 most downloaded packages named ``pytest-*`` or ``*-pytest``, most downloaded first, and 29 of the
most downloaded packages with other names that define a plugin. The script does not see a marker that a plugin reads
without registering it. If ``uv`` is installed, it installs the packages in a tenth of the time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomllib

FILE = Path(__file__).parents[1] / "suites" / "pytest_ranks" / "plugin_names.toml"
KINDS = ("options", "markers", "fixtures", "settings")
INSTALL_SECONDS = 600.0
ASK_SECONDS = 60.0
ANSWER = "NAMES "
PYTEST = "pytest<9.2"  # 9.2 stores fixtures in another attribute than the attribute that ASK reads
ASK = """
import json, re, sys
import pytest

class Names:
    def pytest_collection_finish(self, session):
        parser = session.config._parser
        groups = [*parser._groups, parser._anonymous]
        names = {
            "options": {name for group in groups for known in group.options for name in known.names()},
            "markers": {re.split("[(:]", line)[0].strip() for line in session.config.getini("markers")},
            "fixtures": set(session._fixturemanager._arg2fixturedefs),
            "settings": set(parser._inidict),
        }
        print("NAMES " + json.dumps({kind: sorted(found) for kind, found in names.items()}))

sys.exit(pytest.main([*sys.argv[1:], "-q", "--collect-only", "-p", "no:cacheprovider", "-s"], plugins=[Names()]))
"""


def main() -> int:
    """List the names of the packages on the command line, or of all packages in the file, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--into", type=Path, default=FILE)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--with",
        dest="beside",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="install it beside each package",
    )
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    known: dict[str, Any] = tomllib.loads(options.into.read_text("utf-8")) if options.into.exists() else {}
    python = make_environment(folder / "environment")
    plain = ask(python, folder, "pytest")
    if "failed" in plain:
        print(plain["failed"], file=sys.stderr)
        return 1
    packages = options.packages or list(known.get("plugins", {}))
    with ThreadPoolExecutor(options.jobs) as pool:
        answers = dict(
            zip(packages, pool.map(lambda name: ask(python, folder, name, *options.beside), packages), strict=True)
        )
    plugins = known.get("plugins", {}) | {name: subtract(answer, plain) for name, answer in answers.items()}
    options.into.write_text(as_toml(plugins, plain["version"]), encoding="utf-8")
    return 0


def make_environment(path: Path) -> Path:
    """Make an environment with only pip, unless the environment exists, and return its Python."""
    if not path.exists():
        venv.create(path, with_pip=True)
    return path / "bin" / "python"


def ask(python: Path, folder: Path, package: str, *beside: str) -> dict[str, Any]:
    """Install ``package``, and return its version and its names of each of the KINDS, or the reason of the failure."""
    target, empty = folder / package, folder / "empty"
    empty.mkdir(exist_ok=True)
    (empty / "test_one.py").write_text("def test_one():\n    pass\n", encoding="utf-8")
    needed = [PYTEST] if package == "pytest" else [package, PYTEST, *beside]
    pip = [uv, "pip", "install", "--python", python] if (uv := shutil.which("uv")) else [python, "-m", "pip", "install"]
    try:
        if not target.exists():
            command = [*pip, "-q", "--target", target, *needed]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        names = ask_pytest(empty, python=python, variables={"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"})
    except subprocess.CalledProcessError as error:
        said = [line.strip() for line in (error.stderr or error.stdout or "").splitlines() if line.strip()]
        return {"failed": said[-1] if said else f"exit code {error.returncode}"}
    except subprocess.TimeoutExpired as error:
        return {"failed": f"longer than {error.timeout:.0f} s"}
    print(package, flush=True)
    return {"version": read_version(target, package), **names}


def ask_pytest(
    folder: Path, *arguments: str, python: Path = Path(sys.executable), variables: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Return the names of each of the KINDS that are defined in a pytest that collects the tests in ``folder``.

    Raises CalledProcessError if pytest does not collect.
    """
    command = [str(python), "-c", ASK, *arguments]
    asked = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=ASK_SECONDS,
    )
    for line in asked.stdout.splitlines():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise subprocess.CalledProcessError(asked.returncode, command, asked.stdout, asked.stderr)


def read_version(target: Path, package: str) -> str:
    """Return the version of ``package`` that is installed in the folder ``target``."""
    stem = package.replace("-", "_").replace(".", "_").lower()
    for info in target.glob("*.dist-info"):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        if name.replace(".", "_").lower() == stem:
            return version
    return ""


def subtract(answer: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``answer`` without the names that pytest itself defines."""
    return {
        key: sorted(set(value) - set(plain[key])) if key in KINDS else value
        for key, value in answer.items()
        if key not in KINDS or set(value) - set(plain[key])
    }


def as_toml(plugins: Mapping[str, Mapping[str, Any]], pytest_version: str) -> str:
    """Return the file: one line for each package."""
    lines = [
        "# What other pytest plugins define, beyond pytest itself. Written by: python scripts/plugin_names.py FOLDER",
        f'asked = {datetime.date.today().isoformat()}\npytest = "{pytest_version}"\n\n[plugins]',
    ]
    for name, answer in plugins.items():
        fields = ", ".join(f"{key} = {json.dumps(value)}" for key, value in answer.items())
        lines.append(f"{name} = {{ {fields} }}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
