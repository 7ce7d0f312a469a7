"""Parse the markers and command-line options that determine on which ranks a test runs, and in which mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from zharness.device import require_usable_gpus
from zharness.errors import UsageError
from zharness.pytest_ranks.options import get_option
from zharness.pytest_ranks.plugin_support import get_plugin_timeout
from zharness.world.limits import check_world_size
from zharness.world.task import CollectiveMode, GroupMode, Isolation

# "kept" reuses the process group of the previous test in a rank pool; fresh ranks have none and form a new one.
GROUPS_BY_NAME = {"kept": GroupMode.REUSED, "new": GroupMode.DEFAULT, "none": GroupMode.NONE}
DEFAULT_TIMEOUT = 60.0  # seconds
WORLD_SIZE_PARAM = "_world"  # test parameter with the world size, so that test ids contain it


@dataclass(frozen=True)
class RankRequirements:
    """The requirements of one test on its ranks, from its markers and the command line.

    ``timeout`` is in seconds. ``warm_engine`` is the engine that the rank server imports, or empty for no engine.
    """

    world_size: int
    isolation: Isolation
    group: GroupMode
    timeout: float
    collectives: CollectiveMode
    warm_engine: str


def get_closest_mark(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return the closest marker (of the function, the class, its base classes or the module), or None without a marker.

    pytest's own get_closest_marker returns the marker of the most distant base class instead of the class's own.
    """
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name == name]
        if marks:
            return marks[-1] if isinstance(node, pytest.Class) else marks[0]
    return None


def parse_world_sizes(marker: pytest.Mark) -> tuple[int, ...]:
    """Return the sizes of a ``world_size`` marker. Raises UsageError unless they are different integers above 0."""
    # DeepSpeed's tests pass one list: world_size([2, 4]).
    is_list = len(marker.args) == 1 and isinstance(marker.args[0], (list, tuple))
    sizes = tuple(marker.args[0]) if is_list else marker.args
    invalid = [size for size in sizes if not isinstance(size, int) or isinstance(size, bool) or size < 1]
    if not sizes or invalid or len(set(sizes)) != len(sizes) or marker.kwargs:
        arguments = ", ".join([*map(repr, sizes), *(f"{name}={value!r}" for name, value in marker.kwargs.items())])
        raise UsageError(
            f"world_size({arguments}): expected one or more different integers above 0, "
            "as in @pytest.mark.world_size(2, 4)"
        )
    return tuple(sizes)


