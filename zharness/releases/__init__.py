"""Test several releases of an engine in one environment.

Each release is installed in a folder of its own, which precedes the installed packages on the import path.
"""

from zharness.releases.overlay import ensure_overlay, overlay_environment

__all__ = ["ensure_overlay", "overlay_environment"]
