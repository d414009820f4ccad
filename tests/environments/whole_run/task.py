"""The task: given ``<bos> x <copy>``, answer ``x x x x``; and the tiny model that learns it."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.models import configure

BOS, COPY, FIRST_LETTER, LETTERS = 1, 3, 4, 12
ANSWER, SAMPLES = 4, 4
"""Tokens of an answer, and answers to each prompt."""

Rollout = dict[str, torch.Tensor]
"""Of one prompt: ``tokens`` (SAMPLES x 7), ``log_probs`` (SAMPLES x ANSWER), ``rewards``."""


def create_model() -> Qwen2ForCausalLM:
    """Return the same random model in every process."""
    sizes = {"inner": 64, "layers": 2, "heads": 4, "max_position_embeddings": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": BOS, "eos_token_id": None}
    vocabulary = FIRST_LETTER + LETTERS
    config = configure(Qwen2Config, vocabulary, 32, tie_word_embeddings=False, **sizes, **tokens)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def roll_out(model: Qwen2ForCausalLM, ids: list[int]) -> dict[int, Rollout]:
    """Sample answers to prompts, with Transformers' own ``generate``."""
    letters = torch.tensor([FIRST_LETTER + number % LETTERS for number in ids])
    prompts = torch.tensor([[BOS, 0, COPY]]).repeat(len(ids), 1)
    prompts[:, 1] = letters
    with torch.no_grad():
        said = model.generate(
            prompts.repeat_interleave(SAMPLES, dim=0),
            attention_mask=torch.ones(len(ids) * SAMPLES, 3, dtype=torch.long),
            max_new_tokens=ANSWER,
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = said.sequences.view(len(ids), SAMPLES, -1)
    answers = tokens[:, :, -ANSWER:]
    log_probs = torch.stack(said.logits, dim=1).log_softmax(-1).view(len(ids), SAMPLES, ANSWER, -1)
    log_probs = log_probs.gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    rewards = (answers == letters.view(-1, 1, 1)).float().mean(-1)
    return {
        number: {"tokens": tokens[at], "log_probs": log_probs[at], "rewards": rewards[at]}
        for at, number in enumerate(ids)
    }


def compute_loss(model: torch.nn.Module, batch: Rollout, share: slice) -> torch.Tensor:
    """Return GRPO's clipped loss of a share of each prompt's samples."""
    rewards = batch["rewards"]
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    tokens = batch["tokens"][:, share].flatten(0, 1)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, -ANSWER:]
    now = logits.log_softmax(-1).gather(-1, tokens[:, -ANSWER:].unsqueeze(-1)).squeeze(-1)
    ratio = (now - batch["log_probs"][:, share].flatten(0, 1)).exp()
    gain = advantages[:, share].reshape(-1, 1)
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