def parametrize_world_sizes(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test by the world sizes of its marker, with ids such as ``w2``.

    A test of a class with ``_keeps_ids`` and a single world size keeps the id that it has elsewhere.
    """
    marker = get_closest_mark(metafunc.definition, "world_size")
    if marker is not None and not has_world_size_parameter(metafunc.definition):
        sizes = parse_world_sizes(marker)
        if len(sizes) == 1 and getattr(metafunc.cls, "_keeps_ids", False):
            return
        metafunc.fixturenames.append(WORLD_SIZE_PARAM)
        metafunc.parametrize(WORLD_SIZE_PARAM, sizes, ids=[f"w{size}" for size in sizes], indirect=True)


def has_world_size_parameter(item: pytest.Item) -> bool:
    """Return whether the test already has a parameter ``world_size``, which then sets the number of its ranks."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if "world_size" in (names.replace(",", " ").split() if isinstance(names, str) else names):
            return True
    return False


def get_rank_requirements(item: pytest.Item) -> RankRequirements | None:
    """Return the requirements of a test that has a world size, or None for a test that runs in pytest's own process.

    Raises UsageError for an invalid marker.
    """
    size = parse_world_size(item)
    if size is None:
        return None
    isolation, group = parse_isolation(item)
    return RankRequirements(
        world_size=size,
        isolation=isolation,
        group=group,
        timeout=parse_rank_timeout(item),
        collectives=parse_collectives(item),
        warm_engine=parse_warm_engine(item),
    )


def parse_world_size(item: pytest.Item) -> int | None:
    """Return a test's world size from its parameter or its marker; None for a test without ranks.

    A test that cannot be parametrized, such as a method of ``unittest.TestCase``, takes its world size from the marker.
    Raises UsageError if that marker has more than one world size.
    """
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if WORLD_SIZE_PARAM in parameters:
        return int(parameters[WORLD_SIZE_PARAM])
    marker = get_closest_mark(item, "world_size")
    if marker is None:
        return None
    if has_world_size_parameter(item) and isinstance(parameters.get("world_size"), int):
        return int(parameters["world_size"])
    sizes = parse_world_sizes(marker)
    if len(sizes) > 1:
        raise UsageError(
            f"{item.nodeid}: a test that cannot be parametrized takes one world size, but its marker has {sizes}"
        )
    return sizes[0]


def parse_isolation(item: pytest.Item) -> tuple[Isolation, GroupMode]:
    """Return the isolation and the process group that the marker ``isolation`` or else ``--isolation`` requests.

    An example of the marker is ``isolation("pooled", group="new")``. Raises UsageError if the marker is invalid.
    """
    marker = get_closest_mark(item, "isolation")
    names = list(marker.args) if marker is not None else [get_option(item.config, "isolation")]
    options = dict(marker.kwargs) if marker is not None else {}
    group = options.pop("group", "kept")
    allowed = [Isolation.FRESH.value, Isolation.POOLED.value]
    if len(names) != 1 or names[0] not in allowed or group not in GROUPS_BY_NAME or options:
        raise UsageError(
            f"{item.nodeid}: the isolation marker has the arguments {names} and {marker.kwargs if marker else {}}; "
            f"expected one of {allowed}, and optionally group= with one of {list(GROUPS_BY_NAME)}"
        )
    return Isolation(names[0]), GROUPS_BY_NAME[group]


def parse_rank_timeout(item: pytest.Item) -> float:
    """Return the timeout in seconds, which is infinite if the marker ``timeout(0)`` sets no limit.

    The first that exists counts: the marker ``rank_timeout(S)``, the marker ``timeout(S)`` of pytest-timeout,
    ``--rank-timeout``, the options of pytest-timeout, the default. Raises UsageError if the marker is invalid.
    """
    marker = get_closest_mark(item, "rank_timeout")
    if marker is None:
        by_marker, by_option = get_plugin_timeout(item)
        candidates = (by_marker, get_option(item.config, "rank-timeout"), by_option, DEFAULT_TIMEOUT)
        return float(next(candidate for candidate in candidates if candidate is not None))
    seconds = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise UsageError(f"{item.nodeid}: rank_timeout({marker.args}): expected one number of seconds above 0")
    return float(seconds)


def parse_collectives(item: pytest.Item) -> CollectiveMode:
    """Return the mode in the marker ``collectives``, as in ``collectives("trusted")``, or else in ``--collectives``.

    Raises UsageError if the marker is invalid.
    """
    marker = get_closest_mark(item, "collectives")
    if marker is None:
        return CollectiveMode(get_option(item.config, "collectives"))
    allowed = [mode.value for mode in CollectiveMode]
    if len(marker.args) != 1 or marker.args[0] not in allowed or marker.kwargs:
        raise UsageError(
            f"{item.nodeid}: the collectives marker has the arguments {list(marker.args)}; expected one of {allowed}"
        )
    return CollectiveMode(marker.args[0])


def parse_warm_engine(item: pytest.Item) -> str:
    """Return the engine in the marker ``warm("deepspeed")``, or "". Raises UsageError if the marker is invalid."""
    marker = get_closest_mark(item, "warm")
    if marker is None:
        return ""
    if len(marker.args) != 1 or not isinstance(marker.args[0], str):
        raise UsageError(f'{item.nodeid}: warm{marker.args}: expected the name of one engine, as in warm("deepspeed")')
    return marker.args[0]


def check_item_world_sizes(items: Sequence[pytest.Item]) -> None:
    """Raise UsageError if this machine cannot start the ranks of a test, or if its GPUs cannot have so many ranks."""
    largest = 0
    for item in items:
        requirements = get_rank_requirements(item)
        if requirements is not None:
            try:
                check_world_size(requirements.world_size)
            except UsageError as error:
                raise UsageError(f"{item.nodeid}: {error}") from None
            largest = max(largest, requirements.world_size)
    if largest:
        require_usable_gpus(largest)
