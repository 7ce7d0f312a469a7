"""Collect the laws of the group ``precision``, which check dtypes under autocast, loss scaling and master weights."""

from __future__ import annotations

from zharness.laws.precision import (
    autocast,
    autocast_norm,
    buffers,
    comm_dtype,
    edited_masters,
    frozen_masters,
    grad_scaler,
    master_weights,
    output_containers,
    safe_modules,
)

LAWS = (
    *autocast.LAWS,
    *safe_modules.LAWS,
    *autocast_norm.LAWS,
    *grad_scaler.LAWS,
    *comm_dtype.LAWS,
    *master_weights.LAWS,
    *edited_masters.LAWS,
    *frozen_masters.LAWS,
    *buffers.LAWS,
    *output_containers.LAWS,
)
