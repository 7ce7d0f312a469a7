"""What is trained: small models, each with its batches and its loss, all following from a seed; and anyone's own."""

from zharness.workload.models import MODELS, Batch, ModelSpec
from zharness.workload.named import model_spec

__all__ = ["MODELS", "Batch", "ModelSpec", "model_spec"]
