"""Find engines by name, by entry point, or by ``package.module:factory``."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from zharness.engines.checkouts import Checkout, read_checkout
from zharness.engines.engine_info import EngineInfo, PoolScope
from zharness.engines.protocol import Capabilities, EngineFactory
from zharness.errors import MissingEngine, UsageError
from zharness.raising_frame import describe_exception

ENTRY_POINTS = "zharness.engines"
# These packages are imported in every process that forks ranks, so no other release of them can be selected.
ALREADY_IMPORTED = ("torch", "zharness")
_FACTORY_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ENGINE_NAME = re.compile(r"(?P<name>[^=@]+?)(?:==(?P<release>[\w.+!-]+)|@(?P<checkout>[^\[\]{}]+))?")


FSDP1_SOURCES = tuple(
    f"torch.distributed.fsdp.{module}"
    for module in (
        *("fully_sharded_data_parallel", "_runtime_utils", "_flat_param", "_init_utils", "_state_dict_utils"),
        *("_optim_utils", "_limiter_utils", "_unshard_param_utils", "_exec_order_utils", "_wrap_utils"),
    )
)
DEEPSPEED_SOURCES = (
    *("deepspeed.runtime.zero", "deepspeed.runtime.engine", "deepspeed.runtime.base_optimizer"),
    *("deepspeed.runtime.bf16_optimizer", "deepspeed.runtime.fp16", "deepspeed.runtime.torch_autocast"),
    *("deepspeed.utils.tensor_fragment", "deepspeed.utils.mixed_precision_linkage", "deepspeed.checkpoint"),
    *("deepspeed.runtime.lr_schedules", "deepspeed.runtime.utils", "deepspeed.runtime.config"),
)

FABRIC_SOURCES = ("lightning_fabric.fabric", "lightning_fabric.wrappers", "lightning_fabric.strategies")

BUILT_IN: dict[str, EngineInfo] = {
    info.name: info
    for info in (
        EngineInfo(
            name="plain",
            target="zharness.engines.plain:factory",
            summary="plain PyTorch on one process, the baseline of every other engine",
            distribution="torch",
            install="pip install torch",
        ),
        EngineInfo(
            name="reference",
            target="zharness.engines.reference:factory",
            summary="this package's own implementation of ZeRO stages 0 to 3",
            distribution="zharness",
            install="pip install zharness",
            sources=("zharness.reference",),
        ),
        EngineInfo(
            name="ddp",
            target="zharness.engines.ddp:factory",
            summary="torch.nn.parallel.DistributedDataParallel",
            distribution="torch",
            install="pip install torch",
            sources=("torch.nn.parallel.distributed",),
        ),
        EngineInfo(
            name="accelerate_ddp",
            target="zharness.engines.accelerate_ddp:factory",
            summary="Hugging Face accelerate, which prepares DistributedDataParallel",
            distribution="accelerate",
            install="pip install accelerate",
            warm_up="accelerate",
            sources=("accelerate.accelerator", "accelerate.optimizer", "accelerate.scheduler", "accelerate.state"),
        ),
        EngineInfo(
            name="accelerate_deepspeed",
            target="zharness.engines.accelerate_deepspeed:factory",
            summary="Hugging Face accelerate over DeepSpeed's ZeRO stages 1 and 2, whose backward also makes the step",
            distribution="accelerate",
            install="pip install accelerate deepspeed",
            warm_up="zharness.engines.accelerate_deepspeed:warm_up",
            sources=("accelerate.accelerator", "accelerate.utils.deepspeed", "accelerate.data_loader"),
        ),
        EngineInfo(
            name="trainer_ddp",
            target="zharness.engines.trainer_ddp:factory",
            summary="transformers.Trainer, which trains DistributedDataParallel in its own loop",
            distribution="transformers",
            install="pip install transformers accelerate",
            warm_up="zharness.engines.trainer_ddp:warm_up",
            sources=("transformers.trainer",),
        ),
        EngineInfo(
            name="trainer_deepspeed",
            target="zharness.engines.trainer_deepspeed:factory",
            summary="transformers.Trainer, which trains DeepSpeed's ZeRO stages 1 and 2 in its own loop",
            distribution="transformers",
            install="pip install transformers accelerate deepspeed",
            warm_up="zharness.engines.trainer_deepspeed:warm_up",
            sources=("transformers.trainer", "transformers.integrations.deepspeed"),
        ),
        EngineInfo(
            name="fabric_ddp",
            target="zharness.engines.fabric_ddp:factory",
            summary="Lightning Fabric, which sets up DistributedDataParallel",
            distribution="lightning-fabric",
            install="pip install lightning-fabric",
            warm_up="lightning_fabric",
            sources=FABRIC_SOURCES,
        ),
        EngineInfo(
            name="fabric_fsdp2",
            target="zharness.engines.fabric_fsdp2:factory",
            summary="Lightning Fabric's ModelParallelStrategy, which sets up fully_shard and tensor parallelism",
            distribution="lightning-fabric",
            install="pip install lightning-fabric",
            warm_up="lightning_fabric",
            sources=FABRIC_SOURCES,
            around="fsdp2",
        ),
        EngineInfo(
            name="zero1",
            target="zharness.engines.zero1:factory",
            summary="torch.distributed.optim.ZeroRedundancyOptimizer over DDP",
            distribution="torch",
            install="pip install torch",
            sources=("torch.distributed.optim.zero_redundancy_optimizer", "torch.nn.parallel.distributed"),
        ),
        EngineInfo(
            name="fsdp1",
            target="zharness.engines.fsdp1:factory",
            summary="torch.distributed.fsdp.FullyShardedDataParallel",
            distribution="torch",
            install="pip install torch",
            sources=FSDP1_SOURCES,
        ),
        EngineInfo(
            name="fsdp2",
            target="zharness.engines.fsdp2:factory",
            summary="torch.distributed.fsdp.fully_shard",
            distribution="torch",
            install="pip install torch",
            warm_up="zharness.engines.tensor_parallel:warm_up",
            sources=("torch.distributed.fsdp._fully_shard", "torch.distributed.checkpoint.state_dict"),
            # DTensor caches for each process how to split an operation, and the stage does not change the cached
            # results.
            pool_scope=PoolScope.ENGINE,
        ),
        EngineInfo(
            name="torch_tp",
            target="zharness.engines.torch_tp:factory",
            summary="torch.distributed.tensor.parallel.parallelize_module, on a mesh with the axis tp alone",
            distribution="torch",
            install="pip install torch",
            warm_up="zharness.engines.tensor_parallel:warm_up",
            sources=("torch.distributed.tensor",),
        ),
        EngineInfo(
            name="torch_pp",
            target="zharness.engines.torch_pp:factory",
            summary="the schedules of torch.distributed.pipelining, on a mesh with the axis pp",
            distribution="torch",
            install="pip install torch",
            sources=("torch.distributed.pipelining",),
        ),
        EngineInfo(
            name="megatron_fsdp",
            target="zharness.engines.megatron_fsdp:factory",
            summary="Megatron-FSDP, stages 0 and 3, with stand-ins for torch.cuda on a CPU",
            distribution="megatron-fsdp",
            install='pip install "zharness[megatron]" -c constraints.txt',
            warm_up="zharness.engines.megatron_fsdp:warm_up",
            sources=("megatron_fsdp",),
        ),
        EngineInfo(
            name="deepspeed_pp",
            target="zharness.engines.deepspeed_pp:factory",
            summary="DeepSpeed's PipelineModule and DualPipeVModule, ZeRO stages 0 and 1, on a mesh with the axis pp",
            distribution="deepspeed",
            install='pip install "zharness[deepspeed]" -c constraints.txt',
            warm_up="zharness.engines.deepspeed_pp:warm_up",
            sources=("deepspeed.runtime.pipe",),
        ),
        EngineInfo(
            name="deepspeed",
            target="zharness.engines.deepspeed:factory",
            summary="DeepSpeed, ZeRO stages 0 to 3",
            distribution="deepspeed",
            install='pip install "zharness[deepspeed]" -c constraints.txt',
            warm_up="zharness.engines.deepspeed:warm_up",
            sources=DEEPSPEED_SOURCES,
        ),
    )
}


def registered_engines() -> dict[str, EngineInfo]:
    """Return the built-in engines and those of installed packages, by name. Built-in names take precedence."""
    return dict(_load_registered_engines(tuple(sys.path)))


@cache
def _load_registered_engines(_path: tuple[str, ...]) -> dict[str, EngineInfo]:
    """Return ``registered_engines()`` for one sys.path, cached because reading all entry points takes some 5 ms."""
    engines = dict(BUILT_IN)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = point.dist.name if point.dist is not None else ""
        engines.setdefault(
            point.name,
            EngineInfo(point.name, point.value, f"from {package}", package, f"pip install {package}"),
        )
    return engines


def split_release(text: str) -> tuple[str, str | None]:
    """Split ``NAME==RELEASE`` into name and release. The release is None for ``NAME`` and ``NAME@PATH``."""
    match = _parse_engine_name(text)
    return match["name"], match["release"]


def is_same_release(release: str, installed_version: str) -> bool:
    """Return whether ``release`` equals ``installed_version``, which may also have a local version such as ``+cpu``."""
    try:
        return SpecifierSet(f"=={release}").contains(installed_version, prereleases=True)
    except InvalidSpecifier:
        raise UsageError(f"got release {release!r}; expected a version such as 0.18.8") from None


def find_checkout(text: str) -> Checkout | None:
    """Return the checkout that ``NAME@PATH`` names, or None if ``text`` has another form.

    Raises UsageError if PATH is not a checkout, and for engines whose package this process has already imported.
    """
    path = _parse_engine_name(text)["checkout"]
    if path is None:
        return None
    engine_info = info(text)
    if engine_info.distribution in ALREADY_IMPORTED:
        raise UsageError(
            f"got {text!r}, but {engine_info.name} is part of {engine_info.distribution}, which is imported already; "
            f"install that checkout in a separate environment: pip install -e {path}"
        )
    return read_checkout(Path(path), engine_info.module)


def is_part_of_larger_distribution(text: str) -> bool:
    """Return whether an engine is a small part of torch or zharness, most of whose files have nothing to do with it."""
    return info(text).distribution in ALREADY_IMPORTED


def is_checkout(text: str) -> bool:
    """Return whether ``text`` has the form ``NAME@PATH``. The path need not exist."""
    return _parse_engine_name(text)["checkout"] is not None


def resolve_version(text: str) -> str | None:
    """Return the version that ``text`` selects: the checkout's, the named release, or the installed one.

    Returns None if no version is named and none is installed.
    """
    checkout = find_checkout(text)
    return checkout.version if checkout is not None else split_release(text)[1] or info(text).version()


@cache
def _parse_engine_name(text: str) -> re.Match[str]:
    """Match the parts of an engine's name. Raises UsageError if ``text`` is not an engine's name."""
    match = _ENGINE_NAME.fullmatch(text)
    if match is None:
        raise UsageError(
            f"got the engine {text!r}; allowed: NAME, NAME==RELEASE, NAME@CHECKOUT or package.module:factory "
            "(a checkout's path must not contain []{}, as it becomes part of cell ids)"
        )
    return match


def info(text: str) -> EngineInfo:
    """Return the registry entry of the engine that ``text`` names. Raises UsageError for an unknown engine."""
    name, _ = split_release(text)
    known = registered_engines()
    if name in known:
        return known[name]
    if _FACTORY_PATH.fullmatch(name):
        return EngineInfo(name, name, "named by its factory's path", name.partition(".")[0].partition(":")[0], "")
    raise UsageError.unknown_name("engine", name, [*known, "package.module:factory"], explain_engine_names(name))


def explain_engine_names(name: str) -> str:
    """Return a sentence that explains how engines are named, for ``name``, which is no engine's name."""
    if "," in name:
        return "name one engine at a time: --engine reference --engine ddp"
    if "/" in name or ".py" in name:
        return "an engine of your own is named package.module:factory, as Python imports it from the current folder"
    return "`zharness list engines` shows which are installed; an engine of your own is named package.module:factory"


