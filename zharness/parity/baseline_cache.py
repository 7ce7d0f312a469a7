"""Keep losses and gradients of plain PyTorch between runs, in files named by a digest of everything they depend on.

A file's name is a digest of the weights, buffers and attributes of the model, its hooks, the micro-batch, the arguments
of the run, the source of this package and of every loaded module that is not installed, the installed packages with the
digests of their files, and the processor. A file holds JSON and raw numbers, with a digest of both. zharness unpickles
and executes nothing in the file, but trusts its numbers: use a folder that only your own runs write.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from zharness.device import is_gpu_requested
from zharness.errors import UsageError
from zharness.parity.baseline import Baseline, LocalResult, LossWeighting, Objective
from zharness.workload import Batch, ModelSpec
from zharness.workload.nested_tensors import collect_tensors
from zharness.workload.user_model import IN_PROCESS_PACKAGE, UserModel

FOLDER_VARIABLE = "ZHARNESS_BASELINE_CACHE"
FORMAT = "zharness baseline 1\n"
KEPT_SECONDS = 30 * 24 * 3600.0  # an entry that no run has read for so long is removed
UNFINISHED_SECONDS = 24 * 3600.0  # no run writes one file for so long
SUFFIX, UNFINISHED = ".baseline", ".unfinished"
PACKAGE = Path(__file__).parents[1]
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
SITE_FOLDERS = {"site-packages", "dist-packages"}
LOSS = "the loss"
INTERNAL = frozenset(vars(nn.Module()))  # attributes of every module, such as its dictionary of parameters
CACHE_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n"  # https://bford.info/cachedir/
Numbers = Mapping[str, Tensor]


class UnknownDependencyError(Exception):
    """Raised for a run whose result depends on something that has no name in a file."""


@dataclass(frozen=True)
class BaselineCache:
    """A folder of results, each a mapping of tensors."""

    folder: Path

    def load(self, key: str) -> dict[str, Tensor] | None:
        """Return the numbers under ``key``, or None if there are none or if the file is damaged."""
        path = self.folder / f"{key}{SUFFIX}"
        try:
            content = path.read_bytes()
            os.utime(path)  # remove_old_entries keeps entries that were used
        except OSError:
            return None
        return decode(content)

    def store(self, key: str, numbers: Numbers) -> None:
        """Write ``numbers`` under ``key``; a process that reads meanwhile finds the whole file or none.

        Nothing is kept if the disk is full or the folder is gone: the next run computes the numbers again.
        """
        unfinished = self.folder / f"{key}.{os.getpid()}{UNFINISHED}"
        try:
            unfinished.write_bytes(encode(numbers))
            unfinished.replace(self.folder / f"{key}{SUFFIX}")
        except OSError:
            with suppress(OSError):
                unfinished.unlink()

    def list_entries(self) -> dict[str, os.stat_result]:
        """Return the size and times of every entry."""
        return self._list_files(SUFFIX)

    def _list_files(self, ending: str) -> dict[str, os.stat_result]:
        """Return the size and times of each file whose name has this ending."""
        found = {}
        for path in self.folder.glob(f"*{ending}"):
            with suppress(FileNotFoundError):  # another run has removed it since
                found[path.name] = path.stat()
        return found

    def remove_old_entries(self) -> None:
        """Remove the entries that no run has read or written for ``KEPT_SECONDS``.

        Files that a killed run has not finished are removed after ``UNFINISHED_SECONDS``.
        """
        for ending, seconds in ((SUFFIX, KEPT_SECONDS), (UNFINISHED, UNFINISHED_SECONDS)):
            for name, found in self._list_files(ending).items():
                if found.st_mtime < time.time() - seconds:
                    (self.folder / name).unlink(missing_ok=True)


def encode(numbers: Numbers) -> bytes:
    """Return a header, a line of JSON with names, dtypes and shapes, and the raw numbers."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in numbers.items()}
    described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    raw = b"".join(raw_bytes(tensor) for tensor in tensors.values())
    body = json.dumps(described).encode() + b"\n" + raw
    return FORMAT.encode() + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(content: bytes) -> dict[str, Tensor] | None:
    """Return the tensors that ``encode`` has written, or None if a byte of them has changed."""
    prefix = len(FORMAT) + 64
    head, body = content[:prefix], content[prefix + 1 :]
    if head != FORMAT.encode() + hashlib.sha256(body).hexdigest().encode():
        return None
    described, _, raw = body.partition(b"\n")
    found, offset = {}, 0
    for name, dtype_name, shape in json.loads(described):
        dtype = getattr(torch, dtype_name)
        count = dtype.itemsize * torch.Size(shape).numel()
        flat = torch.frombuffer(bytearray(raw[offset : offset + count]), dtype=torch.uint8) if count else torch.empty(0)
        found[name] = flat.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
        offset += count
    return found


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def compute_key(spec: ModelSpec, model: nn.Module, batch: Batch, arguments: tuple[Any, ...]) -> str:
    """Return the name of the result of running ``model`` on ``batch`` with ``arguments``.

    Raises UnknownDependencyError if the result depends on something that cannot be named.
    """
    require_factory(spec)
    digest = hashlib.sha256()
    for text in (spec.name, repr(model), *map(describe, arguments), describe_environment(), *describe_sources()):
        digest.update(text.encode() + b"\0")
    for name, module in model.named_modules():
        attributes = {key: describe_attribute(value) for key, value in vars(module).items() if key not in INTERNAL}
        hooks = [len(module._forward_pre_hooks), len(module._forward_hooks), len(module._backward_hooks)]
        digest.update(json.dumps([name, module.training, attributes, hooks], sort_keys=True).encode())
    named = (*model.named_parameters(), *model.named_buffers())
    drawn = [("batch", tensor) for tensor in collect_tensors((batch.inputs, batch.target))]
    for name, tensor in (*named, *drawn):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape), tensor.requires_grad]).encode())
        digest.update(raw_bytes(tensor))
    digest.update(f"{batch.seed} {describe_structure(batch.inputs)} {describe_structure(batch.target)}".encode())
    return digest.hexdigest()


