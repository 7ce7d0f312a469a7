"""Common architectures of transformers, small and with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

# Imported here, not in each factory: ranks are forked from the process that imports this file, and inherit it.
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def gpt2() -> Any:
    """Build a GPT-2, with tied embeddings and dropout."""
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=64))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=64, max_position_embeddings=16))


def bert() -> Any:
    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=64, max_position_embeddings=16, num_labels=3))


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=64, decoder_start_token_id=0))


def vit() -> Any:
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=5))


def mixtral() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = MixtralConfig(**SIZES, **experts, num_key_value_heads=1, vocab_size=64, max_position_embeddings=16)
    return MixtralForCausalLM(config)


def lora() -> Any:
    """Build rank-4 adapters on a frozen GPT-2 that recomputes its blocks."""
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
