"""GRPO with rollouts from vLLM: train on them, publish the weights, save every 20 steps.

    python train.py          # trainer: kill it at any time and run it again
    python rollout.py        # in a second terminal and in vLLM's environment; so, too

`upload` publishes the weights of each step in shared memory, where the engine finds them; `save`
commits them with the optimizer, for a resume and for engines of other nodes. The tensors are copied
once for both.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trinity_sync import CheckpointCoordinator, RolloutGate

CLIP = 0.2
ROLLOUTS = Path("rollouts")


def make_model(folder: Path) -> None:
    """Write a tiny random model; a folder that is there already is trained instead."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=128,  # four heads of 32: vLLM on the CPU takes no smaller ones
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    new = folder.with_suffix(".new")
    Qwen2ForCausalLM(config).save_pretrained(new)
    new.rename(folder)  # so that it is whole, whenever this program is killed


def take_rollouts(gate: RolloutGate, step: int) -> dict[str, Any]:
    """Wait for rollouts whose weights are not too old for a model of this step."""
    while True:
        for file in sorted(ROLLOUTS.glob("*.pt")):
            rollouts = torch.load(file)
            file.unlink()
            if gate.accepts(rollouts["step"], trainer_step=step):
                return rollouts
        time.sleep(0.01)


def compute_loss(model: Any, rollouts: dict[str, Any]) -> torch.Tensor:
    """The clipped loss of GRPO, whose advantages compare the answers to one prompt."""
    rewards = rollouts["rewards"]  # prompts x answers to each
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).view(-1, 1)
    tokens, length = rollouts["tokens"], rollouts["log_probs"].shape[1]
    logits = model(tokens).logits[:, -length - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(2, tokens[:, -length:, None]).squeeze(2)
    ratio = (log_probs - rollouts["log_probs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def main() -> None:
    """Train to the last step, from the newest committed one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    ROLLOUTS.mkdir(exist_ok=True)
    if not Path("model").exists():
        make_model(Path("model"))
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    gate = RolloutGate(max_lag=1)

    with CheckpointCoordinator("ckpts") as saves:
        newest = saves.latest_step()
        if newest is not None:
            state = saves.load(newest)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optim"])
            print(f"resumed from step {newest}", flush=True)
        done = newest or 0
        for file in ROLLOUTS.glob("*.pt"):
            file.unlink()  # sampled for an earlier run
        saves.upload(done, model.state_dict)  # the engine begins with these weights

        for step in range(done + 1, options.steps + 1):
            rollouts = take_rollouts(gate, step - 1)
            compute_loss(model, rollouts).backward()
            optimizer.step()
            optimizer.zero_grad()
            saves.upload(step, model.state_dict)
            reward = rollouts["rewards"].mean()
            print(
                f"step {step}: reward {reward:.2f}, weights of step {rollouts['step']}", flush=True
            )
            if step % options.save_every == 0 or step == options.steps:
                saves.save(step, {"model": model.state_dict(), "optim": optimizer.state_dict()})
                print(f"saved step {step}", flush=True)


if __name__ == "__main__":
    main()
