"""Where a test runs: on how many ranks, in which mode, until when; read from its markers and from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from zharness.errors import UsageError
from zharness.world.limits import check_world_size
from zharness.world.task import CollectiveMode, Group, Isolation

# "kept" is the group of the test before in ranks that live on; fresh ranks have none, and form one.
GROUPS_BY_NAME = {"kept": Group.REUSED, "new": Group.DEFAULT, "none": Group.NONE}
WORLD_SIZE_PARAM = (
    "_world"  # the name under which the world size is a parameter of the test, so that it is part of its id
)


@dataclass(frozen=True)
class RankRequirements:
    """The ranks of one test. ``warm`` names the engine that their server has imported, or is empty."""

    world_size: int
    isolation: Isolation
    group: Group
    timeout: float
    collectives: CollectiveMode
    warm_engine: str


def get_closest_mark(item: pytest.Item, name: str) -> pytest.Mark | None:
    """The marker that counts: of the function before the class before the module, of a class before its bases.

    pytest's own get_closest_marker takes the first of a class, which is the one of its most distant base.
    """
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name == name]
        if marks:
            return marks[-1] if isinstance(node, pytest.Class) else marks[0]
    return None


def parse_world_sizes(marker: pytest.Mark) -> tuple[int, ...]:
    """The world sizes of a ``world_size`` marker. Raises UsageError for anything but whole numbers from 1 up."""
    # One list is DeepSpeed's spelling: world_size([2, 4]).
    listed = len(marker.args) == 1 and isinstance(marker.args[0], (list, tuple))
    found = tuple(marker.args[0]) if listed else marker.args
    wrong = [size for size in found if not isinstance(size, int) or isinstance(size, bool) or size < 1]
    if not found or wrong or len(set(found)) != len(found) or marker.kwargs:
        got = ", ".join([*map(repr, found), *(f"{name}={value!r}" for name, value in marker.kwargs.items())])
        raise UsageError(
            f"world_size({got}): expected one or more different whole numbers from 1 up, "
            "as in @pytest.mark.world_size(2, 4)"
        )
    return tuple(found)


def parametrize_world_sizes(metafunc: pytest.Metafunc) -> None:
    """One test for each world size, with the id ``w2``."""
    marker = get_closest_mark(metafunc.definition, "world_size")
    if marker is not None and not has_world_size_parameter(metafunc.definition):
        found = parse_world_sizes(marker)
        metafunc.fixturenames.append(WORLD_SIZE_PARAM)
        metafunc.parametrize(WORLD_SIZE_PARAM, found, ids=[f"w{size}" for size in found], indirect=True)


def has_world_size_parameter(item: pytest.Item) -> bool:
    """Whether ``parametrize("world_size", ...)`` already says on how many ranks each test runs."""
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if "world_size" in (names.replace(",", " ").split() if isinstance(names, str) else names):
            return True
    return False


def get_rank_requirements(item: pytest.Item) -> RankRequirements | None:
    """The placement of a test that has a world size; None for one that runs in pytest's own process.

    Raises UsageError for a marker that says what cannot be.
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
    """From the parameter; from the marker where a test cannot be parametrized, as a unittest.TestCase."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if WORLD_SIZE_PARAM in parameters:
        return int(parameters[WORLD_SIZE_PARAM])
    marker = get_closest_mark(item, "world_size")
    if marker is None:
        return None
    if has_world_size_parameter(item) and isinstance(parameters.get("world_size"), int):
        return int(parameters["world_size"])
    found = parse_world_sizes(marker)
    if len(found) > 1:
        raise UsageError(f"{item.nodeid}: a test that cannot be parametrized takes one world size, got {found}")
    return found[0]


def parse_isolation(item: pytest.Item) -> tuple[Isolation, Group]:
    """``isolation("pooled", group="new")`` or ``isolation("fresh", group="none")``, or what the command line says."""
    marker = get_closest_mark(item, "isolation")
    words = list(marker.args) if marker is not None else [item.config.getoption("--isolation")]
    options = dict(marker.kwargs) if marker is not None else {}
    group = options.pop("group", "kept")
    allowed = [Isolation.FRESH.value, Isolation.POOLED.value]
    if len(words) != 1 or words[0] not in allowed or group not in GROUPS_BY_NAME or options:
        raise UsageError(
            f"{item.nodeid}: isolation marker with {words} and {marker.kwargs if marker else {}}; "
            f"expected one of {allowed}, and group= one of {list(GROUPS_BY_NAME)}"
        )
    return Isolation(words[0]), GROUPS_BY_NAME[group]


def parse_rank_timeout(item: pytest.Item) -> float:
    """``rank_timeout(S)``, or what the command line says; seconds."""
    marker = get_closest_mark(item, "rank_timeout")
    if marker is None:
        return float(item.config.getoption("--rank-timeout"))
    seconds = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise UsageError(f"{item.nodeid}: rank_timeout({marker.args}): expected one number of seconds above 0")
    return float(seconds)


def parse_collectives(item: pytest.Item) -> CollectiveMode:
    """``collectives("trusted")``, or what the command line says."""
    marker = get_closest_mark(item, "collectives")
    if marker is None:
        return CollectiveMode(item.config.getoption("--collectives"))
    allowed = [way.value for way in CollectiveMode]
    if len(marker.args) != 1 or marker.args[0] not in allowed or marker.kwargs:
        raise UsageError(f"{item.nodeid}: collectives marker with {list(marker.args)}; expected one of {allowed}")
    return CollectiveMode(marker.args[0])


def parse_warm_engine(item: pytest.Item) -> str:
    """The engine that ``warm("deepspeed")`` names, or the empty string."""
    marker = get_closest_mark(item, "warm")
    if marker is None:
        return ""
    if len(marker.args) != 1 or not isinstance(marker.args[0], str):
        raise UsageError(f'{item.nodeid}: warm{marker.args}: expected the name of one engine, as in warm("deepspeed")')
    return marker.args[0]


def check_item_world_sizes(items: Sequence[pytest.Item]) -> None:
    """Raises UsageError for the first test whose ranks cannot be had."""
    for item in items:
        placement = get_rank_requirements(item)
        if placement is not None:
            try:
                check_world_size(placement.world_size)
            except UsageError as error:
                raise UsageError(f"{item.nodeid}: {error}") from None
