"""Sample rollouts with vLLM, whose weights follow those of the trainer.

    pip install vllm trinity-sync
    python rollout.py        # next to train.py; kill it at any time and run it again

The prompt is a token, twice; the reward is the share of the answer that repeats it. Rollouts are
files, each with the step of the weights that sampled it.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from trinity_sync.integrations.vllm import VLLMUpdater

WORDS = range(20, 32)
ROLLOUTS = Path("rollouts")


def sample(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> dict[str, Any]:
    """Sample answers to each prompt, and compute their rewards."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    tokens, log_probs, rewards = [], [], []
    for request in llm.generate(inputs, sampling, use_tqdm=False):
        for answer in request.outputs:
            word, chosen = request.prompt_token_ids[-1], answer.token_ids
            tokens.append([*request.prompt_token_ids, *chosen])
            log_probs.append(
                [at[token].logprob for at, token in zip(answer.logprobs, chosen, strict=True)]
            )
            rewards.append(list(chosen).count(word) / len(chosen))
    return {
        "tokens": torch.tensor(tokens),
        "log_probs": torch.tensor(log_probs),
        "rewards": torch.tensor(rewards).view(len(prompts), -1),
    }


def main() -> None:
    """Sample one batch with each version of the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    options = parser.parse_args()
    llm = LLM(
        "model",
        weight_transfer_config={"backend": "trinity_sync"},
        load_format="dummy",  # random weights, until the first update
        skip_tokenizer_init=True,  # token ids in, token ids out
        dtype="float32",
        max_model_len=128,
        block_size=32,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
    )
    sampling = SamplingParams(
        n=options.answers, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False
    )
    with VLLMUpdater(llm, "ckpts") as updater:
        for step in updater.follow():
            prompts = [[word, word] for word in random.choices(WORDS, k=options.prompts)]
            rollouts = {"step": step, **sample(llm, prompts, sampling)}
            new = ROLLOUTS / "new"
            torch.save(rollouts, new)
            new.rename(ROLLOUTS / f"{time.time_ns()}.pt")  # the trainer sees it once it is whole
            print(f"step {step}: reward {rollouts['rewards'].mean():.2f}", flush=True)


if __name__ == "__main__":
    main()
