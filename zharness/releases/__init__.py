"""Test several releases of an engine side by side.

Each release is in a folder of its own, which precedes the installed packages on the import path.
"""

from zharness.releases.overlay import ensure_overlay, overlay_environment

__all__ = ["ensure_overlay", "overlay_environment"]
