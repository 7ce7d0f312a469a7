"""Collect the laws about unusual training: unused weights, special gradients, changing batches and closed engines."""

from __future__ import annotations

from zharness.laws.circumstances import batches, engines, idle_weights, momentum, not_finite, values, windows

LAWS = (*windows.LAWS, *idle_weights.LAWS, *momentum.LAWS, *batches.LAWS, *values.LAWS, *not_finite.LAWS, *engines.LAWS)
