"""The explorer: samples answers with the newest weights that it has loaded.

A process of its own, without veRL: weights reach it only through committed saves on disk. It reads
``latest_state_dict_iteration.txt``, which names a step that is complete, and merges that step's
shards into full tensors.
"""

import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from grpo_copy.task import ANSWER_LENGTH, Batch, draw_prompts, reward
from trinity_sync.layout import step_folder
from trinity_sync.storage.iteration import read_iteration

POLL_S = 0.02


class Explorer:
    """Samples batches for training.

    Args:
        model: folder of the untrained model, which is version 0.
        root: root folder of the job whose saves are followed.
        seed: step N's prompts and samples depend on it and on N alone.
    """

    def __init__(self, model: Path, root: Path, *, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self._model = Qwen2ForCausalLM.from_pretrained(model, attn_implementation="sdpa").eval()
        self._root = root
        self._seed = seed
        self.version = 0

    def follow(self, at_least: int, timeout_s: float = 60.0) -> int:
        """Wait for a committed version of ``at_least`` and load the newest one; returns its step.

        Raises:
            TimeoutError: no such version was committed in time.
        """
        deadline = time.monotonic() + timeout_s
        while (version := read_iteration(self._root, "state_dict") or 0) < at_least:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self._root}: step {at_least} was not committed within {timeout_s:.0f} s "
                    f"(newest: {version}); see its flow run in the Prefect UI"
                )
            time.sleep(POLL_S)
        if version > self.version:
            self._model.load_state_dict(merged(step_folder(self._root, version) / "actor"))
            self.version = version
        return version

    @torch.inference_mode()
    def sample(self, step: int) -> Batch:
        """Draw prompts for training step ``step`` and answer them."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        prompts, groups = draw_prompts(generator)
        tokens, log_probs = prompts, []
        for _ in range(ANSWER_LENGTH):
            logits = self._model(tokens, use_cache=False).logits[:, -1]
            choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            log_probs.append(logits.log_softmax(-1).gather(1, choice))
            tokens = torch.cat([tokens, choice], dim=1)
        answers = tokens[:, prompts.shape[1] :]
        return Batch(
            prompts=prompts,
            answers=answers,
            log_probs=torch.cat(log_probs, dim=1),
            rewards=reward(prompts, answers),
            groups=groups,
            version=self.version,
        )


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """Full tensors of the model from the shards of all ranks in ``folder``."""
    files = sorted(folder.glob("model_world_size_*_rank_*.pt"), key=_rank)
    shards = [torch.load(file, weights_only=False, mmap=True) for file in files]
    full = {}
    for name, first in shards[0].items():
        if isinstance(first, DTensor) and first.placements[-1].is_shard():
            parts = [shard[name].to_local() for shard in shards]
            full[name] = torch.cat(parts, dim=first.placements[-1].dim)
        else:
            full[name] = first.to_local() if isinstance(first, DTensor) else first
    return full


def _rank(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])
