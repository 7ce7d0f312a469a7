"""Collect the laws of the group ``training``, in the order in which they are listed and run."""

from __future__ import annotations

from zharness.laws.training import (
    accumulation,
    any_order,
    caller_modes,
    calls_under_modes,
    clipping,
    forward_alone,
    free_running,
    grads,
    invariance,
    kernels,
    loss_scale,
    modes,
    muon,
    observer_effect,
    optimizer_options,
    reduction,
    several_backwards,
    sgd_step,
    trajectory,
)

LAWS = (
    *grads.LAWS,
    *trajectory.LAWS,
    *optimizer_options.LAWS,
    *muon.LAWS,
    *free_running.LAWS,
    *kernels.LAWS,
    *accumulation.LAWS,
    *loss_scale.LAWS,
    *sgd_step.LAWS,
    *observer_effect.LAWS,
    *modes.LAWS,
    *caller_modes.LAWS,
    *calls_under_modes.LAWS,
    *invariance.LAWS,
    *reduction.LAWS,
    *several_backwards.LAWS,
    *clipping.LAWS,
    *forward_alone.LAWS,
    *any_order.LAWS,
)