def describe_attribute(value: Any) -> str:
    """Return a text for the plain values and tensors in a module's attribute; other objects appear as their class."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw_bytes(value)).hexdigest()}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {describe_attribute(part)}' for key, part in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe_attribute, value))}]"
    return repr(value) if isinstance(value, (bool, int, float, complex, str, torch.dtype)) else type(value).__qualname__


def require_factory(spec: ModelSpec) -> None:
    """Raise UnknownDependencyError unless the model comes from a user's factory that other processes can import."""
    build = getattr(spec.build, "build", spec.build)  # a JunctionModelBuilder has the factory's ``build``
    if not isinstance(getattr(build, "__self__", None), UserModel) or spec.name.startswith(f"{IN_PROCESS_PACKAGE}."):
        raise UnknownDependencyError(spec.name)


def describe_structure(inputs: Any) -> str:
    """Return how the tensors of a micro-batch are nested, and its other values. Raises UnknownDependencyError."""
    if isinstance(inputs, Tensor):
        return "tensor"
    if isinstance(inputs, Mapping):
        return repr([(key, describe_structure(value)) for key, value in inputs.items()])
    if isinstance(inputs, (list, tuple)):
        return repr([type(inputs).__name__, *map(describe_structure, inputs)])
    return describe(inputs)


def describe(value: Any) -> str:
    """Return a text that is the same exactly for equal plain values, and for functions with the same variables.

    Raises UnknownDependencyError for any other value.
    """
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, partial):
        return f"partial {describe(value.func)} {describe(value.args)} {describe(tuple(value.keywords.items()))}"
    if isinstance(value, FunctionType):  # ``describe_sources`` has its source
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        place = f"{value.__module__} {value.__qualname__} {value.__code__.co_firstlineno}"
        return f"{place} {describe(cells)} {describe(value.__defaults__)}"
    raise UnknownDependencyError(repr(type(value)))


