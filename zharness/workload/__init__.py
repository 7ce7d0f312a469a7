"""What is trained: small models, each with its batches and its loss, all following from a seed; and anyone's own."""

from zharness.workload.model_lookup import model_spec
from zharness.workload.models import MODELS, Batch, ModelSpec

__all__ = ["MODELS", "Batch", "ModelSpec", "model_spec"]
