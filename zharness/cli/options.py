"""Types and parsers of options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from zharness.cell import parse_integers
from zharness.environment import DEVICE_VARIABLE, look_for_gpus_by_nvml, set_variables
from zharness.errors import UsageError, find_close_names
from zharness.mesh import Mesh

Command = TypeVar("Command", bound=Callable[..., Any])

PROGRAM_MESHES = "programs run on replicas of the weights (rep2), not on axes that split layers"  # explains --mesh
AXES_OF_A_CELL = ("engines", "stages", "world_sizes", "mesh", "dtypes", "models", "engine_variant")

LAW_SET_HELP = (
    "Version of the law set: leave out the laws that later versions added or made stricter (`zharness laws versions`)."
)


class OnceCommand(click.Command):
    """A command that refuses an option given twice; click would silently drop all values but the last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ``args`` into ``ctx``. Raises click.UsageError for a repeated option that is not a list."""
        given = list(args)  # click consumes args
        rest = super().parse_args(ctx, args)
        _, _, order = self.make_parser(ctx).parse_args(args=given)
        for parameters in group_options_by_name(order).values():
            if len(parameters) > 1:
                raise click.UsageError(describe_repetition(parameters), ctx)
        return rest


def group_options_by_name(order: list[click.Parameter]) -> dict[str, list[click.Option]]:
    """Group the occurrences of options that keep one value by the name of their parameter.

    Options such as -x and --maxfail set one parameter, so they are one group. A repeated flag counts once, because it
    sets the same value each time.
    """
    grouped = dict[str, list[click.Option]]()
    for option in order:
        if isinstance(option, click.Option) and not option.multiple:
            occurrences = grouped.setdefault(option.name or "", [])
            if not (option.is_flag and option in occurrences):
                occurrences.append(option)
    return grouped


def describe_repetition(options: list[click.Option]) -> str:
    """Describe a repetition of ``options``, of which only one value would count, and say what to write instead."""
    first = options[0]
    if len(set(options)) > 1:
        names = " and ".join(dict.fromkeys(option.opts[0] for option in options))
        return f"got {names}; expected one of them; leave out the others"
    got = f"got {first.opts[0]} {len(options)} times; expected it once"
    if first.callback in (parse_integer_option, parse_name_option):
        return f"{got}; write {first.opts[0]} {first.metavar} with all its values"
    return f"{got}; leave out all but one, or run the command once for each value"


class NameChoice(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """A choice between names whose error says which name is close to the given one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return ``value`` if it is one of the names. Raises click.BadParameter for another value."""
        if value not in self.choices:
            names = self.get_shown_names(param)
            close = find_close_names(str(value), names)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"allowed: {', '.join(names)}"
            self.fail(f"got {value!r}; {hint}", param, ctx)
        return value

    def get_shown_names(self, param: click.Parameter | None) -> list[str]:
        """Return the names that the metavar of ``param`` shows, without older names that are still accepted."""
        metavar = (param.metavar if param is not None else None) or ""
        return [str(name) for name in self.choices if not metavar or str(name) in metavar]


class NumberRange(click.FloatRange):
    """A range of numbers that refuses NaN. click accepts NaN in every range, because no comparison with NaN is true."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return ``value`` as a number in the range. Raises click.BadParameter for another value."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"got {value!r}; expected a number", param, ctx)
        return number


class IntegerRange(click.IntRange):
    """A range of integers whose error says that a text is not an integer; click would say "integer range"."""

    name = "integer"


SECONDS = NumberRange(min=1.0, max=86_400.0)
OUTPUT = click.Path(dir_okay=False, path_type=Path)
INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def parse_integer_option(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Parse ``0,1,2`` as integers. Raises click.BadParameter for anything else."""
    try:
        return () if value is None else parse_integers(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def parse_name_option(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Parse ``fp32,bf16`` as names, each once."""
    return () if value is None else tuple(dict.fromkeys(part.strip() for part in value.split(",")))


def parse_mesh_option(_context: click.Context, _parameter: click.Parameter, value: str) -> Mesh:
    """Parse ``tp2,rep2`` as a mesh. Raises click.BadParameter for text that is not a mesh."""
    try:
        return Mesh.parse(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def add_mesh_option(explanation: str = "the rest of the world is data parallel") -> Callable[[Command], Command]:
    """Return a decorator that adds the option --mesh, whose help ends with ``explanation``."""
    return click.option(
        "--mesh",
        callback=parse_mesh_option,
        default="",
        metavar="tp2,...",
        help="Axes of parallelism beside data parallelism, with their sizes (`zharness docs mesh`); "
        + explanation
        + ".",
    )


def add_law_option(*, cell_ids: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds the option --law; if ``cell_ids`` is true, its value may also be a cell id."""
    kinds = "a law, a group, a glob or a cell id" if cell_ids else "a law, a group or a glob"
    help_text = f"Law to run: {kinds}; by default all laws. May be repeated."
    return click.option("--law", "--check", "checks", multiple=True, help=help_text)


def refuse_axes_beside_cells() -> None:
    """Raise UsageError for an option of the command line that has no effect, because cell ids set its value."""
    context = click.get_current_context()
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if parameter.name in AXES_OF_A_CELL and is_given:
            raise UsageError(
                f"got {parameter.opts[0]} beside the id of a cell, which names engine, stage, ranks, dtype and model "
                "itself; leave the option out, or change the id"
            )


def require_commit_with_reach(commit: str | None, reach_file: Path | None) -> None:
    """Raise UsageError if one of the options --changed and --reach is given without the other."""
    if (commit is None) != (reach_file is None):
        raise UsageError("--changed and --reach need each other: --changed COMMIT --reach FILE")


@contextmanager
def requested_device(device: str, backend: str) -> Iterator[None]:
    """Let the ranks that start in the block use ``device`` and ``backend``; an empty name changes nothing."""
    from zharness.device import BACKEND_VARIABLE

    requested = {DEVICE_VARIABLE: device, BACKEND_VARIABLE: backend}
    with set_variables({variable: value for variable, value in requested.items() if value}):
        look_for_gpus_by_nvml()
        yield
