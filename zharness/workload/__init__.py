"""The models that are trained, each with its batches and loss, reproducible from a seed; and users' own models."""

from zharness.workload.model_lookup import model_spec
from zharness.workload.models import MODELS, Batch, ModelSpec

__all__ = ["MODELS", "Batch", "ModelSpec", "model_spec"]
