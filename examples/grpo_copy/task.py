"""The task: given ``<bos> x <copy>``, answer ``x x x x``; the reward is the share of right tokens.

A random model gets about 1/16; GRPO takes it above 0.9 in some 120 steps. The advantages and the
loss are veRL's own; this module only makes prompts and counts.
"""

from dataclasses import dataclass

import torch

from grpo_copy.model import BOS, COPY, FIRST_LETTER, LETTERS, VOCABULARY

ANSWER_LENGTH = 4
PROMPTS = 16
SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True)
class Batch:
    """What one training step needs; B samples, P prompt tokens, R answer tokens.

    Attributes:
        prompts: int64, B x P.
        answers: int64, B x R.
        log_probs: float32, B x R; of the answers under the weights that sampled them.
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
    """Draw prompts, each ``SAMPLES_PER_PROMPT`` times: (B x P tokens, B group numbers)."""
    letters = torch.randint(len(LETTERS), (PROMPTS,), generator=generator) + FIRST_LETTER
    prompts = torch.full((PROMPTS, 3), VOCABULARY.index(COPY))
    prompts[:, 0] = VOCABULARY.index(BOS)
    prompts[:, 1] = letters
    groups = torch.arange(PROMPTS)
    return (
        prompts.repeat_interleave(SAMPLES_PER_PROMPT, dim=0),
        groups.repeat_interleave(SAMPLES_PER_PROMPT),
    )


def reward(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Share of answer tokens that equal the prompt's letter: float32, B."""
    return (answers == prompts[:, 1:2]).float().mean(dim=1)
