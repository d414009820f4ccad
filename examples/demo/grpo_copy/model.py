"""A tiny random Qwen2 and its tokenizer, written to a folder for veRL."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, BOS, EOS, COPY = "<pad>", "<bos>", "<eos>", "<copy>"
LETTERS = tuple("abcdefghijkl")
VOCABULARY = (PAD, BOS, EOS, COPY, *LETTERS)
FIRST_LETTER = VOCABULARY.index(LETTERS[0])


def create_model(folder: Path, *, hidden: int = 64, layers: int = 2, seed: int = 0) -> Path:
    """Write a randomly initialised model and tokenizer to ``folder`` and return it.

    Args:
        folder: folder to write, created if missing.
        hidden: hidden size; a multiple of 16.
        layers: number of transformer blocks.
        seed: seed of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token=PAD))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=PAD
    )
