"""The example for plain transformers, with a real model and published images, without Ray."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.job import Job
from tests.support.weights import VersionFile, upload
from trinity_sync.weights.reader import WeightReader

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_transformers_model_answers_with_the_weights_of_each_version(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("demo", "huggingface"):
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    from grpo_copy.model import create_model  # type: ignore[import-not-found]
    from serve import generate_answers  # type: ignore[import-not-found]

    versions = VersionFile(tmp_path / "version.json")
    served = AutoModelForCausalLM.from_pretrained(create_model(tmp_path / "model")).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    async def follow() -> None:
        with WeightReader(versions, name="test", timeout_s=250) as reader:
            said = generate_answers(reader, served, tokenizer, "<bos> a <copy>")
            for step in (1, 2):
                folder = create_model(tmp_path / f"trained-{step}", seed=step)
                trained = AutoModelForCausalLM.from_pretrained(folder).eval()
                versions.tell(upload(job, step, trained.state_dict()))
                found, answer = await anext(said)
                tokens = tokenizer("<bos> a <copy>", return_tensors="pt")
                expected = trained.generate(**tokens, max_new_tokens=32, do_sample=False)
                assert (found, answer) == (step, tokenizer.decode(expected[0]))
                state = trained.state_dict()
                assert all(torch.equal(t, state[n]) for n, t in served.state_dict().items())

    asyncio.run(follow())
