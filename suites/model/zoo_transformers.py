"""Families of the transformers package, small and with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

# Imported here, not in each factory: ranks are forked from the process that imports this file, and inherit it.
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    ConvNextConfig,
    ConvNextForImageClassification,
    DistilBertConfig,
    DistilBertForTokenClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {"vocab_size": 64, "max_position_embeddings": 16}


def albert() -> Any:
    """Build an ALBERT, whose layers are one layer that is called twice."""
    return AlbertForSequenceClassification(AlbertConfig(**SIZES, **TEXT, embedding_size=16, num_labels=3))


def bart() -> Any:
    """Build a BART, an encoder and a decoder with tied embeddings."""
    sizes = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in BART_SIZES.items()}
    return BartForConditionalGeneration(BartConfig(**sizes, **TEXT, d_model=32, decoder_start_token_id=2))


BART_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}


def convnext() -> Any:
    """Build a ConvNeXt, with convolutions of one channel per group and layer norm over channels."""
    return ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, image_size=8, num_labels=3)
    )


def distilbert() -> Any:
    """Build a DistilBERT that classifies tokens."""
    return DistilBertForTokenClassification(
        DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=48, num_labels=3, **TEXT)
    )


def gemma() -> Any:
    """Build a Gemma, whose head is its embedding and whose embeddings are scaled."""
    return GemmaForCausalLM(GemmaConfig(**SIZES, **TEXT, num_key_value_heads=1, head_dim=16, pad_token_id=0))


def gpt_neox() -> Any:
    """Build a GPT-NeoX, with parallel attention and feed-forward layers."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **TEXT))


def mamba() -> Any:
    """Build a Mamba, a state-space model."""
    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4, vocab_size=64))


def opt() -> Any:
    """Build an OPT."""
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=48, word_embed_proj_dim=32, **TEXT
        )
    )


def qwen2() -> Any:
    """Build a Qwen2, with grouped heads and biases of queries, keys and values."""
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **TEXT, num_key_value_heads=1))


def resnet() -> Any:
    """Build a ResNet, with batch norm."""
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3, out_features=["stage2"]
    )
    config.image_size = 32  # by which images are drawn; a ResNet takes any size
    return ResNetForImageClassification(config)


def swin() -> Any:
    """Build a Swin transformer, with shifted windows and stochastic depth."""
    return SwinForImageClassification(
        SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=3
        )
    )
