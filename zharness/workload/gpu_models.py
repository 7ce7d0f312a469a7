"""Define models whose initial weights are drawn on the GPU, like the weights of a model on the meta device."""

from __future__ import annotations

from dataclasses import fields

from torch import nn

from zharness.device import is_gpu_requested
from zharness.workload.generators import fork_seeded_generators
from zharness.workload.models import ModelSpec


class ModelDrawnOnGpu(ModelSpec):
    """A specification whose initial weights are drawn by the generator of torch's default device, a GPU."""

    def model(self, seed: int) -> nn.Module:
        with fork_seeded_generators(seed):
            return self.build()


def draw_on_compute_device(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with weights drawn on the device that computes, as a model on the meta device draws them."""
    if not is_gpu_requested():
        return spec
    return ModelDrawnOnGpu(**{field.name: getattr(spec, field.name) for field in fields(spec)})