def is_factory_path(text: str) -> bool:
    """Return whether ``text`` names an engine by the path of its factory."""
    return (
        _FACTORY_PATH.fullmatch(split_release(text)[0]) is not None
        and split_release(text)[0] not in registered_engines()
    )


def require(text: str) -> EngineInfo:
    """Return the registry entry of an installed engine. Raises MissingEngine with the command that installs it."""
    engine_info = info(text)
    if not is_factory_path(text) and resolve_version(text) is None:
        raise MissingEngine(
            f"engine {engine_info.name!r} is not installed (no package {engine_info.distribution!r} in this "
            f"environment); install it with: {engine_info.install}"
        )
    return engine_info


def get(text: str) -> EngineFactory:
    """Return the factory of the engine that ``text`` names.

    Raises UsageError for an unknown name, and for a factory that cannot be imported or is not callable.
    """
    target = require(text).target
    path, _, attribute = target.partition(":")
    factory = getattr(_import_module(path, target), attribute, None)
    if not callable(factory):
        raise UsageError(f"{target!r}: module {path!r} has no callable {attribute!r}; expected factory(model, config)")
    return factory  # type: ignore[no-any-return]


def _import_module(path: str, target: str) -> ModuleType:
    """Import the module of the engine ``target``. Raises UsageError if the import fails."""
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything, or call sys.exit
        raise UsageError(
            f"cannot import {path!r} for engine {target!r}: {describe_exception(error)}; "
            "expected package.module:factory, importable from the current directory"
        ) from error


def capabilities(text: str, stage: int) -> Capabilities | None:
    """Return the capabilities that a registered engine claims at ``stage``, in the release that ``text`` selects.

    The engine's module defines ``capabilities_of_release(stage, release)``, ``capabilities_at(stage)`` or, if the stage
    does not matter, the constant ``CAPABILITIES``. Returns None if the engine claims nothing before it is built.
    """
    if is_factory_path(text):
        return None
    module: Any = importlib.import_module(require(text).target.partition(":")[0])
    if hasattr(module, "capabilities_of_release"):
        of_release: Capabilities = module.capabilities_of_release(stage, resolve_version(text) or "")
        return of_release
    if hasattr(module, "capabilities_at"):
        at_stage: Capabilities = module.capabilities_at(stage)
        return at_stage
    return getattr(module, "CAPABILITIES", None)
