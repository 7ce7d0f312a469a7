"""Releases of engines, side by side: each in a folder of its own, in front of what is installed."""

from zharness.releases.overlay import ensure_overlay, overlay_environment

__all__ = ["ensure_overlay", "overlay_environment"]