@cache
def describe_environment() -> str:
    """Return a digest of this package, the installed packages, the processor and the number of threads."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    packages = [(each.metadata["Name"] or "", each.version, each.read_text("RECORD") or "") for each in distributions()]
    flags = next(iter(find_processor_lines()), "")
    threads, kernels = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    digest.update(repr((sorted(packages), sys.version, platform.machine(), flags, threads, kernels)).encode())
    return digest.hexdigest()


def find_processor_lines() -> Iterator[str]:
    """Yield the lines of /proc/cpuinfo that list the processor's features."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        yield from (line for line in path.read_text().splitlines() if line.startswith(("flags", "Features")))


def describe_sources() -> Iterator[str]:
    """Yield the name and the digest of each loaded module that is neither installed nor part of this package."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    for name, file in sorted((name, file) for name, file in files.items() if file and name != "__main__"):
        if not is_installed(file) and PACKAGE not in Path(file).parents and Path(file).is_file():
            yield f"{name} {digest_file(file, os.stat(file).st_mtime_ns)}"


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, whose digests the environment has."""
    return file.startswith(INSTALLED) or bool(SITE_FOLDERS & {*Path(file).parts})


@cache
def digest_file(file: str, _modified: int) -> str:
    """Return the digest of a file that was modified at this time."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@dataclass(frozen=True)
class CachedBaseline(Baseline):
    """A baseline that reads the results of earlier runs from the cache in ``folder``, and adds its own."""

    folder: str = ""

    def _run_local(
        self,
        step: int,
        params: Mapping[str, Tensor] | None,
        objective: Objective | None,
        weigh: LossWeighting | None,
        rank: int,
    ) -> LocalResult:
        """Return the result of an earlier run that depended on the same things, or of a new one."""
        run = partial(super()._run_local, step, params, objective, weigh, rank)
        if self.joins_ranks:  # the result depends on the micro-batches of all ranks
            return run()
        settings = (self.dtype, self.loss_scale, self.autocast, self.autocast_backward, self.cast_cache.name)
        arguments = (*settings, objective, weigh, None if weigh is None else rank)
        try:
            key = compute_key(self.spec, self.build_module(params), self.batch(rank, step), arguments)
        except UnknownDependencyError:
            return run()
        baseline_cache = BaselineCache(Path(self.folder))
        found = baseline_cache.load(key)
        if found is not None:
            return LocalResult(found.pop(LOSS), found)
        sources = list(describe_sources())
        result = run()
        # A module that this run imported is not in the key, so the result is not stored. Later runs have the module in
        # their key.
        has_all_sources = list(describe_sources()) == sources
        is_strided = all(grad.layout is torch.strided for grad in result.grads.values())
        if has_all_sources and is_strided and LOSS not in result.grads:
            baseline_cache.store(key, {LOSS: result.loss, **result.grads})
        return result


def with_cache(baseline: Baseline) -> Baseline:
    """Return ``baseline`` with the cache that ``use_cache`` has chosen for this run, if it has chosen one.

    Numbers of a GPU are never kept: they depend on its kind, driver and settings, which no key has.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or is_gpu_requested():
        return baseline
    return CachedBaseline(**{field.name: getattr(baseline, field.name) for field in fields(Baseline)}, folder=folder)


@contextmanager
def use_cache(folder: Path | None, report: Callable[[str], None]) -> Iterator[None]:
    """Let the judges that are started inside the block keep results in ``folder``; report how many they read and added.

    Raises UsageError if the folder cannot be written.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "CACHEDIR.TAG").write_text(CACHE_TAG, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the cache of baselines {str(folder)!r}: {error.strerror}; expected a folder of your own"
        ) from error
    baseline_cache = BaselineCache(folder.resolve())
    baseline_cache.remove_old_entries()
    before, earlier = baseline_cache.list_entries(), os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(baseline_cache.folder)
    try:
        yield
    finally:
        os.environ.pop(FOLDER_VARIABLE)
        if earlier is not None:
            os.environ[FOLDER_VARIABLE] = earlier
        after = baseline_cache.list_entries()
        read = [
            name for name, found in after.items() if name in before and found.st_mtime_ns > before[name].st_mtime_ns
        ]
        size = sum(found.st_size for found in after.values()) / 2**20
        report(
            f"{folder}: {len(read)} results of plain PyTorch read, {len(after.keys() - before)} added; {size:.0f} MiB"
        )
