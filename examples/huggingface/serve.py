"""Answer a prompt with each new version of a job's weights, with plain transformers.

    python serve.py MODEL_FOLDER ROOT "a prompt"     # while the job trains

Run it on the trainer's node, or where the root is mounted. MODEL_FOLDER has the model that the
trainer started with, and its tokenizer. Ray is not needed.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from trinity_sync import WeightReader


async def generate_answers(
    reader: WeightReader, model: Any, tokenizer: Any, prompt: str
) -> AsyncIterator[tuple[int, str]]:
    """Yield the step of each new version, and the model's answer with it.

    Args:
        reader: reader of the job.
        model: model to load versions into.
        tokenizer: the model's tokenizer.
        prompt: text to complete.
    """
    tokens = tokenizer(prompt, return_tensors="pt")
    while await reader.wait_newer():
        step = reader.load_into(model)
        answer = model.generate(**tokens, max_new_tokens=32, do_sample=False)
        yield step, tokenizer.decode(answer[0])


async def main(folder: str, root: str, prompt: str) -> None:
    """Print an answer for each version until interrupted.

    Args:
        folder: folder of the model and its tokenizer.
        root: the job's root.
        prompt: text to complete.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with WeightReader(root=root, name="serve") as reader:
        async for step, answer in generate_answers(reader, model, tokenizer, prompt):
            print(f"step {step}: {answer}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
