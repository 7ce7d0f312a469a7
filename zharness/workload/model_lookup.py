"""A model by its name in a case: one of the workload's, or a factory of anyone's."""

from __future__ import annotations

from zharness.errors import UsageError
from zharness.workload.models import MODELS, ModelSpec
from zharness.workload.user_model import is_user_model, user_model_spec


def model_spec(name: str) -> ModelSpec:
    """The model called ``name``, or that of the factory ``package.module:factory``. Raises UsageError for another name.

    A factory is imported, and not called before its model is asked for.
    """
    if is_user_model(name):
        return user_model_spec(name)
    if name not in MODELS:
        remedy = "or package.module:factory; `zharness list models` describes them"
        raise UsageError.unknown_name("model", name, sorted(MODELS), remedy)
    return MODELS[name]
