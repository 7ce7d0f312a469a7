"""Micro-batches for models of the transformers package, drawn by what their configuration says; nothing is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MAX_TOKENS = 32  # tokens in a row, or what the model has positions for
POSITION_LIMIT_KEYS = ("max_position_embeddings", "n_positions")
DrawInputs = Callable[[torch.Generator], Any]


def find_draw(model: nn.Module, samples: int) -> DrawInputs | None:
    """How ``samples`` rows of inputs and labels are drawn; None for a model of another make, or without a loss."""
    base: Any = getattr(model, "get_base_model", None)  # of PEFT's
    inner: Any = base() if base is not None else model
    config, main = getattr(inner, "config", None), getattr(inner, "main_input_name", "")
    takes = inspect.signature(inner.forward).parameters
    if config is None or not ({"labels", "start_positions"} & set(takes)):
        return None

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        if main == "pixel_values":
            side = image_height_width(config.image_size)
            pixels = torch.randn(samples, config.num_channels, *side, generator=generator)
            return {"pixel_values": pixels, "labels": random_integers(config.num_labels, (samples,), generator)}
        length = min([MAX_TOKENS, *(getattr(config, key) for key in POSITION_LIMIT_KEYS if getattr(config, key, None))])
        ids = random_integers(config.vocab_size, (samples, length), generator)
        return {"input_ids": ids, **draw_labels(type(inner).__name__, config, samples, length, generator)}

    return draw if main in ("input_ids", "pixel_values") else None


def draw_labels(
    class_name: str, config: Any, samples: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The labels that the loss of a model of this class takes."""
    if class_name.endswith("ForQuestionAnswering"):
        return {name: random_integers(length, (samples,), generator) for name in ("start_positions", "end_positions")}
    if class_name.endswith("ForSequenceClassification"):
        return {"labels": random_integers(config.num_labels, (samples,), generator)}
    if class_name.endswith("ForTokenClassification"):
        return {"labels": random_integers(config.num_labels, (samples, length), generator)}
    return {"labels": random_integers(config.vocab_size, (samples, length), generator)}


def image_height_width(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def random_integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers from 0 to ``below`` - 1."""
    return torch.randint(high, shape, generator=generator)
