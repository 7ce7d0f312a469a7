"""Collect the laws about circumstances of training: what a step uses, and what gradients and batches look like."""

from __future__ import annotations

from zharness.laws.circumstances import batches, engines, idle_weights, values, windows

LAWS = (*windows.LAWS, *idle_weights.LAWS, *batches.LAWS, *values.LAWS, *engines.LAWS)
