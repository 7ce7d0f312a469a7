"""``python -m zharness``, for launchers that run a module, such as torchrun."""

from zharness.cli import main

main()
