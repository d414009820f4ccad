"""Train with TRL's GRPO; a vLLM server generates, with the weights of each step.

    pip install "trl[vllm]" trinity-sync
    python train.py          # kill it at any time and run it again

and in a second terminal, once model/ is there:

    VLLM_SERVER_DEV_MODE=1 vllm serve model --max-model-len 64 --logprobs-mode processed_logprobs \\
        --max-logprobs -1 --weight-transfer-config '{"backend": "trinity_sync"}'

The model is a tiny random Qwen2. It gets a reward for each `a` that it writes: from 0.02 to 1 in 40
steps. `sampling/sampling_logp_difference` in the log compares the server's log-probabilities with
those of the trainer's weights.
"""

import os
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from trinity_sync.integrations.huggingface import TrinitySyncCallback
from trinity_sync.integrations.trl import VLLMSyncMixin

SERVER = os.environ.get("VLLM_SERVER", "http://127.0.0.1:8000")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 8


class Trainer(VLLMSyncMixin, GRPOTrainer):
    """GRPO whose vLLM server gets its weights from trinity_sync."""


def make_model(folder: Path) -> None:
    """Write the model and tokenizer that server and trainer start with."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    words_to_numbers = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    words_to_numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_to_numbers, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=128,  # four heads of 32: vLLM on the CPU takes no smaller ones
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(folder)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def count_a(completions: list[str], **_: object) -> list[float]:
    """Return the share of `a` in each completion."""
    return [text.count("a") / LENGTH for text in completions]


folder = Path("model")
if not folder.exists():
    make_model(folder)
print("model/ is ready; waiting for the server", flush=True)

saves = TrinitySyncCallback("ckpts")
arguments = GRPOConfig(
    output_dir="out",  # the checkpoints are in ckpts instead
    use_vllm=True,
    vllm_mode="server",
    vllm_server_base_url=SERVER,
    max_steps=40,
    per_device_train_batch_size=16,
    num_generations=8,
    max_completion_length=LENGTH,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    save_steps=5,
    save_total_limit=3,
    logging_steps=5,
    report_to=[],
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    count_a,
    arguments,
    train_dataset=Dataset.from_list([{"prompt": f"{a} {b}"} for a in LETTERS for b in LETTERS]),
    processing_class=AutoTokenizer.from_pretrained(folder),
    callbacks=[saves],
)
newest = saves.latest()  # None on the first start
if newest:
    print(f"resumed from {newest}")
trainer.train(resume_from_checkpoint=newest)  # raises SaveFailedError if a save failed
