"""Draw micro-batches for models of the transformers package from their configuration, without importing the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MAX_TOKENS = 32  # tokens per sample, or fewer if the model has fewer positions
POSITION_LIMIT_KEYS = ("max_position_embeddings", "n_positions")
DrawInputs = Callable[[torch.Generator], Any]


def find_draw(model: nn.Module, samples: int) -> DrawInputs | None:
    """Return a function that draws inputs and labels for ``model``, with ``samples`` rows.

    Returns None if the model is not of the transformers package or computes no loss.
    """
    get_base_model: Any = getattr(model, "get_base_model", None)  # a method of PEFT's wrappers
    inner: Any = get_base_model() if get_base_model is not None else model
    config, main_input = getattr(inner, "config", None), getattr(inner, "main_input_name", "")
    arguments = inspect.signature(inner.forward).parameters
    if config is None or not ({"labels", "start_positions"} & set(arguments)):
        return None

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        if main_input == "pixel_values":
            height_width = image_height_width(config.image_size)
            pixels = torch.randn(samples, config.num_channels, *height_width, generator=generator)
            return {"pixel_values": pixels, "labels": random_integers(config.num_labels, (samples,), generator)}
        length = min([MAX_TOKENS, *(getattr(config, key) for key in POSITION_LIMIT_KEYS if getattr(config, key, None))])
        ids = random_integers(config.vocab_size, (samples, length), generator)
        return {"input_ids": ids, **draw_labels(type(inner).__name__, config, samples, length, generator)}

    return draw if main_input in ("input_ids", "pixel_values") else None


def draw_labels(
    class_name: str, config: Any, samples: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw the labels that a model of the class ``class_name`` needs to compute its loss."""
    if class_name.endswith("ForQuestionAnswering"):
        return {name: random_integers(length, (samples,), generator) for name in ("start_positions", "end_positions")}
    if class_name.endswith("ForSequenceClassification"):
        return {"labels": random_integers(config.num_labels, (samples,), generator)}
    if class_name.endswith("ForTokenClassification"):
        return {"labels": random_integers(config.num_labels, (samples, length), generator)}
    return {"labels": random_integers(config.vocab_size, (samples, length), generator)}


def image_height_width(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image; ``size`` is a pair of both, or one number for a square image."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def random_integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a tensor of the shape ``shape`` whose elements are integers from 0 to ``high`` - 1."""
    return torch.randint(high, shape, generator=generator)
