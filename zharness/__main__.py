"""Run the command line for ``python -m zharness``, which launchers that run a module use, such as torchrun."""

from zharness.cli import main

main()
