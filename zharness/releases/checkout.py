"""Checkouts in front of what is installed: no copy, no install, and nothing written into them."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from functools import cache as once
from pathlib import Path

from zharness.engines.checkouts import Checkout
from zharness.releases import overlay, usage_locks

STAMP_FILE = ".zharness-checkout"  # holds the checkout's spelling
# What a package's set-up writes into it and its sources alone lack. Without it DeepSpeed imports, but calls itself
# 0.0.0 and refuses the checkpoints of every release. The rest is what the package itself falls back to.
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
    """The folder that goes in front of what is installed, and the environment of a child that finds it there.

    It is the checkout itself, or a folder of links to it beside the one file that its set-up would have written.
    Raises UsageError when it does not import from there. Asked once by a process: it is what the process began with.
    """
    room = _checkout_cache(checkout)
    generated = _GENERATED_FILES.get(checkout.module)
    subject = f"{checkout.module}@{checkout.path}"
    with overlay.cache_write_guard(subject), overlay.build_lock(room):
        usage_locks.mark_in_use(room)
        room.mkdir(parents=True, exist_ok=True)
        (room / STAMP_FILE).write_text(subject)
        if generated is None or (checkout.package / generated[0]).exists():
            place = checkout.path
        else:
            place = _link_package(checkout, room / "links", generated[0], generated[1].format(version=checkout.version))
        env = overlay.overlay_environment(place, room)
        # Compiled bytecode would be written beside the sources, which are not ours. Another place for it would hold
        # torch's as well, compiled once more.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        overlay.import_and_get_version(
            place, checkout.module, env, subject, f"mend it, or try a release: {checkout.module}==RELEASE"
        )
    return place, env


def _checkout_cache(checkout: Checkout) -> Path:
    """What is kept of a checkout in the cache, by its path."""
    digest = hashlib.sha256(str(checkout.path).encode()).hexdigest()[:12]
    return overlay.cache_folder() / "checkouts" / f"{checkout.module}-{digest}"


def _link_package(checkout: Checkout, folder: Path, name: str, text: str) -> Path:
    """``place``, a folder in which the package is links to the checkout's entries and the file ``name``.

    The caller holds the room's lock.
    """
    entries = {entry.name: entry for entry in checkout.package.iterdir() if entry.name != "__pycache__"}
    package = folder / checkout.module
    prefix = f".{folder.name}{overlay.BUILDING_INFIX}"
    for left in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)  # of a process that was killed
    if not _is_current(package, entries, name, text):
        beside = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            (beside / checkout.module).mkdir()
            for entry in entries.values():
                (beside / checkout.module / entry.name).symlink_to(entry)
            (beside / checkout.module / name).write_text(text)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def _is_current(package: Path, entries: dict[str, Path], name: str, text: str) -> bool:
    if not (package / name).is_file() or (package / name).read_text() != text:
        return False
    links = {link.name: link.readlink() for link in package.iterdir() if link.is_symlink()}
    return links == entries
