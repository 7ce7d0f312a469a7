"""Models that the laws train and models of users. Weights and micro-batches can be reproduced from a seed."""

from zharness.workload.model_lookup import model_spec
from zharness.workload.models import MODELS, Batch, ModelSpec

__all__ = ["MODELS", "Batch", "ModelSpec", "model_spec"]
