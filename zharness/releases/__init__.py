"""Test several releases of an engine side by side: each lies in a folder that precedes the installed one on
the path.
"""

from zharness.releases.overlay import ensure_overlay, overlay_environment

__all__ = ["ensure_overlay", "overlay_environment"]
