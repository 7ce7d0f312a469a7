"""Collect the laws about unusual training: unused weights, special gradients, changing batches and closed engines."""

from __future__ import annotations

from zharness.laws.circumstances import (
    batches,
    engines,
    idle_weights,
    interleaved,
    not_finite,
    skipped_steps,
    values,
    windows,
)

LAWS = (
    *windows.LAWS,
    *idle_weights.LAWS,
    *batches.LAWS,
    *values.LAWS,
    *not_finite.LAWS,
    *skipped_steps.LAWS,
    *engines.LAWS,
    *interleaved.LAWS,
)
