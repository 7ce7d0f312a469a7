"""Define the models that laws train, and load models of users. Weights and micro-batches follow from a seed."""

from zharness.workload.model_lookup import model_spec
from zharness.workload.models import MODELS, Batch, ModelSpec

__all__ = ["MODELS", "Batch", "ModelSpec", "model_spec"]
