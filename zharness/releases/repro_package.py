"""The reproductions of an installed package: a wheel has this file as ``zharness/repro/__init__.py``.

`pytest --pyargs zharness.repro` then runs each script by torchrun on the releases that its header names.
"""
