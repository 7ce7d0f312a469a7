"""``python -m zharness``, for launchers that take a module."""

from zharness.cli import main

main()
