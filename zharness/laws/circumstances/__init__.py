"""Collect the laws about unusual training: unused weights, special gradients, changing batches and closed engines."""

from __future__ import annotations

from zharness.laws.circumstances import batches, engines, idle_weights, values, windows

LAWS = (*windows.LAWS, *idle_weights.LAWS, *batches.LAWS, *values.LAWS, *engines.LAWS)
