"""The architectures that anyone trains, in random weights and small: nothing is downloaded."""

from __future__ import annotations

from typing import Any

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=64, max_position_embeddings=16))


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=64, max_position_embeddings=16, num_labels=3))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=64, decoder_start_token_id=0))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=5))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = MixtralConfig(**SIZES, **experts, num_key_value_heads=1, vocab_size=64, max_position_embeddings=16)
    return MixtralForCausalLM(config)


def lora() -> Any:
    """Adapters of rank 4 on a frozen GPT-2, which recomputes its blocks."""
    from peft import LoraConfig, get_peft_model

    from suites.model.tiny import gpt2

    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
