"""New weights in transformers' continuous batching, with requests waiting, in flight and aborted.

The manager's calls are those of docs/how-to/read-weights.md.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from tests.support.models import configure
from trinity_sync import CheckpointCoordinator, WeightReader

NEW = 100
PROMPTS = [[(i * j + 3) % 63 + 1 for j in range(40 + i)] for i in range(4)]
"""Longer than a block of the cache, so that later requests could share it."""
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1)


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"inner": 128, "layers": 2, "max_position_embeddings": 256}
    config = configure(Qwen2Config, 64, 64, tie_word_embeddings=False, **sizes)
    return Qwen2ForCausalLM(config).eval()


class Trainer:
    """A trainer that publishes other weights at each step."""

    def __init__(self, saves: CheckpointCoordinator) -> None:
        self.model = make_model()
        self.step = 0
        self._saves = saves

    def publish(self) -> int:
        self.step += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self._saves.upload(self.step, self.model.state_dict)
        return self.step

    def answer(self, tokens: list[int], new: int = NEW) -> list[int]:
        """The greedy tokens of plain `generate` with the weights of now."""
        prompt = torch.tensor([tokens])
        mask = torch.ones_like(prompt)  # otherwise tokens equal to the padding count as padding
        plain = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0)
        return self.model.generate(prompt, plain, attention_mask=mask)[0, len(tokens) :].tolist()

    def answers(self, new: int = NEW) -> list[list[int]]:
        return [self.answer(prompt, new) for prompt in PROMPTS]


@pytest.fixture
def trainer(root: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    with CheckpointCoordinator(root) as saves:
        yield Trainer(saves)


@pytest.fixture
def reader(trainer: Trainer, root: Path) -> Iterator[WeightReader]:
    with WeightReader(root=root, name="rollout") as made:
        yield made


def batching(*, share: bool = True) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        block_size=32, num_blocks=64, max_batch_tokens=256, allow_block_sharing=share
    )


@pytest.mark.parametrize("keep", [False, True])
def test_each_batch_is_answered_with_the_newest_version(
    trainer: Trainer, reader: WeightReader, keep: bool
) -> None:
    model, seen = make_model(), []
    for _ in range(3):
        trainer.publish()
        assert reader.load_into(model) == trainer.step
        batch = model.generate_batch(
            PROMPTS,
            generation_config=GREEDY,
            continuous_batching_config=batching(share=not keep),
            persistent_manager=keep,
            progress_bar=False,
            max_new_tokens=24,
        )
        answers = [each.generated_tokens for each in batch.values()]
        assert answers == trainer.answers(24)
        assert answers not in seen
        seen.append(answers)
    model.destroy_cached_continuous_batching_manager()


class Rollout:
    """A model that answers with one manager for each version."""

    def __init__(self, reader: WeightReader) -> None:
        self.model = make_model()
        self.reader = reader
        self.manager = self.start()

    def start(self) -> Any:
        manager = self.model.init_continuous_batching(GREEDY, batching())
        manager.start()
        return manager

    def submit(self, prompts: list[list[int]], **options: Any) -> list[str]:
        """Submit requests and wait until each of them has its first token."""
        names = [self.manager.add_request(each, streaming=True, **options) for each in prompts]
        waiting = set(names)
        while waiting:
            waiting.discard(self.manager.get_result(timeout=30).request_id)
        return names

    def update(self, **stop: Any) -> Any:
        """Load the newest version, and return the manager of the one before."""
        before = self.manager
        before.stop(**stop)
        assert before.add_request(PROMPTS[0]) is None
        self.reader.load_into(self.model)
        self.manager = self.start()
        return before


def results(manager: Any, names: list[str]) -> list[Any]:
    ended: dict[str, Any] = {}
    while len(ended) < len(names):
        result = manager.get_result(timeout=30)
        if result.error or result.is_finished():
            ended[result.request_id] = result
    return [ended[name] for name in names]


@pytest.fixture
def rollout(trainer: Trainer, reader: WeightReader) -> Iterator[Rollout]:
    trainer.publish()
    made = Rollout(reader)
    made.update()
    yield made
    made.manager.stop(hard_stop=True)


def test_requests_in_flight_end_with_the_version_that_they_began_with(
    trainer: Trainer, rollout: Rollout
) -> None:
    for _ in range(3):
        expected = trainer.answers()
        trainer.publish()
        names = rollout.submit(PROMPTS)
        assert len(rollout.manager.batch_processor.scheduler.active_requests) == len(PROMPTS)
        before = rollout.update()
        assert rollout.reader.version.step == trainer.step
        assert [each.generated_tokens for each in results(before, names)] == expected
        assert trainer.answers() != expected


def test_aborted_requests_continue_with_the_new_version(trainer: Trainer, rollout: Rollout) -> None:
    old = trainer.answers()
    trainer.publish()
    names = rollout.submit(PROMPTS)
    before = rollout.update(hard_stop=True)
    begun = [each.generated_tokens for each in results(before, names)]
    assert begun == [answer[: len(part)] for answer, part in zip(old, begun, strict=True)]
    for prompt, part in zip(PROMPTS, begun, strict=True):
        assert 0 < len(part) < NEW
        names = rollout.submit([prompt + part], max_new_tokens=NEW - len(part))
        (rest,) = results(rollout.manager, names)
        assert rest.generated_tokens == trainer.answer(prompt + part, NEW - len(part))
