"""Check that a tag, the version, the changelog and the built files of a release agree.

    python scripts/check_release.py [v0.1.0] [--dist dist]

The version is defined in ``zharness/__init__.py``. The tag has to be the version after a ``v``, CITATION.cff has to
repeat the version, and CHANGELOG.md has to begin with the section of the version, ``## 0.1.0 (2026-11-30)``, which must
not be empty. Without a tag, as before a release, the date may also be ``unreleased``. With --dist, the folder has to
contain one wheel and one sdist of that version, and nothing else. The script prints the section, and writes it to the
summary of a workflow. The exit code is 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import email
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1]))

from zharness.step_summary import append_section

ROOT = Path(__file__).parents[1]

_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_CITED_VERSION = re.compile(r"^version: (\S+)$", re.MULTILINE)
_SECTION = re.compile(r"^## (\S+) \(([^)]+)\)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
UNRELEASED = "unreleased"
METADATA = ("Metadata-Version", "Name", "Version", "Summary", "Requires-Python", "License-Expression")


def read_version(root: Path) -> str:
    """Return the version of the sources in ``root``."""
    return _VERSION.findall((root / "zharness" / "__init__.py").read_text(encoding="utf-8"))[0]  # type: ignore[no-any-return]


def find_disagreements(root: Path, tag: str) -> Iterator[str]:
    """Yield a sentence for each text in ``root`` that does not agree with the version, or with a ``tag``."""
    version = read_version(root)
    if str(Version(version)) != version:
        yield f"zharness/__init__.py has the version {version}; its normal form is {Version(version)}"
    if tag and tag != f"v{version}":
        yield f"the tag is {tag}; zharness/__init__.py has the version {version}, whose tag is v{version}"
    cited = _CITED_VERSION.findall((root / "CITATION.cff").read_text(encoding="utf-8"))
    if cited != [version]:
        yield f"CITATION.cff has the version {', '.join(cited) or 'nowhere'}; expected {version}"
    sections = _SECTION.findall((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    named, date, text = sections[0] if sections else ("", "", "")
    if named != version:
        yield f"CHANGELOG.md begins with a section of {named or 'no release'}; expected ## {version} (DATE)"
    elif not text.strip():
        yield f"the section of {version} in CHANGELOG.md is empty"
    if not (_DATE.fullmatch(date) or (date == UNRELEASED and not tag)):
        yield f"the section of {named} in CHANGELOG.md has the date {date!r}; expected YYYY-MM-DD"
    names = [section[0] for section in sections]
    if names != sorted(names, key=Version, reverse=True) or len(set(names)) != len(names):
        yield f"the sections of CHANGELOG.md are not one for each release, from new to old: {', '.join(names)}"


def read_metadata(path: Path) -> tuple[str, str]:
    """Return the version in the name of a built file, and the text of its metadata."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return str(parse_wheel_filename(path.name)[1]), wheel.read(name).decode()
    with tarfile.open(path) as sdist:
        name = next(name for name in sdist.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        member = sdist.extractfile(name)
        assert member is not None, name
        return str(parse_sdist_filename(path.name)[1]), member.read().decode()


def find_wrong_files(root: Path, folder: Path) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with the built files in ``folder``."""
    version, files = read_version(root), sorted(folder.iterdir())
    kinds = sorted(
        "wheel" if path.suffix == ".whl" else "sdist" if path.name.endswith(".tar.gz") else path.name for path in files
    )
    if kinds != ["sdist", "wheel"]:
        yield f"{folder} has {', '.join(kinds) or 'no files'}; expected one sdist and one wheel"
        return
    for path in files:
        named, text = read_metadata(path)
        metadata = email.message_from_string(text)
        if {named, metadata["Version"]} != {version}:
            yield f"{path.name} has the version {metadata['Version']}; expected {version}"
        missing = [key for key in METADATA if not metadata[key]]
        if missing or not metadata.get_payload():
            yield f"{path.name} has no {', '.join(missing) or 'description'} in its metadata"


def main() -> int:
    """Check, print what disagrees or the section of the changelog, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", nargs="?", default="", help="the tag, as in v0.1.0")
    parser.add_argument("--dist", type=Path, help="the folder of the built files")
    arguments = parser.parse_args()
    wrong = list(find_disagreements(ROOT, arguments.tag))
    if arguments.dist is not None:
        wrong += find_wrong_files(ROOT, arguments.dist)
    if wrong:
        print("\n".join(wrong))
        return 1
    section = _SECTION.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[0][2].strip()
    print(f"{read_version(ROOT)}: tag, version, changelog and files agree\n\n{section}")
    append_section(f"zharness {read_version(ROOT)}", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
