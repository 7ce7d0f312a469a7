"""Models that the laws train, with their micro-batches and losses, reproducible from a seed; also users' models."""

from zharness.workload.model_lookup import model_spec
from zharness.workload.models import MODELS, Batch, ModelSpec

__all__ = ["MODELS", "Batch", "ModelSpec", "model_spec"]
