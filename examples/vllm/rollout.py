"""Generate with vLLM, and load each new version of the trainer's weights into the running engine.

    pip install vllm trinity-sync
    python rollout.py        # next to train.py, which has written model/

At first the answers are noise. With the last version they count: `5 6 7 -> 8 9 10 11 12 13 14 15`.
"""

import asyncio
from pathlib import Path

from vllm import LLM, SamplingParams

from trinity_sync import WeightReader

LAST = 300  # the step at which train.py ends


class FollowTrainer:
    """Methods that vLLM adds to each of its workers."""

    def follow(self, root: str) -> None:
        """Read the weights of the job at `root`."""
        self.reader = WeightReader(root=root, name=f"vllm-{self.rank}")

    def load_newer(self) -> int:
        """Wait for a newer version, load it, and return its step."""
        if asyncio.run(self.reader.wait_newer(timeout_s=120)) is None:
            raise TimeoutError("the trainer has published nothing for 120 s")
        self.model_runner.reload_weights(weights_iterator=self.reader.iter_weights())
        return self.reader.version.step


def main() -> None:
    """Answer one prompt with each version."""
    llm = LLM(
        "model",
        worker_extension_cls="rollout.FollowTrainer",
        skip_tokenizer_init=True,  # this model reads and writes token ids
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    llm.collective_rpc("follow", args=(str(Path("ckpts").resolve()),))
    step = 0
    while step < LAST:
        step = llm.collective_rpc("load_newer")[0]
        llm.reset_prefix_cache()  # it was computed with the old weights
        answer = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy, use_tqdm=False)[0]
        print(f"step {step}: 5 6 7 ->", *answer.outputs[0].token_ids)


if __name__ == "__main__":
    main()
