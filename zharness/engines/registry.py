"""The registry of engines: by name, by entry point, or by ``package.module:factory``."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from zharness.engines.checkouts import Checkout, read_checkout
from zharness.engines.protocol import Capabilities, EngineFactory
from zharness.errors import MissingEngine, UsageError

ENTRY_POINTS = "zharness.engines"
# Imported in every process that forks ranks, so that no other release of them can be put in front.
ALREADY_IMPORTED = ("torch", "zharness")
_FACTORY_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ENGINE_NAME = re.compile(r"(?P<name>[^=@]+?)(?:==(?P<release>[\w.+!-]+)|@(?P<checkout>[^\[\]{}]+))?")


@dataclass(frozen=True)
class EngineInfo:
    """Where an engine comes from.

    ``target`` is ``module:factory``. ``distribution`` is the installed package whose version is the engine's;
    ``install`` the command that brings it. ``warm_up`` (``module``, or ``module:function``) is run once in a rank
    server, so that each rank is forked with the engine's modules imported.
    """

    name: str
    target: str
    summary: str
    distribution: str
    install: str
    warm_up: str = ""

    @property
    def module(self) -> str:
        """The top-level module of the package."""
        return self.distribution.replace("-", "_")

    def version(self) -> str | None:
        """The installed version; None when it is not installed."""
        return _installed_version(self.distribution, tuple(sys.path))


@cache
def _installed_version(distribution: str, _path: tuple[str, ...]) -> str | None:
    """The version of a distribution; a release may be put in front of the path at any time, and then is the one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


BUILT_IN: dict[str, EngineInfo] = {
    info.name: info
    for info in (
        EngineInfo(
            name="plain",
            target="zharness.engines.plain:factory",
            summary="the unwrapped model, which every other engine is compared with",
            distribution="torch",
            install="pip install torch",
        ),
        EngineInfo(
            name="reference",
            target="zharness.engines.reference:factory",
            summary="this package's own ZeRO 0-3, to be read in one sitting",
            distribution="zharness",
            install="pip install zharness",
        ),
        EngineInfo(
            name="ddp",
            target="zharness.engines.ddp:factory",
            summary="torch.nn.parallel.DistributedDataParallel",
            distribution="torch",
            install="pip install torch",
        ),
        EngineInfo(
            name="zero1",
            target="zharness.engines.zero1:factory",
            summary="torch.distributed.optim.ZeroRedundancyOptimizer over DDP",
            distribution="torch",
            install="pip install torch",
        ),
        EngineInfo(
            name="fsdp2",
            target="zharness.engines.fsdp2:factory",
            summary="torch.distributed.fsdp.fully_shard",
            distribution="torch",
            install="pip install torch",
        ),
        EngineInfo(
            name="deepspeed",
            target="zharness.engines.deepspeed:factory",
            summary="DeepSpeed ZeRO 0-3",
            distribution="deepspeed",
            install='pip install "zharness[deepspeed]" -c constraints.txt',
            warm_up="zharness.engines.deepspeed:warm_up",
        ),
    )
}


def registered_engines() -> dict[str, EngineInfo]:
    """The built-in engines and those of installed packages, by name. A built-in name cannot be taken over."""
    return dict(_load_registered_engines(tuple(sys.path)))


@cache
def _load_registered_engines(_path: tuple[str, ...]) -> dict[str, EngineInfo]:
    """``registered`` with this sys.path: to read what every package there says takes some 5 ms."""
    found = dict(BUILT_IN)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = point.dist.name if point.dist is not None else ""
        found.setdefault(
            point.name,
            EngineInfo(point.name, point.value, f"from {package}", package, f"pip install {package}"),
        )
    return found


def split_release(text: str) -> tuple[str, str | None]:
    """``NAME==RELEASE`` as name and release; the release is None where none is asked for, and of a checkout."""
    match = _parse_engine_name(text)
    return match["name"], match["release"]


def find_checkout(text: str) -> Checkout | None:
    """The checkout that ``NAME@PATH`` speaks of; None for any other spelling.

    Raises UsageError where there is none at PATH, and for an engine of which this process has a release in use.
    """
    path = _parse_engine_name(text)["checkout"]
    if path is None:
        return None
    found = info(text)
    if found.distribution in ALREADY_IMPORTED:
        raise UsageError(
            f"got {text!r}, but {found.name} is part of {found.distribution}, which is imported already; "
            f"install that checkout in an environment of its own: pip install -e {path}"
        )
    return read_checkout(Path(path), found.module)


def is_checkout(text: str) -> bool:
    """Whether ``text`` is spelled as a checkout, be there one or not."""
    return _parse_engine_name(text)["checkout"] is not None


def resolve_version(text: str) -> str | None:
    """The release that ``text`` speaks of: its checkout's, the one asked for, or the installed one, if there is any."""
    found = find_checkout(text)
    return found.version if found is not None else split_release(text)[1] or info(text).version()


@cache
def _parse_engine_name(text: str) -> re.Match[str]:
    match = _ENGINE_NAME.fullmatch(text)
    if match is None:
        raise UsageError(
            f"not an engine: {text!r}; allowed: NAME, NAME==RELEASE, NAME@CHECKOUT or package.module:factory "
            "(a checkout's path has none of []{}, for it becomes part of case ids)"
        )
    return match


def info(text: str) -> EngineInfo:
    """What is known of the engine that ``text`` names. Raises UsageError for an unknown one."""
    name, _ = split_release(text)
    known = registered_engines()
    if name in known:
        return known[name]
    if _FACTORY_PATH.fullmatch(name):
        return EngineInfo(name, name, "given by its factory", name.partition(".")[0].partition(":")[0], "")
    raise UsageError.unknown_name(
        "engine", name, [*known, "package.module:factory"], "`zharness list engines` says which are installed"
    )


def is_factory_path(text: str) -> bool:
    """Whether ``text`` names an engine by its factory."""
    return (
        _FACTORY_PATH.fullmatch(split_release(text)[0]) is not None
        and split_release(text)[0] not in registered_engines()
    )


def require(text: str) -> EngineInfo:
    """``info`` of an engine whose package is installed. Raises MissingEngine with the command that installs it."""
    found = info(text)
    if not is_factory_path(text) and resolve_version(text) is None:
        raise MissingEngine(
            f"engine {found.name!r} is not installed (no package {found.distribution!r} in this environment); "
            f"install it with: {found.install}"
        )
    return found


def get(text: str) -> EngineFactory:
    """The factory of the engine that ``text`` names.

    Raises UsageError for an unknown name, or a path that does not import, or holds nothing that can be called.
    """
    target = require(text).target
    path, _, attribute = target.partition(":")
    factory = getattr(_import_module(path, target), attribute, None)
    if not callable(factory):
        raise UsageError(f"{target!r}: module {path!r} has no callable {attribute!r}; expected factory(model, config)")
    return factory  # type: ignore[no-any-return]


def _import_module(path: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:  # whatever a foreign module raises while it is imported, the sentence is the same
        raise UsageError(
            f"cannot import {path!r} for engine {target!r}: {type(error).__name__}: {error}; "
            "expected package.module:factory, importable from the current directory"
        ) from error


def capabilities(text: str, stage: int) -> Capabilities | None:
    """What a registered engine claims at ``stage``, without building it; None where only building it tells."""
    if is_factory_path(text):
        return None
    module: Any = importlib.import_module(require(text).target.partition(":")[0])
    if hasattr(module, "capabilities_at"):
        claims: Capabilities = module.capabilities_at(stage)
        return claims
    return getattr(module, "CAPABILITIES", None)
