"""What was trained, counted without anything that the product says."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Count:
    """Prompts of the dataset by how often the surviving history has trained them.

    The steps of a start survive up to the one from which the next start has resumed.
    """

    lost: list[int]
    repeated: list[int]
    steps: int
    undone: int
    """Steps that a later start has trained again, from the step that it resumed from."""

    @classmethod
    def of(cls, truth: Iterable[dict[str, Any]], prompts: int) -> "Count":
        history, undone = dict[int, list[int]](), 0
        for note in truth:
            if "resumed" in note:
                later = [step for step in history if step > note["resumed"]]
                undone += len(later)
                for step in later:
                    del history[step]
            if "ids" in note:
                history[note["step"]] = note["ids"]
        trained = Counter(each for ids in history.values() for each in ids)
        assert trained.keys() <= set(range(prompts))
        return cls(
            [each for each in range(prompts) if not trained[each]],
            [each for each, times in trained.items() if times > 1],
            len(history),
            undone,
        )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
