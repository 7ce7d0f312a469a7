"""Collect the laws about unusual training: unused weights, special gradients, changing batches and closed engines."""

from __future__ import annotations

from zharness.laws.circumstances import (
    batches,
    engines,
    evaluations,
    idle_weights,
    interleaved,
    low_precision,
    mixed_calls,
    momentum,
    not_finite,
    schedules,
    skipped_steps,
    values,
    windows,
)

LAWS = (
    *windows.LAWS,
    *mixed_calls.LAWS,
    *evaluations.LAWS,
    *idle_weights.LAWS,
    *momentum.LAWS,
    *low_precision.LAWS,
    *batches.LAWS,
    *values.LAWS,
    *not_finite.LAWS,
    *skipped_steps.LAWS,
    *schedules.LAWS,
    *engines.LAWS,
    *interleaved.LAWS,
)
