"""Collect the laws about unusual steps: unused weights, special gradient values, and batches that change in shape."""

from __future__ import annotations

from zharness.laws.circumstances import batches, engines, idle_weights, values, windows

LAWS = (*windows.LAWS, *idle_weights.LAWS, *batches.LAWS, *values.LAWS, *engines.LAWS)
