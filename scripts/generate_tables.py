"""Generate the tables of docs/results.md and docs/mesh-figures.md from records and reproductions, in place.

    python scripts/generate_tables.py --records two.jsonl torch.jsonl    laws on engines, and contracts
    python scripts/generate_tables.py --meshes tp2.jsonl rep2.jsonl      laws on engines, a table for each mesh
    python scripts/generate_tables.py --frameworks accelerate.jsonl      laws on what calls the engines for users
    python scripts/generate_tables.py --combinations tp2.jsonl ...       counts of these engines and meshes
    python scripts/generate_tables.py --kills kills.jsonl                the kill matrix, by what is wrong
    python scripts/generate_tables.py --bugs                             run every reproduction: 10 to 20 minutes

Options may be combined. They take files of ``zharness check --jsonl``; ``--kills`` takes a file of
``zharness mutants --jsonl``. Each table replaces the content of the ``<details>`` block with its title. ``--meshes``
replaces only the tables of the meshes that the records have, and ``--combinations`` only the rows of their engines and
meshes. If a command fails, no page is changed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

RESULTS, MESH_PAGE = (Path(__file__).parents[1] / name for name in ("docs/results.md", "docs/mesh-figures.md"))
MATRIX = "every law on every engine"
MESHES = "every law on every engine, on each mesh"
FRAMEWORKS = "every law on accelerate, Trainer and Fabric"
COMBINATIONS = "the laws that ran on each engine and mesh"
ENGINE_AND_MESH = 2  # the number of first columns that identify a row of combinations
CONTRACTS = "the contracts of each engine"
BUGS = "every bug, on the releases that were run"
KILLS = "who is killed, by what is wrong"


def run_zharness(*arguments: str) -> str:
    """Run a command of zharness and return its output. Raises CalledProcessError for a usage or harness error."""
    command = [sys.executable, "-m", "zharness", *arguments]
    print(f"running: zharness {' '.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: some cell is not as expected, and the table shows it
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


def markdown_table(text: str) -> str:
    """Return the first Markdown table in ``text``, without padding. Raises ValueError if there is none."""
    match = re.search(r"^\|.*\|\n\|[ :|-]+\|\n(?:\|.*\|\n?)*", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"expected a Markdown table, got {text[:200]!r}")
    lines = match[0].strip().splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rows[1] = ["---"] * len(rows[0])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replace_block(page: str, title: str, table: str) -> str:
    """Return ``page`` with ``table`` as the content of the block ``title``. Raises ValueError unless there is one."""
    pattern = re.compile(rf"(<summary>{re.escape(title)}</summary>\n\n).*?(\n\n</details>)", re.DOTALL)
    replaced, count = pattern.subn(lambda match: f"{match[1]}{table}{match[2]}", page)
    if count != 1:
        raise ValueError(f"expected one block with the title {title!r}, found {count}")
    return replaced


def read_block(page: str, title: str) -> str:
    """Return the content of the block ``title``. Raises ValueError if there is none."""
    match = re.search(rf"<summary>{re.escape(title)}</summary>\n\n```\n(.*?)\n```\n\n</details>", page, re.DOTALL)
    if match is None:
        raise ValueError(f"expected a block with the title {title!r}")
    return match[1]


def merge_rows(page: str, title: str, new: str) -> str:
    """Return the Markdown table of the block ``title``, with its rows replaced by the rows of ``new``.

    A row of ``new`` replaces the row with the same engine and mesh; other rows of ``new`` are appended. Raises
    ValueError if there is no such table.
    """
    block = re.search(rf"<summary>{re.escape(title)}</summary>\n\n(.*?)\n\n</details>", page, re.DOTALL)
    if block is None:
        raise ValueError(f"expected a block with the title {title!r}")
    head, old = split_rows(markdown_table(block[1]))
    return "\n".join([*head, *(old | split_rows(new)[1]).values()])


def split_rows(table: str) -> tuple[list[str], dict[tuple[str, ...], str]]:
    """Return the two lines of the head of a Markdown table, and its rows by their engine and mesh."""
    lines = table.splitlines()
    return lines[:2], {tuple(line.split(" | ")[:ENGINE_AND_MESH]): line for line in lines[2:]}


def split_meshes(overview: str) -> tuple[dict[str, str], str]:
    """Return the table of each mesh of an overview, by the line above it, and the legend behind the last table."""
    tables, _, legend = overview.rpartition("\n\n.  the law holds")
    parts = re.split(r"^(mesh \S+)$", tables, flags=re.MULTILINE)[1:]
    return {name: table.strip("\n") for name, table in zip(parts[::2], parts[1::2], strict=True)}, legend


def merge_meshes(old: str, new: str) -> str:
    """Return the overview ``old``, with tables replaced by the tables of ``new``, and with the legend of ``new``."""
    known, _ = split_meshes(old)
    made, legend = split_meshes(new)
    tables = "\n\n".join(f"{name}\n\n{table}" for name, table in (known | made).items())
    return f"{tables}\n\n.  the law holds{legend}"


def generate(arguments: argparse.Namespace) -> dict[str, str]:
    """Run the commands that print the requested tables; return the tables by the title of their block."""
    tables = {}
    records, meshes, kills, bugs = arguments.records, arguments.meshes, arguments.kills, arguments.bugs
    if records:
        names = [str(path) for path in records]
        overview = run_zharness("report", *names).rstrip()
        tables[MATRIX] = f"```\n{overview}\n```"
        tables[CONTRACTS] = markdown_table(run_zharness("report", *names, "--contracts"))
    if meshes:
        overview = run_zharness("report", *map(str, meshes)).rstrip()
        old = read_block(RESULTS.read_text(encoding="utf-8"), MESHES)
        tables[MESHES] = f"```\n{merge_meshes(old, overview)}\n```"
    if arguments.frameworks:
        overview = run_zharness("report", *map(str, arguments.frameworks)).rstrip()
        tables[FRAMEWORKS] = f"```\n{overview}\n```"
    if arguments.combinations:
        table = run_zharness("report", *map(str, arguments.combinations), "--combinations")
        old = MESH_PAGE.read_text(encoding="utf-8")
        tables[COMBINATIONS] = merge_rows(old, COMBINATIONS, markdown_table(table))
    if kills is not None:
        tables[KILLS] = markdown_table(run_zharness("mutants", "--jsonl", str(kills)))
    if bugs:
        tables[BUGS] = markdown_table(run_zharness("repro", "--all", "--markdown"))
    return tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--records", nargs="+", type=Path, default=[], metavar="FILE", help="files of `zharness check --jsonl`"
    )
    parser.add_argument(
        "--meshes",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="files of `zharness check --mesh ... --jsonl`",
    )
    for name, what in (("--frameworks", "accelerate, Trainer and Fabric"), ("--combinations", "engines on meshes")):
        parser.add_argument(name, nargs="+", type=Path, default=[], metavar="FILE", help=f"files of records of {what}")
    parser.add_argument("--kills", type=Path, metavar="FILE", help="file of `zharness mutants --jsonl`")
    parser.add_argument("--bugs", action="store_true", help="run every reproduction on its releases")
    arguments = parser.parse_args()
    files = (*arguments.records, *arguments.meshes, *arguments.frameworks, *arguments.combinations)
    missing = [str(path) for path in (*files, *filter(None, [arguments.kills])) if not path.is_file()]
    if missing or not (files or arguments.kills or arguments.bugs):
        asked = "give --records, --meshes, --frameworks, --combinations, --kills or --bugs"
        parser.error(f"no such file: {', '.join(missing)}" if missing else asked)
    try:
        tables = generate(arguments)
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"no page is changed: {error}", file=sys.stderr)
        return 1
    for title, table in tables.items():
        path = MESH_PAGE if title == COMBINATIONS else RESULTS
        path.write_text(replace_block(path.read_text(encoding="utf-8"), title, table), encoding="utf-8")
    print(f"wrote {len(tables)} tables: {'; '.join(tables)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
