"""Train a small language model to count, and publish its weights every 25 steps.

    trinity-sync up
    python train.py          # trainer: kill it at any time and run it again
    python rollout.py        # in a second terminal and in vLLM's environment

`upload` publishes the weights in shared memory for readers of this node; `save` commits them with
the optimizer, for a resume and for readers of other nodes. The tensors are copied once for both.
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trinity_sync import CheckpointCoordinator

STEPS, PUBLISH_EVERY = 300, 25

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
)
model = Qwen2ForCausalLM(config)
model.save_pretrained("model")  # what vLLM starts with
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

with CheckpointCoordinator("ckpts") as ckpt:
    done = ckpt.latest_step(settle_s=30) or 0
    if done:
        state = ckpt.load(done)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        print(f"resumed from step {done}")

    for step in range(done + 1, STEPS + 1):
        tokens = (torch.randint(64, (32, 1)) + torch.arange(32)) % 64  # 61 62 63 0 1 2 ...
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % PUBLISH_EVERY == 0:
            ckpt.upload(step, model.state_dict)
            ckpt.save(step, {"model": model.state_dict(), "optim": optimizer.state_dict()})
            print(f"step {step}: loss {loss:.4f}")
