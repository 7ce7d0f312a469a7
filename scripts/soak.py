"""Run long tests that should find no problem: `cells` counts false alarms of laws, `groups` measures leaks of ranks."""

from __future__ import annotations

import argparse
import sys

from soaking import cells, groups


def main() -> int:
    """Run the test that the command line names and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(title="what to soak", required=True, metavar="KIND")
    for name, module in {"cells": cells, "groups": groups}.items():
        kind = kinds.add_parser(
            name,
            help=module.__doc__.splitlines()[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(kind)
        kind.set_defaults(run=module.run)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
