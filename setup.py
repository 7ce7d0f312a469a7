"""Add the reproductions to the package: the folder ``repro/`` is installed as ``zharness/repro``.

All other settings are in pyproject.toml, which can either search for packages or list them.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["zharness", "zharness.*"]), "zharness.repro"],
    package_dir={"zharness.repro": "repro"},
)
