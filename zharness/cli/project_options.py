"""Make the options of a project's file the defaults of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zharness.errors import UsageError
from zharness.project_file import COMMANDS, ProjectFile, find_project_file

if TYPE_CHECKING:
    from zharness.run.expected_failures import ExpectedFailure


def set_defaults(context: click.Context, group: click.Group) -> None:
    """Let the project file of the current folder, if there is one, set defaults of the invoked command.

    The command gets the file as its ``context.obj``. An option on the command line replaces the option of the file.
    Raises UsageError for an option that the command does not have.
    """
    name = context.invoked_subcommand or ""
    project = find_project_file(Path.cwd()) if name in COMMANDS else None
    context.obj = project
    if project is None:
        return
    defaults = convert_options(project, group.commands[name])
    context.default_map = {name: defaults}
    if project.commands[name]:
        shown = ", ".join(f"{key} = {value!r}" for key, value in project.commands[name].items())
        click.echo(f"options from {project.path}: {shown}", err=True)


def read_project_failures(
    project: ProjectFile | None, further_files: Sequence[Path] = ()
) -> tuple[ExpectedFailure, ...]:
    """Read the expected failures of ``further_files``, then those of the project's file.

    Raises UsageError for a file that cannot be read or has a wrong entry.
    """
    from zharness.run.user_failures import parse_user_failures, read_expected_failures

    own = parse_user_failures(project.expected_failures, str(project.path)) if project is not None else ()
    return (*read_expected_failures(further_files), *own)


def require_depth_of_command_line(project: ProjectFile | None, depth: int, alone: Mapping[str, str]) -> None:
    """Raise UsageError if the project's file sets a ``depth`` above 1 and an option is given that needs depth 1.

    ``alone`` maps each such option to its value, which is empty if the option is not given.
    """
    source = click.get_current_context().get_parameter_source("depth")
    given = [f"{option} {value}" for option, value in alone.items() if value]
    if project is not None and source is ParameterSource.DEFAULT_MAP and depth > 1 and given:
        raise UsageError(f"{project.path} sets depth = {depth}, but {given[0]} needs depth 1; add --depth 1")


def convert_options(project: ProjectFile, command: click.Command) -> dict[str, Any]:
    """Return the values of the options of ``command`` that ``project`` sets, by the names of click's parameters."""
    options = {each.opts[0].lstrip("-"): each for each in command.params if isinstance(each, click.Option)}
    defaults = {}
    for key, value in project.commands[command.name or ""].items():
        if key not in options:
            place = f"option of [{command.name}] in {project.path}:"
            raise UsageError.unknown_name(place, key, list(options), f"`zharness {command.name} --help` explains them")
        defaults[str(options[key].name)] = convert_value(value, options[key], project.path.parent)
    return defaults


def convert_value(value: Any, option: click.Option, folder: Path) -> Any:
    """Return ``value`` as the command line would pass it: lists joined by commas, and paths below ``folder``.

    Raises UsageError for a value that no option can have.
    """
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, (Mapping, list)) for item in values) or isinstance(value, bool) != option.is_flag:
        kind = "true or false" if option.is_flag else "a number, a text or a list of these"
        raise UsageError(f"got {option.opts[0].lstrip('-')} = {value!r}; expected {kind}")
    if isinstance(option.type, click.Path):
        values = [folder / str(item) for item in values]
    if option.multiple:
        return values
    return ",".join(map(str, values)) if isinstance(value, list) else values[0]
