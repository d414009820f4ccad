"""What it costs to keep every policy of a fine-tuning, beside as many complete versions.

::

    python -m benchmarks.policies [VERSIONS]

A Qwen2 of 6 million parameters learns the bytes of these pages: ``bfloat16`` weights, ``float32``
masters, AdamW. After 300 steps it is fine-tuned on the bytes of the package, once for each learning
rate. Each step is uploaded and published with ``deltas=49, keep="all"``. At the end each version is
read back and compared with a digest that was taken in the training.
"""

import asyncio
import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from trinity_sync import CheckpointCoordinator, FolderReader, WeightFolder, WeightReader

HERE = Path(__file__).parents[1]
RATES = {"typical": 1e-5, "worst case": 1e-3}
BATCH, LENGTH, FIRST, DELTAS = 2, 64, 300, 49
State = dict[str, torch.Tensor]


def read_text(folder: str, suffix: str) -> torch.Tensor:
    content = b"".join(path.read_bytes() for path in sorted((HERE / folder).rglob(f"*{suffix}")))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def train(model: Any, text: torch.Tensor, rate: float, steps: int) -> Iterator[float]:
    """Train by masters in float32; yield the loss of each step."""
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=rate)
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=chance)
        tokens = torch.stack([text[at : at + LENGTH] for at in starts]).long()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        yield loss.item()


def digest(state: State) -> str:
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(name.encode() + state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


async def publish_all(model: Any, rate: float, versions: int, scratch: Path) -> str:
    """Publish each step of a fine-tuning; return a row of the table."""
    root, made, losses = scratch / "ckpts", dict[int, str](), list[float]()
    folder = WeightFolder(scratch / "weights", scratch / "model", deltas=DELTAS, keep="all")
    took = 0.0
    with CheckpointCoordinator(root) as saves, WeightReader(root=root, name="policies") as reader:
        for loss in train(model, read_text("trinity_sync", ".py"), rate, versions):
            losses.append(loss)
            saves.upload(len(losses), model.state_dict)
            made[len(losses)] = digest(model.state_dict())
            await reader.wait_newer()
            began = time.process_time()
            assert folder.publish(reader).step == len(losses)
            took += time.process_time() - began
    follower = FolderReader(scratch / "weights")
    found = follower.list_versions()
    assert {each.step: digest(follower.load(each)) for each in found} == made
    sizes = [sum(p.stat().st_size for p in each.folder.glob("*.safetensors")) for each in found]
    deltas = [n for n, each in zip(sizes, found, strict=True) if each.base is not None]
    return (
        f"{rate:g}, {len(found)} versions, loss {losses[0]:.2f} to {losses[-1]:.2f} | "
        f"{sum(deltas) / len(deltas) / sizes[0]:.1%} ({max(deltas) / sizes[0]:.1%} the largest) | "
        f"{sum(sizes) / len(sizes) / sizes[0]:.1%}: {sum(sizes) / 1e9:.2f} GB instead of "
        f"{len(sizes) * sizes[0] / 1e9:.2f} GB | {took / len(found):.2f} CPU s a version"
    )


def main() -> None:
    versions = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 256}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=False, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters")
    *_, loss = train(model, read_text("docs", ".md"), 1e-3, FIRST)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    print(f"loss after {FIRST} steps: {loss:.2f}", flush=True)
    for what, rate in RATES.items():
        model.load_state_dict(first)
        with tempfile.TemporaryDirectory(prefix="policies-") as scratch:
            model.save_pretrained(Path(scratch, "model"))
            print(f"{what}:", asyncio.run(publish_all(model, rate, versions, Path(scratch))))


if __name__ == "__main__":
    main()
