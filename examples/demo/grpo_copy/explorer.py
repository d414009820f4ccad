"""The explorer: samples answers with the newest weights that it has loaded.

It is a process of its own, without veRL. It loads weights with a `WeightReader`, from the trainer's
shared memory or from committed saves, or receives them by broadcast, once it has joined a process
group with the trainer. Its RNG state, which determines the next prompts, is part of each batch, to
be committed with the step that is trained on it: the explorer may be ahead by then.
"""

import asyncio
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from grpo_copy.task import ANSWER_LENGTH, Batch, compute_reward, draw_prompts
from trinity_sync import WeightReader
from trinity_sync.weights.broadcast import receive_into
from trinity_sync.weights.weight_group import WeightGroup, join_weight_group

TIMEOUT_S = 120.0


class Explorer:
    """Samples batches for training.

    Args:
        model: folder of the untrained model, which is version 0.
        root: the job's root.
        state: RNG state from a batch of an earlier explorer, to continue after it; None to start.
        seed: seed of prompts and samples, without ``state``.
    """

    def __init__(
        self,
        model: Path,
        root: Path,
        *,
        state: bytes | None = None,
        seed: int = 0,
    ) -> None:
        torch.set_num_threads(1)
        self._model = Qwen2ForCausalLM.from_pretrained(model, attn_implementation="sdpa").eval()
        self._reader = WeightReader(root=root, name="explorer")
        self._group: WeightGroup | None = None
        self._random = torch.Generator().manual_seed(seed)
        if state is not None:
            self._random.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self.version = 0

    def join(self, address: str, port: int) -> None:
        """Receive weights by broadcast from now on; returns when the trainer has joined.

        Args:
            address: address of the trainer's rank 0.
            port: its port.
        """
        self._group = join_weight_group(address, port, rank=1, world_size=2, timeout_s=TIMEOUT_S)

    def load_newest(self, min_step: int) -> int:
        """Wait for a version of ``min_step`` or later and load the newest; returns its step.

        Raises:
            TimeoutError: there is no such version in time.
        """
        if self._group is not None:
            self.version = receive_into(self._model.state_dict(), self._group)
        while self.version < min_step:
            if asyncio.run(self._reader.wait_newer(timeout_s=TIMEOUT_S)) is None:
                raise TimeoutError(
                    f"no version of step {min_step} within {TIMEOUT_S:.0f} s (newest: "
                    f"{self.version}); see the flow runs of the job in the Prefect UI"
                )
            self.version = self._reader.load_into(self._model)
        return self.version

    @torch.inference_mode()
    def sample(self) -> tuple[Batch, bytes]:
        """Draw the next prompts and sample answers; return them and the RNG state after them."""
        prompts, groups = draw_prompts(self._random)
        tokens, log_probs = prompts, []
        for _ in range(ANSWER_LENGTH):
            logits = self._model(tokens, use_cache=False).logits[:, -1]
            choice = torch.multinomial(logits.softmax(-1), 1, generator=self._random)
            log_probs.append(logits.log_softmax(-1).gather(1, choice))
            tokens = torch.cat([tokens, choice], dim=1)
        answers = tokens[:, prompts.shape[1] :]
        batch = Batch(
            prompts=prompts,
            answers=answers,
            log_probs=torch.cat(log_probs, dim=1),
            rewards=compute_reward(prompts, answers),
            groups=groups,
            version=self.version,
        )
        return batch, self._random.get_state().numpy().tobytes()
