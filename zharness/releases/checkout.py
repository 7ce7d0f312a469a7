"""Put a checkout before the installed package on the import path, without copying, installing or changing it."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from functools import cache as once
from pathlib import Path

from zharness.engines.checkouts import Checkout
from zharness.releases import overlay, usage_locks

STAMP_FILE = ".zharness-checkout"  # holds the checkout's spelling
# Files that a package's setup generates and its sources lack. Without its file DeepSpeed imports, but reports version
# 0.0.0 and refuses the checkpoints of every release. The other values are the package's own fallbacks.
_GENERATED_FILES = {
    "deepspeed": (
        "git_version_info_installed.py",
        """from .ops.op_builder.all_ops import ALL_OPS
version = {version!r}
git_hash = git_branch = '[none]'
installed_ops = dict.fromkeys(ALL_OPS, False)
accelerator_name = ''
torch_info = {{'version': '0.0', 'cuda_version': '0.0', 'nccl_version': '0.0', 'hip_version': '0.0'}}
""",
    )
}


@once
def prepare_checkout(checkout: Checkout) -> tuple[Path, dict[str, str]]:
    """Return the folder to put first on the import path, and the environment of a child process that uses the checkout.

    The folder is the checkout itself, or a folder that contains links to the checkout and the one file that the
    package's setup would generate. Raises UsageError if the package cannot be imported from this folder. The result is
    cached for the lifetime of the process, so that all ranks of the process use the same sources.
    """
    cache = _checkout_cache(checkout)
    generated = _GENERATED_FILES.get(checkout.module)
    subject = f"{checkout.module}@{checkout.path}"
    with overlay.cache_write_guard(subject), overlay.build_lock(cache):
        usage_locks.mark_in_use(cache)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / STAMP_FILE).write_text(subject)
        if generated is None or (checkout.package / generated[0]).exists():
            folder = checkout.path
        else:
            folder = _link_package(
                checkout, cache / "links", generated[0], generated[1].format(version=checkout.version)
            )
        env = overlay.overlay_environment(folder, cache)
        # Python would write compiled bytecode beside the checkout's sources, which must not change. With a separate
        # bytecode folder it would compile torch's sources once more.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        overlay.import_and_get_version(
            folder, checkout.module, env, subject, f"fix it, or try a release: {checkout.module}==RELEASE"
        )
    return folder, env


def _checkout_cache(checkout: Checkout) -> Path:
    """Return the cache folder of a checkout, whose name contains a digest of the checkout's path."""
    digest = hashlib.sha256(str(checkout.path).encode()).hexdigest()[:12]
    return overlay.cache_folder() / "checkouts" / f"{checkout.module}-{digest}"


def _link_package(checkout: Checkout, folder: Path, name: str, text: str) -> Path:
    """Fill ``folder`` with links to the checkout's files and with the generated file, and return ``folder``.

    ``name`` and ``text`` are the name and the content of the generated file. The caller has to hold the build lock.
    """
    entries = {entry.name: entry for entry in checkout.package.iterdir() if entry.name != "__pycache__"}
    package = folder / checkout.module
    prefix = f".{folder.name}{overlay.BUILDING_INFIX}"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)  # left by a process that was killed
    if not _is_current(package, entries, name, text):
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            (temporary / checkout.module).mkdir()
            for entry in entries.values():
                (temporary / checkout.module / entry.name).symlink_to(entry)
            (temporary / checkout.module / name).write_text(text)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_current(package: Path, entries: dict[str, Path], name: str, text: str) -> bool:
    """Return whether ``package`` has exactly the links to ``entries``, and a file ``name`` that contains ``text``."""
    if not (package / name).is_file() or (package / name).read_text() != text:
        return False
    links = {link.name: link.readlink() for link in package.iterdir() if link.is_symlink()}
    return links == entries
