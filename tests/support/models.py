"""Small models of Transformers."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config


def configure(
    config: Any,
    vocabulary: int,
    hidden: int,
    *,
    inner: int = 0,
    layers: int = 1,
    heads: int = 2,
    key_heads: int = 2,
    **more: Any,
) -> Any:
    """The configuration of a model, by the class of such configurations."""
    return config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner or hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        **more,
    )


def tiny(
    vocabulary: int = 17, *, tied: bool = False, layers: int = 2, seed: int = 0, **more: Any
) -> Any:
    """A Qwen2; 17 is no multiple of any number of ranks."""
    torch.manual_seed(seed)
    size = {"inner": 24, "layers": layers, "key_heads": 1}
    return AutoModelForCausalLM.from_config(
        configure(Qwen2Config, vocabulary, 16, tie_word_embeddings=tied, **size, **more)
    )
