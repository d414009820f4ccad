"""The task: given ``<bos> x <copy>``, answer ``x x x x``; the reward is the share of right tokens.

A random model gets about 1/16; GRPO reaches 0.9 in some 120 steps. Advantages and loss are veRL's;
this module only makes prompts and computes rewards.
"""

from dataclasses import dataclass

import torch

from grpo_copy.model import BOS, COPY, FIRST_LETTER, LETTERS, VOCABULARY

ANSWER_LENGTH = 4
PROMPTS = 16
SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True)
class Batch:
    """The data of one training step: B samples, P prompt tokens, R answer tokens.

    Attributes:
        prompts: int64, B x P.
        answers: int64, B x R.
        log_probs: float32, B x R; log probabilities under the weights that sampled the answers.
        rewards: float32, B.
        groups: int64, B; samples of one prompt share a number.
        version: step of the weights that sampled the answers; 0 is the untrained model.
    """

    prompts: torch.Tensor
    answers: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    version: int


def draw_prompts(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts (int64, B x P), each ``SAMPLES_PER_PROMPT`` times, and their groups (B)."""
    letters = torch.randint(len(LETTERS), (PROMPTS,), generator=generator) + FIRST_LETTER
    prompts = torch.full((PROMPTS, 3), VOCABULARY.index(COPY))
    prompts[:, 0] = VOCABULARY.index(BOS)
    prompts[:, 1] = letters
    groups = torch.arange(PROMPTS)
    return (
        prompts.repeat_interleave(SAMPLES_PER_PROMPT, dim=0),
        groups.repeat_interleave(SAMPLES_PER_PROMPT),
    )


def compute_reward(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the share of answer tokens that equal the prompt's letter: float32, B.

    Args:
        prompts: int64, B x P.
        answers: int64, B x R.
    """
    return (answers == prompts[:, 1:2]).float().mean(dim=1)
