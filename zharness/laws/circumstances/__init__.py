"""Collect the laws about unusual training: unused weights, special gradients, changing batches and closed engines."""

from __future__ import annotations

from zharness.laws.circumstances import (
    batches,
    engines,
    evaluations,
    idle_weights,
    momentum,
    not_finite,
    schedules,
    values,
    windows,
)

LAWS = (
    *windows.LAWS,
    *evaluations.LAWS,
    *idle_weights.LAWS,
    *momentum.LAWS,
    *batches.LAWS,
    *values.LAWS,
    *not_finite.LAWS,
    *schedules.LAWS,
    *engines.LAWS,
)
