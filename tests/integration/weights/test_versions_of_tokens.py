"""Which version made a token, told of an engine that is updated in mid-generation, is checked.

The engine is transformers' `generate`; between two tokens a `WeightReader` loads what the trainer
has published. Log-probabilities that are computed again tell which weights made a token.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from tests.support.models import tiny
from trinity_sync import CheckpointCoordinator, RolloutLedger, WeightReader

Spans = list[tuple[int, int, int]]
PROMPT, NEW = [3, 1, 4, 1, 5], 24
UPDATES = (6, 15)
"""Numbers of generated tokens after which the engine gets the weights of steps 2 and 3."""
TRUE: Spans = [(1, 0, 5), (2, 6, 14), (3, 15, 23)]


class Engine(StoppingCriteria):
    """Notes for each token the version that has made it, and loads a new one between two."""

    def __init__(self, root: Path, saves: CheckpointCoordinator) -> None:
        self.model, self.saves = tiny(31).eval(), saves
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.made_by: list[int] = []
        self.reader = WeightReader(root=root, name="rollout")
        self.update()

    def update(self) -> None:
        """Train a step, and load it as a rollout worker does."""
        trained = tiny(31, seed=len(self.weights)).state_dict()
        self.weights[step := len(self.weights) + 1] = trained
        self.saves.upload(step, lambda: trained)
        assert self.reader.load_into(self.model) == step

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.made_by.append(self.reader.version.step)  # type: ignore[union-attr]
        if len(self.made_by) in UPDATES:
            self.update()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def generate(self, **options: Any) -> tuple[list[int], torch.Tensor]:
        """Return sampled tokens, and the log-probability of each as it was sampled."""
        torch.manual_seed(1)
        how = GenerationConfig(do_sample=True, max_new_tokens=NEW, pad_token_id=0, eos_token_id=-1)
        made = self.model.generate(
            torch.tensor([PROMPT]),
            how,
            stopping_criteria=StoppingCriteriaList([self]),
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        tokens = made.sequences[0, len(PROMPT) :]
        logits = torch.stack(made.logits)[:, 0].log_softmax(-1)
        return tokens.tolist(), logits.gather(1, tokens[:, None])[:, 0]

    def find_wrong(self, tokens: list[int], sampled: torch.Tensor, spans: Spans) -> list[int]:
        """Return the tokens that the version which ``spans`` tells has not made."""
        wrong, judge, whole = list[int](), tiny(31).eval(), torch.tensor([PROMPT + tokens])
        for step, first, last in spans:
            judge.load_state_dict(self.weights[step])
            logits = judge(whole, use_cache=False).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            again = logits.gather(1, whole[0, len(PROMPT) :, None])[:, 0]
            differs = ~torch.isclose(again, sampled, rtol=0, atol=1e-4)
            wrong += [each for each in range(first, last + 1) if differs[each]]
        return wrong


@pytest.fixture
def engine(root: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    with CheckpointCoordinator(root) as saves:
        made = Engine(root, saves)
        with torch.no_grad(), made.reader:
            yield made


@pytest.mark.parametrize(
    ("told", "spans", "wrong", "ages"),
    [
        ("by token", TRUE, [], {0: 9, 1: 9, 2: 6}),
        ("at completion", [(3, 0, 23)], [*range(15)], {0: 24}),
        ("at dispatch", [(1, 0, 23)], [*range(6, 24)], {2: 24}),
        ("a token late", [(1, 0, 6), (2, 7, 15), (3, 16, 23)], [6, 15], {0: 8, 1: 9, 2: 7}),
    ],
)
def test_versions_that_did_not_make_the_tokens_are_found(
    engine: Engine, told: str, spans: Spans, wrong: list[int], ages: dict[int, int]
) -> None:
    tokens, sampled = engine.generate(use_cache=False)
    noted = [(step, [*group]) for step, group in groupby(range(NEW), engine.made_by.__getitem__)]
    assert [(step, each[0], each[-1]) for step, each in noted] == TRUE
    ledger = RolloutLedger()
    ledger.issue(["rollout"])
    ledger.finish(["rollout"], {"rollout": spans})
    ledger.train(["rollout"], 3)
    assert ledger.ages(3) == ages
    assert engine.find_wrong(tokens, sampled, spans) == wrong


def test_tokens_after_an_update_that_leaves_the_cache_are_of_no_version(engine: Engine) -> None:
    tokens, sampled = engine.generate(use_cache=True)
    assert engine.find_wrong(tokens, sampled, TRUE) == [*range(6, 24)]
