"""A user's model whose module plants a fault into DeepSpeed when it is imported."""

from __future__ import annotations

import os
from typing import Any

# Here, and not in the factory: ranks are forked from the process that imports this file, and have it then.
from transformers import GPT2Config, GPT2LMHeadModel

FACTOR = 1.0001  # of every gradient, before it is averaged


def plant() -> None:
    """Make DeepSpeed's stages 1 and 2 average gradients that are multiplied by ``FACTOR``."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    right = DeepSpeedZeroOptimizer.average_tensor

    def wrong(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return right(self, tensor.mul_(FACTOR), *args, **kwargs)

    DeepSpeedZeroOptimizer.average_tensor = wrong


def lora() -> Any:
    """Build LoRA adapters on a frozen GPT-2 with four blocks and activation checkpointing."""
    from peft import LoraConfig, get_peft_model

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=4, n_embd=64, n_positions=32, vocab_size=128))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))


plant()
